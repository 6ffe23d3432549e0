"""Training runs that are saved and resumed: how they train, and what is compared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from lanes import Lane
from managed_models import LEVELS, Net
from torch.optim import SGD, Adam, Optimizer

import xamp
from xamp.testing.runs import ORDERS, through_a_file

__all__ = [
    "ORDERS",
    "VARIANTS",
    "Run",
    "backward",
    "each_order",
    "each_variant",
    "everything",
    "load",
    "save",
    "start",
    "through_a_file",
    "train",
]

torch.set_num_threads(1)  # with a second thread on a busy machine a batch norm takes 17 ms, not 0.1

VARIANTS: dict[str, dict[str, Any]] = {
    **{level: {"level": level} for level in LEVELS},
    "O2 without masters": {"level": "O2", "master_weights": False},
    "O3 with masters": {"level": "O3", "master_weights": True},
    "O5 dynamic": {"level": "O5", "loss_scale": "dynamic"},
    "O1 static": {"level": "O1", "loss_scale": 32.0},
}
"""Arguments of ``initialize``; each variant needs other contents in a checkpoint."""

each_variant = pytest.mark.parametrize("variant", VARIANTS)
each_order = pytest.mark.parametrize("order", ORDERS, ids="-".join)

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda params: SGD(params, lr=0.125, momentum=0.9),
    "Adam": lambda params: Adam(params, lr=0.125, eps=1e-3),
}


@dataclasses.dataclass
class Run:
    """A model and its optimizer in a session."""

    model: Any
    optimizer: Optimizer

    def part(self, name: str) -> Any:
        return {"model": self.model, "optimizer": self.optimizer, "xamp": xamp.session(self.optimizer)}[name]

    @property
    def scale(self) -> float:
        return xamp.loss_scale(self.optimizer)


def start(lane: Lane, variant: str = "O2", *, seed: int = 1, optimizer: str = "SGD", **options: Any) -> Run:
    """A run whose scale starts at 64 and grows after three clean updates; skips if the device lacks the level."""
    told = {**VARIANTS[variant], **options}
    if told["level"] not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {told['level']}")
    torch.manual_seed(seed)
    model = Net().to(lane.device)
    made = OPTIMIZERS[optimizer](model.parameters())
    xamp.initialize(model, made, **{"init_scale": 64.0, "growth_interval": 3, "verbosity": 0, **told})
    return Run(model, made)


def train(run: Run, lane: Lane, steps: Iterable[int], overflows: Sequence[int] = ()) -> list[str]:
    """Take ``steps``, whose numbers choose the data; return their outcomes (none in a disabled session)."""
    outcomes = []
    for step in steps:
        run.optimizer.zero_grad()
        backward(run, lane, step, overflow=step in overflows)
        run.optimizer.step()
        last = xamp.session(run.optimizer).last_step
        outcomes += [] if last is None else [last.name]  # type: ignore[union-attr]
    return outcomes


def backward(run: Run, lane: Lane, step: int, *, overflow: bool = False, **options: Any) -> None:
    """``scale_loss`` and backward on the data of ``step``; overflows only if the level checks gradients."""
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step)).to(lane.device)
    loss = (run.model(x)[0] - 1.0).float().square().mean()
    with xamp.scale_loss(loss, run.optimizer, **options) as scaled:
        scaled.backward()
        if overflow and xamp.session(run.optimizer).policy.checks:
            lane.overflow_(run.model.inner.weight.grad)


def save(run: Run) -> dict[str, Any]:
    """The three states, as they come out of a file."""
    return through_a_file({name: run.part(name).state_dict() for name in ORDERS[0]})  # type: ignore[no-any-return]


def load(run: Run, state: dict[str, Any], order: Sequence[str] = ORDERS[0]) -> None:
    """Load the states named in ``order``, in that order."""
    for name in order:
        run.part(name).load_state_dict(state[name])


def everything(run: Run) -> dict[str, Any]:
    """A copy of all that must be equal if two runs are in the same state."""
    stats = xamp.session(run.optimizer).stats
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in run.model.parameters()],
            "buffers": list(run.model.buffers()),
            "masters": [p.detach() for p in xamp.master_params(run.optimizer)],
            "optimizer": run.optimizer.state_dict(),
            "xamp": xamp.state_dict(run.optimizer),
            "stats": [stats.applied, stats.skipped],
        }
    )
