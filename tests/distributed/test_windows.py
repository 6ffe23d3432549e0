"""Windows of micro-batches under each engine, in which the loss scale moves or another model of the session steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import ERROR
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "window_worker.py"
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0]
"""A growth interval of three steps, of two micro-batches each; the third step overflows."""


@pytest.fixture(scope="module")
def found(forked_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return forked_ranks.results(WORKER, folder=tmp_path_factory.mktemp("windows"))


def test_gradients_that_are_not_reduced_yet_follow_the_scale(found: list[Any]) -> None:
    for windows, _ in found:
        assert len(windows) == 120
        assert {case: off for case, off in windows.items() if not off < ERROR[case.split()[-1]]} == {}


def test_compiled_models_have_the_windows_of_eager_ones(found: list[Any]) -> None:
    """Also where ``initialize`` came before the process group, and a forward ran before anything was compiled."""
    ranks = [compiled for _, compiled in found]
    assert len(ranks[0]) == 42
    assert {case: scales for rank in ranks for case, (scales, _) in rank.items() if scales != SCALES} == {}
    for case, (_, weights) in ranks[0].items():
        assert weights == ranks[1][case][1], case
        eager = torch.tensor(ranks[0][f"{case[:2]}, eager"][1])
        torch.testing.assert_close(torch.tensor(weights), eager, atol=2e-3, rtol=0, msg=case)
