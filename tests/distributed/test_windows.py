"""Windows of micro-batches under each engine, in which the loss scale moves or another model of the session steps.

Covers: xamp.scaling.gradients, xamp.scaling.backwards, xamp.distributed.wrappers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from engine_cases import ERROR
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "window_worker.py"
SCALES = [1024.0, 1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0, 1024.0]
"""A growth interval of three steps, of two micro-batches each; the third step overflows."""


def test_gradients_that_are_not_reduced_yet_follow_the_scale(forked_ranks: Ranks, tmp_path: Path) -> None:
    for windows in forked_ranks.results(WORKER, "engines", folder=tmp_path, covered=False):
        assert len(windows) == 80
        assert {case: off for case, off in windows.items() if not off < ERROR[case.split()[-1]]} == {}


def test_compiled_models_have_the_windows_of_eager_ones(forked_ranks: Ranks, tmp_path: Path) -> None:
    """Also where ``initialize`` came before the process group, and a forward ran before anything was compiled."""
    ranks = forked_ranks.results(WORKER, "compiled", folder=tmp_path, covered=False)
    assert len(ranks[0]) == 21
    assert {case: scales for rank in ranks for case, (scales, _) in rank.items() if scales != SCALES} == {}
    for case, (_, weights) in ranks[0].items():
        assert weights == ranks[1][case][1], case
        eager = torch.tensor(ranks[0][f"{case[:2]}, eager"][1])
        torch.testing.assert_close(torch.tensor(weights), eager, atol=2e-3, rtol=0, msg=case)
