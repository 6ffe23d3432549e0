"""The list of the mutation gate says what is true: the text is in the file, the test in its own."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from ci_scripts import ROOT, script

mutants = script("mutants")
MUTATIONS = mutants.read(sorted(mutants.LISTS.rglob("*.toml")))


def test_the_list_is_true_and_long_enough() -> None:
    assert mutants.untrue(MUTATIONS) == []
    assert sum(bool(each.test) for each in MUTATIONS) >= 200


def test_each_test_is_there() -> None:
    names: dict[str, set[str]] = {}
    for each in MUTATIONS:
        if not each.test:
            continue
        file, _, function = each.test.partition("::")
        if file not in names:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            names[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function.partition("[")[0] in names[file], each.test


def test_an_entry_that_is_not_true_is_told(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    entry = '[["xamp/errors.py"]]\nname = "{}"\nold = {}\nnew = "x"\ntest = "t"\n'
    path.write_text(entry.format("absent", '"no such text"') + entry.format("often", '"class "'), encoding="utf-8")
    problems = mutants.untrue(mutants.read([path]))
    assert [line.partition(" times")[0].rpartition(" ")[2] for line in problems][:1] == ["0"]
    assert "must be there once" in problems[1]


@pytest.mark.thorough
def test_what_is_caught_and_what_is_not(tmp_path: Path) -> None:
    """In processes of their own, as by hand; the second one changes nothing."""
    path = tmp_path / "list.toml"
    test = "tests/unit/ground/test_containers.py::test_a_packed_sequence_keeps_its_order"
    path.write_text(
        f"""[["xamp/ground/containers.py"]]
name = "broken"
old = "return value.to(dtype)\\n    return _cast_container(value, dtype, device_type)\\n"
new = "return 3\\n    return 3\\n"
test = "{test}"

[["xamp/ground/containers.py"]]
name = "the same"
old = "found: list[torch.Tensor] = []"
new = "found: list[torch.Tensor] = list()"
test = "{test}"
""",
        encoding="utf-8",
    )
    command = [sys.executable, str(ROOT / "ci" / "mutants.py"), "--list", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == "1 of 2 mutations caught (50.0%), 0 equivalent; not caught: xamp/ground/containers.py: the same"


def test_an_entry_without_a_test_runs_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It ran all the tests there are: pytest was given none by name."""
    monkeypatch.setattr(mutants, "prepare", lambda: pytest.fail("something is to be run"))
    same = next(each for each in MUTATIONS if each.equivalent)
    assert mutants.main(["--only", same.name]) == 0
    assert same.equivalent in capsys.readouterr().out
