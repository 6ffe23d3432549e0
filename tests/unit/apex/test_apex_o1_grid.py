"""290 expressions under three pairs of dtypes give what the last apex.amp gave, but for what it got wrong.

Covers: xamp.apex._lists, xamp.apex._wrappers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apex_grid
import pytest
import torch

from xamp.apex import _handle as amp

GIVEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "apex" / "o1_grid.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore")  # some expressions are deprecated in torch


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    with torch.random.fork_rng():
        return apex_grid.run(amp)


@pytest.mark.drawn(100)
@pytest.mark.parametrize("expression", GIVEN["oracle"])
def test_dtypes_are_those_of_apex(expression: str, found: dict[str, dict[str, str]]) -> None:
    """Where they are meant to differ, the old behaviour is in the data, with the reason."""
    answers = found[expression]
    oracle, differs = GIVEN["oracle"][expression], GIVEN["differs"].get(expression)
    wanted = [oracle] * len(answers) if isinstance(oracle, str) else oracle
    then = [None] * len(answers) if differs is None else differs["then"]
    for pair, old, new in zip(GIVEN["pairs"], wanted, then, strict=True):
        allowed = old if new is None else new
        assert answers[pair] in ([allowed] if isinstance(allowed, str) else allowed), (pair, differs)


def test_every_recorded_expression_is_evaluated(found: dict[str, dict[str, str]]) -> None:
    assert set(found) == set(GIVEN["oracle"])


def test_without_casts_the_grid_is_another(found: dict[str, dict[str, str]]) -> None:
    class Off:
        @staticmethod
        def init() -> amp.NoOpHandle:
            return amp.NoOpHandle()

    plain = apex_grid.run(Off)
    assert sum(plain[name] != found[name] for name in found) > 150
