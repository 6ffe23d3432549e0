"""Steps in one pass on two ranks under DDP: equal on both, and as torch steps.

Covers: xamp.scaling.one_pass, xamp.distributed.ddp.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import Ranks

STEPS, OVERFLOW, REDUCED_TWICE = 9, 3, 6  # as in the worker
WORKER = Path(__file__).with_name("one_pass_worker.py")
EXACT = ("outcomes", "scales", "counts")
"""What is equal on both ways. The rest differs by roundings."""


@pytest.mark.parametrize("view", ["view", "no view"])
@pytest.mark.parametrize(("level", "form"), [("O2", "AdamW"), ("O5", "SGD")])
def test_two_ranks_step_in_one_pass(level: str, form: str, view: str, forked_ranks: Ranks, tmp_path: Path) -> None:
    """Gradients in buckets are not held, for the next forward writes these anew; nor are those of two reductions."""
    first, second = forked_ranks.results(WORKER, level, form, view, folder=tmp_path)
    assert first == second
    ours, theirs = first["one-pass"], first["auto"]
    assert ours["held"] == [view != "view" and number != REDUCED_TWICE for number in range(STEPS)]
    assert not any(theirs["held"])
    assert ours["outcomes"] == ["SKIPPED" if number == OVERFLOW else "APPLIED" for number in range(STEPS)]
    assert {key: ours[key] for key in EXACT} == {key: theirs[key] for key in EXACT}
    assert_near(ours["norms"], theirs["norms"], 1e-5)
    assert_near(ours["masters"], theirs["masters"], 2e-6)
    assert_near(ours["weights"], theirs["weights"], float(torch.finfo(DTYPES[level]).eps))


DTYPES = {"O2": torch.float16, "O5": torch.bfloat16}


def assert_near(found: Any, wanted: Any, error: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=error, atol=error)
