"""Trains a task, and computes its gradients: under xamp, in plain torch, by hand with torch.amp, and in fp64."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import xamp
from xamp.testing.lane import Lane
from xamp.testing.models import Batch, Task, parts_of

__all__ = [
    "FIRST_SCALE",
    "Gradients",
    "Loop",
    "by_hand",
    "distance",
    "exact",
    "match",
    "ours",
    "plain_gradients",
    "start_loop",
    "train",
    "worst",
]

FIRST_SCALE = 1024.0
"""The initial loss scale; under it no task's gradients overflow."""

Gradients = Mapping[str, torch.Tensor]
"""Gradients by the parameter's name, in fp64 on the CPU, dense."""


@dataclasses.dataclass
class Loop:
    """A task in training.

    Attributes:
        task: The task.
        lane: The lane that it trains on.
        model: The model.
        optimizers: The model's optimizers.
        managed: Whether xamp manages them; else the loop is plain torch.
        run: What the loop calls in place of the model, such as its compiled form.
        losses: The loss of the first phase, or the task's curve, before each step.
    """

    task: Task
    lane: Lane
    model: Any
    optimizers: Sequence[Optimizer]
    managed: bool
    run: Any = None
    losses: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def step(self, spoil: Callable[[], object] | None = None) -> None:
        """Take one training step; ``spoil`` is called after each backward, before the gradients are checked."""
        batch = self.task.batch(len(self.losses), self.lane.device)
        run = self.model if self.run is None else self.run
        if self.task.curve is not None:
            with torch.no_grad():
                self.losses.append(self.task.curve(run, batch))
        for index, phase in enumerate(self.task.phases):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = phase.loss(run, batch)
            if index == 0 and self.task.curve is None:
                self.losses.append(loss.detach())
            mine = [self.optimizers[i] for i in phase.optimizers]
            with xamp.scale_loss(loss, mine) if self.managed else contextlib.nullcontext(loss) as scaled:
                scaled.backward()
                if spoil is not None:
                    spoil()
            for optimizer in mine:
                optimizer.step()

    def steps(self, count: int) -> torch.Tensor:
        """Take ``count`` steps; return all losses so far, (steps,), fp32, on the CPU."""
        for _ in range(count):
            self.step()
        return torch.stack(self.losses).float().cpu()

    def stepped(self) -> list[torch.Tensor]:
        """Copies of the tensors that the optimizers step, masters or parameters, on the CPU."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return [p.detach().cpu().clone() for group in groups for p in group["params"]]


def start_loop(task: Task, lane: Lane, level: str | None, *, sgd: bool = False, **options: Any) -> Loop:
    """Make a loop that is ready for its first step.

    Args:
        task: What is trained; the same weights each time.
        lane: Where; the clause ends there if it does not declare the level.
        level: Its name; None: plain torch in fp32.
        sgd: With SGD in place of the task's own optimizers.
        **options: For ``initialize``.
    """
    if level is not None:
        lane.need(level)
    model = task.make(lane.device)
    optimizers = (task.tune_sgd if sgd else task.tune)(model)
    if level is not None:
        settings = {"init_scale": FIRST_SCALE, "verbosity": 0, **options}
        xamp.initialize(parts_of(task, model), optimizers, level=level, **settings)
    return Loop(task, lane, model, optimizers, level is not None)


def train(task: Task, lane: Lane, level: str | None, steps: int, **options: Any) -> torch.Tensor:
    """Train for ``steps``; return the loss before each, (steps,), fp32, on the CPU. See :func:`start_loop`."""
    return start_loop(task, lane, level, **options).steps(steps)


# ---------------------------------------------------------------- equal, as far as a device can repeat itself


def worst(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest difference; inf if the shapes or the number of tensors differ, or the difference is nan."""
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return float("inf")
    gaps = [(a.cpu().double() - b.cpu().double()).abs().max().item() for a, b in zip(found, wanted, strict=True)]
    return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)


def match(found: Sequence[torch.Tensor], make: Callable[[], Sequence[torch.Tensor]]) -> tuple[float, float]:
    """Return how far ``found`` is from what ``make`` gives, and how far it may be.

    If ``make`` gives the same bits twice, no difference is allowed. Otherwise the device sums in any order, and the
    bound is a multiple of the difference between two runs.
    """
    first, second = make(), make()
    spread = worst(second, first)
    return worst(found, first), 8 * spread + 1e-6 if spread else 0.0


# ---------------------------------------------------------------- gradients


def _loss(task: Task, model: Any, batch: Batch) -> torch.Tensor:
    """The sum of the losses of all phases."""
    return torch.stack([phase.loss(model, batch) for phase in task.phases]).sum()


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    return (grad.to_dense() if grad.is_sparse else grad).detach().cpu().double()


def _of(model: nn.Module) -> Gradients:
    return {name: _numbers(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def exact(task: Task, model: nn.Module, batch: Batch) -> Gradients:
    """The gradients in fp64, on the CPU, without xamp."""
    double = copy.deepcopy(model).cpu().double()
    x, y = (t.cpu().double() if t.is_floating_point() else t.cpu() for t in batch)
    _loss(task, double, (x, y)).backward()
    return _of(double)


def plain_gradients(task: Task, model: nn.Module, batch: Batch) -> Gradients:
    """The gradients in fp32 on the device, without xamp."""
    plain = copy.deepcopy(model)
    _loss(task, plain, batch).backward()
    return _of(plain)


def by_hand(task: Task, model: nn.Module, batch: Batch, dtype: torch.dtype) -> Gradients | None:
    """The gradients of the loop that ``torch.amp`` documents; None if torch itself cannot run it on the device."""
    kind, mine = batch[0].device.type, copy.deepcopy(model)
    optimizers = task.tune_sgd(mine)
    try:
        scaler = torch.amp.GradScaler(kind, init_scale=FIRST_SCALE, enabled=dtype == torch.float16)
        with torch.autocast(kind, dtype=dtype):
            loss = _loss(task, mine, batch)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, AssertionError):
        return None
    return _of(mine)


def ours(task: Task, model: nn.Module, batch: Batch, level: str, *, bare: bool = False, **options: Any) -> Gradients:
    """The gradients under xamp, unscaled, of masters where there are any; ``bare``: without ``scale_loss``."""
    mine = copy.deepcopy(model)
    optimizers = task.tune_sgd(mine)
    names = {id(p): name for name, p in mine.named_parameters()}
    order = [[names[id(p)] for group in o.param_groups for p in group["params"]] for o in optimizers]
    settings = {"init_scale": FIRST_SCALE, "verbosity": 0, **options}
    xamp.initialize(parts_of(task, mine), optimizers, level=level, **settings)
    loss = _loss(task, mine, batch)
    if bare:
        loss.backward()
    else:
        with xamp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
    found = {}
    for optimizer, own in zip(optimizers, order, strict=True):
        for name, param in zip(own, xamp.master_params(optimizer), strict=True):
            if param.grad is not None:
                found[name] = _numbers(param.grad)
    return found


def distance(found: Gradients, wanted: Gradients) -> float:
    """Norm of the error over norm of the gradient, both of the whole vector; inf if a parameter has no gradient."""
    if found.keys() != wanted.keys():
        return float("inf")
    error = sum((found[name] - wanted[name]).square().sum().item() for name in wanted)
    return float((error / sum(g.square().sum().item() for g in wanted.values())) ** 0.5)
