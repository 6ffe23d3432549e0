"""Tiers: which tests are in them, by the table of what they cost, and how that table is made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import costs
import pytest
import tiers
from ci_scripts import ROOT
from costs import LIMIT, Cost, Costs
from tiers import PROVES, Tiers

SUITE = """
import pytest

@pytest.mark.parametrize("case", range(3))
def test_many(case): pass

def test_one(): pass
"""
FILES = (
    "unit/test_quick_and_slow.py",
    "unit/test_not_timed.py",
    "distributed/test_somewhere.py",
    "distributed/test_proof_of_tiers.py",
)
KNOWN = Costs(
    {
        "tests/unit/test_quick_and_slow.py": Cost(1, 0.3),
        "tests/unit/test_quick_and_slow.py::test_many": Cost(3, 6.0),
        "tests/distributed/test_somewhere.py": Cost(4, 0.4),
    }
)


class Ran:
    """Remembers which tests ran, and what was said at the end."""

    def __init__(self) -> None:
        self.tests: list[str] = []

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.tests.append(item.nodeid.removeprefix("tests/"))


def run(folder: Path, tier: str, keep: Path | None = None) -> list[str]:
    for file in FILES:
        place = folder / "tests" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(SUITE, encoding="utf-8")
    ran = Ran()
    plain = ["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--import-mode=importlib"]
    words = ["--rootdir", str(folder), "-q", str(folder / "tests")]
    assert pytest.main([*plain, *words], plugins=[Tiers(tier, KNOWN, keep), ran]) == 0
    return ran.tests


def cases(file: str, *names: str) -> set[str]:
    return {f"{file}::{name}" for name in names}


MANY = ("test_many[0]", "test_many[1]", "test_many[2]")
QUICK = cases("unit/test_quick_and_slow.py", "test_one") | cases("unit/test_not_timed.py", "test_one", *MANY)
ALL = {case for file in FILES for case in cases(file, "test_one", *MANY)}


def test_what_is_quick_is_known_to_be_or_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(run(tmp_path, "quick")) == QUICK
    # 3 cases of 2 s, of which the table knows, 4 of 0.1 s elsewhere, and 4 of which it knows nothing.
    assert "left out: 11 cases of 5 tests, which take about 6 s" in capsys.readouterr().out


def test_the_slow_tier_is_the_rest(tmp_path: Path) -> None:
    assert set(run(tmp_path, "slow")) == ALL - QUICK
    assert set(run(tmp_path, "")) == ALL


def test_the_usual_tier_is_the_quick_one_and_what_a_machine_proves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "PROVES", ("tests/distributed/test_proof_of_tiers.py",))
    assert set(run(tmp_path, "usual")) == QUICK | cases("distributed/test_proof_of_tiers.py", "test_one", *MANY)


def test_a_test_of_another_lane_is_not_quick(tmp_path: Path) -> None:
    suite = "import pytest\n\nclass TestOf:\n    backend = 'other'\n    def test_it(self): pass\n"
    (tmp_path / "tests" / "conformance").mkdir(parents=True)
    (tmp_path / "tests" / "conformance" / "test_suite.py").write_text(suite, encoding="utf-8")
    assert set(run(tmp_path, "quick")) == QUICK


def test_a_run_writes_what_it_took(tmp_path: Path) -> None:
    run(tmp_path, "", tmp_path / "costs.tsv")
    assert (tmp_path / "costs.tsv").exists()
    kept = costs.read(tmp_path / "costs.tsv")
    assert kept.lines == {}  # none of its files is in this checkout
    KNOWN.write(tmp_path / "costs.tsv", tmp_path)
    assert costs.read(tmp_path / "costs.tsv").lines == KNOWN.lines


def measured(known: Costs, **seconds: float) -> dict[str, Cost]:
    return known.with_measured(
        {f"tests/t.py::{name}[{i}]": taken for name, taken in seconds.items() for i in range(2)}
    ).lines


def test_a_slow_test_has_a_line(tmp_path: Path) -> None:
    first = measured(Costs({}), test_a=LIMIT * 0.9, test_b=LIMIT * 1.1)
    assert first == {
        "tests/t.py": Cost(2, pytest.approx(LIMIT * 1.8)),  # type: ignore[arg-type]
        "tests/t.py::test_b": Cost(2, pytest.approx(LIMIT * 2.2)),  # type: ignore[arg-type]
    }
    # Noise moves no line: what was slow must be well below the limit to be quick again.
    assert set(measured(Costs(first), test_a=LIMIT * 0.9, test_b=LIMIT * 0.9)) == set(first)
    assert set(measured(Costs(first), test_a=LIMIT * 0.9, test_b=LIMIT * 0.6)) == {"tests/t.py"}
    assert set(measured(Costs(first), test_a=LIMIT * 0.9)) == {"tests/t.py"}  # the test is gone


def test_what_did_not_run_stays() -> None:
    lines = {"tests/other.py": Cost(1, 1.0), "tests/other.py::test_it": Cost(1, 1.0)}
    assert measured(Costs(lines), test_a=0.1) == {**lines, "tests/t.py": Cost(2, pytest.approx(0.2))}  # type: ignore[arg-type]


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "costs.tsv").write_text("# head\ntests/t.py\t1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"costs.tsv has the line 'tests/t\.py\\t1'"):
        costs.read(tmp_path / "costs.tsv")


def test_each_line_is_of_a_test_that_is_there() -> None:
    """One of a test that was renamed would let the new name be quick, however long it takes."""
    assert [name for name in costs.read().lines if not _is_there(*_parts(name))] == []


def _parts(name: str) -> tuple[str, Sequence[str]]:
    file, *test = name.split("::")
    return file, test


def _is_there(file: str, test: Sequence[str]) -> bool:
    path = ROOT / file
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    own = not test or re.search(rf"def {test[-1]}\(|^{test[-1]} = ", text, re.MULTILINE)
    return bool(own) or file in PROVES  # the suite's tests are in the package
