"""The training loop of the demo: xamp's three lines, and the measurements around them."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from demo_tasks import Task
from torch import Tensor, nn
from torch.optim import Optimizer

import xamp

__all__ = ["Run", "train"]


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of one task at one level.

    Attributes:
        task: the task's name.
        level: the level that it ran at.
        metric: what ``result`` is, ``"loss"`` or ``"accuracy"``.
        result: the task's measure after training.
        losses: the loss of each step.
        step_ms: median time of a step in milliseconds.
        held_bytes: bytes of parameters, gradients, masters and optimizer state at the end of a step.
        overflows: how often a gradient overflowed; each time one step was skipped.
        scale: the loss scale at the end.
        seconds: the time of the whole run.
    """

    task: str
    level: str
    metric: str
    result: float
    losses: Sequence[float]
    step_ms: float
    held_bytes: int
    overflows: int
    scale: float
    seconds: float


def train(task: Task, level: str, device: torch.device, on_step: Callable[[], None]) -> Run:
    """Trains ``task`` at ``level`` from a fixed start.

    Args:
        task: what to train.
        level: a level that the device supports.
        device: where to train.
        on_step: called after each step.
    """
    started = time.perf_counter()
    torch.manual_seed(0)
    model = task.build().to(device)
    optimizer = task.optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(task.batches))
    losses, seconds, held = [], [], 0

    model, optimizer = xamp.initialize(model, optimizer, level=level)
    for inputs, targets in task.batches:
        before = time.perf_counter()
        optimizer.zero_grad()
        loss = task.criterion(model(inputs), targets)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        wait_for(device)
        seconds.append(time.perf_counter() - before)
        held = max(held, held_bytes(model, optimizer))
        on_step()

    return Run(
        task=task.name,
        level=level,
        metric=task.metric,
        result=task.evaluate(model),
        losses=losses,
        step_ms=1000 * statistics.median(seconds),
        held_bytes=held,
        overflows=xamp.session(optimizer).stats.skipped,
        scale=xamp.loss_scale(optimizer),
        seconds=time.perf_counter() - started,
    )


def wait_for(device: torch.device) -> None:
    """Waits until ``device`` has finished its work, so that the time includes it."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def held_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of parameters, masters, gradients and optimizer state; shared memory counts once."""
    stepped = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameters: list[Tensor] = [*model.parameters(), *stepped]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for slots in optimizer.state.values() for value in slots.values() if isinstance(value, Tensor)]
    storages = [tensor.untyped_storage() for tensor in (*parameters, *gradients, *state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
