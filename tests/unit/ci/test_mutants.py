"""The mutation gate: what it makes of code, which it takes, and what it says of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci_scripts import ROOT

from ci import mutants


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["boundary: a < b -> (a <= b)", "negated: a < b -> (a >= b)"]),
        ("x = a and b", ["and-or: a and b -> (a or b)"]),
        ("x = not a", ["not: not a -> (a)"]),
        ("x *= a", ["arithmetic: x *= a -> x /= a", "deleted: x *= a -> pass"]),
        ("x = [0, 2, 0.0, 0.5, True]", ["0 -> 1", "2 -> 3", "0.0 -> 1.0", "0.5 -> 1.0", "True -> False"]),
        ("return a", ["returned: return a -> return None"]),
        ("x.y = a", ["deleted: x.y = a -> pass"]),
        ("x = f(a, b.c)", ["swapped: f(a, b.c) -> (f(b.c, a))"]),
        ("x = any(a)", ["other-call: any -> all"]),
        ("x = a if b else c", ["forced: b -> (True)", "forced: b -> (False)"]),
        ("with a, b(): c = d", ["with: with a, b(): -> if True:"]),
        ("@a\n    def g(): b = c", ["decorator: @a -> nothing"]),
        ("x: Literal[1] = 'text' + a", []),
        ("assert isinstance(a, B) and 1 < 2, f'{1 + 2}'", []),
    ],
)
def test_each_operator(line: str, expected: list[str]) -> None:
    text = f"def f():\n    {line}\n"
    made = mutants.mutants_of("m.py", text)
    assert [f"{each.identity.split('::')[2]}: {each.change}".removeprefix("constant: ") for each in made] == expected
    sources = {ast.unparse(ast.parse(each.source(text))) for each in made}
    assert len(sources - {ast.unparse(ast.parse(text))}) == len(expected)


def test_the_table_is_true() -> None:
    table = mutants.tomllib.loads((ROOT / "ci" / "mutants.toml").read_text(encoding="utf-8"))
    assert mutants.untrue(table) == []
    table["equivalent"] += [{**table["equivalent"][0], "mutant": f"xamp/policy.py::gone::not::{k}"} for k in (1, 2)]
    assert len(mutants.untrue(table)) == 2


CODE = "def limit(a):\n    if a > 3:\n        return 3\n    return a\n\n\ndef count(a):\n    while a < 3: a += 1\n"
TESTS = """import subprocess, sys
from xamp.room.code import count, limit
def test_small():
    assert limit(1) == 1
def test_a_child_has_it_too():
    words = [sys.executable, "-c", "from xamp.room.code import limit; print(limit(5))"]
    assert subprocess.run(words, capture_output=True, text=True, cwd="/").stdout == "3\\n"
def test_count():
    count(1)
"""
TABLE = """seed = "s"
modules = {"xamp/room/code.py" = 9}
also = {}
equivalent = [{mutant = "xamp/room/code.py::limit::boundary::1", change = "a > 3 -> (a >= 3)", why = "so"}]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    written = {"xamp/__init__.py": "", "xamp/room/__init__.py": "", "pyproject.toml": "", "ci/mutants.tsv": ""}
    written |= {"xamp/room/code.py": CODE, "tests/unit/room/test_code.py": TESTS, "ci/mutants.toml": TABLE}
    written["ci/mutants.py"] = (ROOT / "ci" / "mutants.py").read_text(encoding="utf-8")
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words in ("init -q -b main", "add -A", "-c user.name=a -c user.email=a@b commit -q -m a"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    return tmp_path


def gate(project: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "ci.mutants", "--workers", "2", *words]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, done.stdout


def test_what_is_killed_and_what_survives(project: Path) -> None:
    code, said = gate(project, "--only", "limit::", "--keep")
    wrong = [line for line in said.splitlines() if "listed as equivalent" in line]  # boundary::1 is, and survives
    name = "xamp/room/code.py::limit::constant::1"
    assert (code, wrong) == (1, [f"{name} (line 2), listed as equivalent: False, SURVIVED 3 tests"])
    words = re.split(r"\s|::", (project / "ci/mutants.tsv").read_text(encoding="utf-8"))
    assert words[2:-1:6] == ["constant", "forced", "forced", "negated", "returned"]
    assert [word[5:] for word in words[5::6]] == ["a_child_has_it_too", "small", "a_child_has_it_too", "small", "small"]
    assert (project / "xamp/room/code.py").read_text(encoding="utf-8") == CODE


def test_what_differs_from_a_commit(project: Path) -> None:
    (project / "xamp/room/code.py").write_text(f"# more\nx = 1\n{CODE.replace('+= 1', '+= 2')}", encoding="utf-8")
    said = gate(project, "--changed", "--list")[1]
    assert {line.split("::")[1] for line in said.splitlines() if "::" in line} == {"<module>", "count"}
