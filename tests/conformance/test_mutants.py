"""The suite is proved: each clause fails on something that is broken on purpose, and passes where nothing is.

Covers: xamp.testing.*.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import checkpoint_mutants
import compiled_mutants
import distributed_mutants
import fp8_mutants
import levels_mutants
import numerics_mutants
import operators_mutants
import optimizers_mutants
import overhead_mutants
import probe_mutants
import pytest
import scaling_mutants
from mutants import Mutant

from xamp.casting import forward
from xamp.policy import LEVELS
from xamp.testing import TIERS, Conformance, lane
from xamp.testing.lane import CAPABILITIES, open_lane
from xamp.testing.run import Result, run
from xamp.testing.tier import Tier

MUTANTS: list[Mutant] = [
    *probe_mutants.MUTANTS,
    *operators_mutants.MUTANTS,
    *levels_mutants.MUTANTS,
    *numerics_mutants.MUTANTS,
    *fp8_mutants.MUTANTS,
    *optimizers_mutants.MUTANTS,
    *scaling_mutants.MUTANTS,
    *checkpoint_mutants.MUTANTS,
    *distributed_mutants.MUTANTS,
    *compiled_mutants.MUTANTS,
    *overhead_mutants.MUTANTS,
]


def _clauses() -> list[str]:
    """Of each tier, also where several classes make it up."""
    return [
        f"{owner.tier}.{name.removeprefix('test_')}"
        for owner in Conformance.__mro__
        if issubclass(owner, Tier)
        for name in vars(owner)
        if name.startswith("test_")
    ]


def test_pytest_runs_the_tiers_in_order() -> None:
    found = [owner.tier for owner in reversed(Conformance.__mro__) if issubclass(owner, Tier) and owner.tier]
    assert list(dict.fromkeys(found)) == list(TIERS)
    assert all(issubclass(owner, Tier) and owner.tier for owner in Conformance.__bases__)


def test_each_clause_has_a_mutant() -> None:
    assert {mutant.clause for mutant in MUTANTS} == set(_clauses())


def test_no_clause_hides_another() -> None:
    names = [clause.partition(".")[2] for clause in _clauses()]
    assert sorted(names) == sorted(set(names))


def test_requirements_can_fail() -> None:
    """Each capability that can be required is asked for by some clause."""
    folder = Path(lane.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.name != "lane.py")
    asked = set(re.findall(r'lane\.(?:need|cannot)\(\s*"(\w+)"', source)) | set(LEVELS) | {"float16", "bfloat16"}
    assert set(CAPABILITIES) == asked


@pytest.fixture(autouse=True)
def _classes_made_anew() -> Iterator[None]:
    """A class under a policy is made once, from functions as they are then: neither before a fault nor with it."""
    forward._subclasses.clear()
    yield
    forward._subclasses.clear()


SLOW_TIERS = ("distributed", "compiled", "overhead")
"""Of 149 mutants they have 22, which take two thirds of the time."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, id=str(mutant), marks=pytest.mark.thorough if mutant.clause.startswith(SLOW_TIERS) else ())
        for mutant in MUTANTS
    ],
)
def test_the_clause_meant_for_it_fails(mutant: Mutant) -> None:
    begins = re.escape(mutant.error) or "AssertionError|assert |Failed: DID NOT RAISE|Failed: the clause left"

    def is_meant(result: Result) -> bool:
        return result.outcome == "failed" and bool(re.match(begins, result.reason))

    with mutant.breaks():
        results = run([open_lane(mutant.backend)], [mutant.clause], until=is_meant)
    assert results, f"there is no clause {mutant.clause}"
    assert is_meant(results[-1]), {result.clause: (result.outcome, result.reason) for result in results}
