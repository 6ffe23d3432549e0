"""Tiers: which tests are in them, by the table of what they cost, and that the table names tests that are there.

Covers: tests/support/tiers.py, tests/support/costs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import costs
import pytest
from ci_scripts import ROOT
from costs import LIMIT, Cost, Costs
from tiers import PROVES, Tiers

KNOWN = Costs({"tests/unit/test_known.py": Cost(1, 0.3), "tests/unit/test_known.py::test_slow": Cost(1, 6.0)})


class Ran:
    def __init__(self) -> None:
        self.tests: set[str] = set()

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.tests.add(item.nodeid.removeprefix("tests/"))


def run(folder: Path, tier: str) -> set[str]:
    for file in ("unit/test_known.py", "unit/test_new.py", "distributed/test_ranks.py"):
        (folder / "tests" / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tests" / file).write_text("def test_slow(): pass\ndef test_one(): pass\n", encoding="utf-8")
    ran = Ran()
    plain = ["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--import-mode=importlib", "-q"]
    assert pytest.main([*plain, "--rootdir", str(folder), str(folder)], plugins=[Tiers(tier, KNOWN, None), ran]) == 0
    return ran.tests


def test_what_is_quick_is_known_to_be_or_new(tmp_path: Path) -> None:
    quick, every = run(tmp_path, "quick"), run(tmp_path, "")
    assert quick == {"unit/test_known.py::test_one", "unit/test_new.py::test_slow", "unit/test_new.py::test_one"}
    assert (run(tmp_path, "slow"), len(every)) == (every - quick, 6)


def test_a_slow_test_has_a_line_until_it_is_well_below_the_limit() -> None:
    def lines(known: Costs, seconds: float) -> set[str]:
        return set(known.with_measured({"tests/t.py::test_a": seconds * LIMIT}).lines)

    slow = Costs({"tests/t.py": Cost(0, 0.0), "tests/t.py::test_a": Cost(1, LIMIT * 1.1)})
    assert lines(Costs({}), 1.1) == lines(slow, 0.9) == {"tests/t.py", "tests/t.py::test_a"}
    assert lines(Costs({}), 0.9) == lines(slow, 0.6) == {"tests/t.py"}


def test_each_line_is_of_a_test_that_is_there() -> None:
    """One of a test that was renamed would let the new name be quick, however long it takes."""
    for name in costs.read().lines:
        file, *test = name.split("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        own = not test or re.search(rf"def {test[-1]}\(|^{test[-1]} = ", text, re.MULTILINE)
        assert own or file in PROVES, name  # the suite's tests are in the package
