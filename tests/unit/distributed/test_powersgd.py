"""PowerSGD keeps parts of each gradient for the next backward: after an overflow xamp's warning and its cure hold.

Covers: xamp.distributed.ddp.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from one_rank import one_rank
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

import xamp

STEPS, SPOILT = 8, 4


@pytest.fixture
def _alone() -> Iterator[None]:
    with one_rank():
        yield


def train(remembers: bool, level: str = "O1") -> list[str]:
    """Train with one overflow and return what each step did."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    xamp.initialize(model, optimizer, level=level, init_scale=2.0**6, verbosity=0)
    ddp = DistributedDataParallel(model)
    kept = {"use_error_feedback": remembers, "warm_start": remembers}
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, **kept)
    ddp.register_comm_hook(state, power.powerSGD_hook)
    done = []
    for number in range(STEPS):
        optimizer.zero_grad()
        x = torch.rand(4, 32) * (float("inf") if number == SPOILT else 1.0)
        with xamp.scale_loss(ddp(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        done.append(xamp.session(optimizer).last_step.value)  # type: ignore[union-attr]
    return done


@pytest.mark.usefixtures("_alone")
def test_powersgd_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        done = train(remembers=True)
    assert done[SPOILT:] == ["skipped"] * (STEPS - SPOILT)  # what the warning says
    told = [record.getMessage() for record in caplog.records if "powerSGD_hook" in record.getMessage()]
    assert len(told) == 1
    assert "use_error_feedback=False, warm_start=False" in told[0]


@pytest.mark.usefixtures("_alone")
def test_the_cure_cures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "xamp"):
        done = train(remembers=False)
    assert done.count("skipped") == 1
    assert not [record for record in caplog.records if "powerSGD_hook" in record.getMessage()]
