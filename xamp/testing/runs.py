"""Training runs that are saved and resumed: how they train, what is saved, and what must be equal afterwards."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import xamp
from xamp.policy import LEVELS
from xamp.testing.lane import Lane

__all__ = [
    "ORDERS",
    "VARIANTS",
    "Net",
    "Run",
    "everything",
    "exact",
    "load",
    "save",
    "start",
    "through_a_file",
    "train",
]

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    **{level: {"level": level} for level in LEVELS},
    "O0_dynamic": {"level": "O0", "loss_scale": "dynamic"},
    "O5_dynamic": {"level": "O5", "loss_scale": "dynamic"},
    "O1_static": {"level": "O1", "loss_scale": 32.0},
}
"""Arguments of ``initialize``; each variant needs other contents in a checkpoint."""

ORDERS = tuple(itertools.permutations(("model", "optimizer", "xamp")))
"""The orders in which the three states may be loaded."""

_ROWS = 16


class Net(nn.Module):
    """Two linear layers; between them batch norm, which has buffers, and dropout, which draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 4) -> (n, 3)."""
        out: torch.Tensor = self.head(self.drop(torch.relu(self.norm(self.inner(x)))))
        return out


@dataclasses.dataclass(frozen=True)
class Run:
    """A model and its optimizer in a session, on a lane."""

    lane: Lane
    model: Any
    optimizer: Optimizer

    def part(self, name: str) -> Any:
        """The object whose state has this name, one of those in :data:`ORDERS`."""
        return {"model": self.model, "optimizer": self.optimizer, "xamp": xamp.session(self.optimizer)}[name]

    @property
    def scale(self) -> float:
        """The loss scale."""
        return xamp.loss_scale(self.optimizer)


def start(lane: Lane, variant: str = "O2", *, seed: int = 1, optimizer: str = "SGD", **options: Any) -> Run:
    """Make a run whose scale starts at 64 and grows after three clean updates.

    Args:
        lane: The lane to run on. If it does not declare the level, the clause ends here.
        variant: One of :data:`VARIANTS`.
        seed: Seed of the weights.
        optimizer: ``"SGD"``, with momentum, or ``"Adam"``.
        **options: For ``initialize``.
    """
    told = {"init_scale": 64.0, "growth_interval": 3, "verbosity": 0, **VARIANTS[variant], **options}
    lane.need(told["level"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net()
    params = model.to(lane.device).parameters()
    made = SGD(params, lr=0.125, momentum=0.9) if optimizer == "SGD" else Adam(params, lr=0.125, eps=1e-3)
    xamp.initialize(model, made, backend=str(lane), **told)
    return Run(lane, model, made)


def train(run: Run, steps: Iterable[int], overflows: Collection[int] = ()) -> list[str]:
    """Take ``steps``, whose numbers choose the data; return the outcome of each.

    The device overflows at the steps in ``overflows``, if the level checks gradients.
    """
    outcomes = []
    for step in steps:
        run.optimizer.zero_grad()
        x = torch.randn(_ROWS, 4, generator=torch.Generator().manual_seed(step)).to(run.lane.device)
        loss = (run.model(x) - 1.0).square().mean()
        with xamp.scale_loss(loss, run.optimizer) as scaled:
            scaled.backward()
            if step in overflows and xamp.session(run.optimizer).policy.checks:
                run.lane.overflow_(run.model.inner.weight.grad)
        run.optimizer.step()
        last = xamp.session(run.optimizer).last_step
        outcomes += [last.name] if isinstance(last, xamp.StepOutcome) else []  # a disabled session has no outcome
    return outcomes


def through_a_file(state: Any) -> Any:
    """Save ``state`` and load it again; only plain data passes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def save(run: Run) -> dict[str, Any]:
    """The three states, as they come out of a file."""
    return through_a_file({name: run.part(name).state_dict() for name in ORDERS[0]})  # type: ignore[no-any-return]


def load(run: Run, state: Mapping[str, Any], order: Sequence[str] = ORDERS[0]) -> None:
    """Load the states named in ``order``, in that order."""
    for name in order:
        run.part(name).load_state_dict(state[name])


def exact(run: Run) -> dict[str, torch.Tensor]:
    """The tensors that the optimizer steps, by the parameter's name, copied to host memory."""
    names = [name for name, _ in run.model.named_parameters()]
    return {n: p.detach().cpu().clone() for n, p in zip(names, xamp.master_params(run.optimizer), strict=True)}


def everything(run: Run) -> dict[str, Any]:
    """A copy of all that must be equal if two runs are in the same state."""
    return copy.deepcopy(
        {
            "parameters": {name: param.detach() for name, param in run.model.named_parameters()},
            "buffers": dict(run.model.named_buffers()),
            "masters": exact(run),
            "optimizer": run.optimizer.state_dict(),
            "xamp": xamp.state_dict(run.optimizer),
        }
    )
