"""Training programs drawn at random: windows of micro-batches with overflows, several losses and optimizers, resumes.

A program is a list of events. :class:`Session` runs it under xamp, :class:`Scalers` by a ``GradScaler`` for each scale,
torch's or xamp's. Both return the scales after each step, which must be equal: a window is one update.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import xamp

__all__ = ["Program", "Scalers", "Session", "programs"]

SHAPES = ("apart", "together", "onto one")
"""How losses and optimizers belong together: each loss has an optimizer, and they step at different moments; all
optimizers have one loss, and step together; all losses have one optimizer."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One training run.

    Attributes:
        shape: one of :data:`SHAPES`.
        count: number of losses, or of optimizers under one loss.
        options: growth and backoff of the scales, for ``initialize`` and for a GradScaler.
        events: ``("backward", index, overflows)``, ``("step", index, clips)``, ``("resume", keeps_gradients)``.
        fused: for ``initialize``.
    """

    shape: str
    count: int
    options: dict[str, Any]
    events: tuple[tuple[Any, ...], ...]
    fused: Any

    @property
    def scales(self) -> int:
        """Number of loss scales."""
        return 1 if self.shape == "together" else self.count


def programs(count: int, start: int = 0) -> Iterator[Program]:
    """Draw ``count`` programs, of which each depends on its number only."""
    for seed in range(start, start + count):
        yield _draw(random.Random(seed))


def _draw(draw: random.Random) -> Program:
    shape, count = draw.choice(SHAPES), draw.randint(1, 3)
    options = {
        "init_scale": 2.0 ** draw.randint(8, 10),
        "growth_interval": draw.randint(1, 4),
        "growth_factor": draw.choice([2.0, 2.0, 4.0]),
        "backoff_factor": draw.choice([0.5, 0.5, 0.25]),
    }
    share = draw.choice([0.0, 0.02, 0.1, 0.5, 1.0])
    steppers = 1 if shape != "apart" else count
    left = [draw.randint(1, 4) for _ in range(steppers)]  # windows
    micro = [0] * steppers  # micro-batches left in the window; 0: it has not begun
    events: list[tuple[Any, ...]] = []
    while any(left):
        who = draw.choice([index for index in range(steppers) if left[index]])
        if micro[who] == 0:
            micro[who] = draw.choice([1, 2, 3, draw.randint(4, 32)])
        index = who if shape == "apart" else draw.randrange(count)
        events.append(("backward", index, draw.random() < share))
        micro[who] -= 1
        if micro[who] == 0:
            events.append(("step", who, draw.random() < 0.3))
            left[who] -= 1
        elif draw.random() < 0.03 and all(m > 0 or (w, m) == (0, 0) for m, w in zip(micro, left, strict=True)):
            # A window goes on after it. The gradients of several losses on one optimizer are no more told apart.
            events.append(("resume", shape != "onto one" and draw.random() < 0.5))
    return Program(shape, count, options, tuple(events), draw.choice([False, "auto"]))


def _nets(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(count)]


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3)


def _loss(net: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = net(torch.ones(2, 3)).float().square().mean() * 1e-3  # no overflow but those that are planted
    return loss


class Session:
    """Runs a program by ``initialize`` and ``scale_loss``.

    Args:
        program: the program.
        level: a level with dynamic scales.
        spoil: makes an overflow in a gradient, within ``scale_loss``.
    """

    def __init__(self, program: Program, level: str, spoil: Callable[[torch.Tensor], None]) -> None:
        self._program, self._level, self._spoil = program, level, spoil
        self._start(_nets(1 if program.shape == "onto one" else program.count))

    def _start(self, nets: list[nn.Module]) -> None:
        self.nets, self.optimizers = nets, [_sgd(net) for net in nets]
        options = {"num_losses": self._program.scales, "fused": self._program.fused, "min_loss_scale": 2.0**-30}
        xamp.initialize(
            self.nets, self.optimizers, self._level, verbosity=0, max_loss_scale=2.0**60, **options,
            **self._program.options,
        )  # fmt: skip

    def run(self) -> list[list[float]]:
        """Return all scales after each step."""
        found = []
        for name, *given in self._program.events:
            getattr(self, name)(*given)
            if name == "step":
                found.append([xamp.loss_scale(self.optimizers[0], i) for i in range(self._program.scales)])
        return found

    def backward(self, index: int, overflows: bool) -> None:
        """One micro-batch."""
        shape = self._program.shape
        net = self.nets[0 if shape == "onto one" else index]
        if shape == "together":
            optimizers: Any = self.optimizers
            loss, loss_id = sum(map(_loss, self.nets), torch.zeros(())), 0
        else:
            optimizers = self.optimizers[0 if shape == "onto one" else index]
            loss, loss_id = _loss(net), index
        with xamp.scale_loss(loss, optimizers, loss_id=loss_id) as scaled:
            scaled.backward()
            if overflows:
                self._spoil(next(p.grad for p in net.parameters() if p.grad is not None))

    def step(self, who: int, clips: bool) -> None:
        """End a window."""
        for optimizer in self.optimizers if self._program.shape == "together" else [self.optimizers[who]]:
            if clips:
                xamp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def resume(self, keeps_gradients: bool) -> None:
        """Load the state that is saved now: into the same objects, or as a new process that has no gradients."""
        saved = xamp.state_dict(self.optimizers[0])
        if not keeps_gradients:
            for net in self.nets:
                xamp.session(net).close() if net is self.nets[0] else None
            self._start(_nets(len(self.nets)))
        xamp.load_state_dict(saved, self.optimizers[0])


class Scalers:
    """Runs a program by one ``GradScaler`` for each scale, and a net of its own for each loss.

    Args:
        program: the program.
        make: makes a GradScaler.
    """

    def __init__(self, program: Program, make: Callable[..., Any]) -> None:
        self._program, self._make = program, make
        self._start()
        self.scalers = self._new_scalers()

    def _start(self) -> None:
        self.nets = _nets(self._program.count)
        self.optimizers = [_sgd(net) for net in self.nets]
        self._reached: set[int] = set()

    def _new_scalers(self) -> list[Any]:
        return [self._make(**self._program.options) for _ in range(self._program.scales)]

    def run(self) -> list[list[float]]:
        """Return all scales after each step."""
        found = []
        for name, *given in self._program.events:
            getattr(self, name)(*given)
            if name == "step":
                found.append([scaler.get_scale() for scaler in self.scalers])
        return found

    def backward(self, index: int, overflows: bool) -> None:
        """One micro-batch."""
        together = self._program.shape == "together"
        loss = sum(map(_loss, self.nets), torch.zeros(())) if together else _loss(self.nets[index])
        self.scalers[0 if together else index].scale(loss).backward()
        self._reached |= set(range(self._program.count)) if together else {index}
        if overflows:
            grad = next(self.nets[index].parameters()).grad
            assert grad is not None
            grad[0] = torch.inf

    def step(self, who: int, clips: bool) -> None:
        """End a window."""
        chosen = sorted(self._reached) if self._program.shape != "apart" else [who]
        for index in chosen:
            scaler = self.scalers[0 if self._program.shape == "together" else index]
            if clips:
                scaler.unscale_(self.optimizers[index])
                torch.nn.utils.clip_grad_norm_(self.nets[index].parameters(), 1.0)
            scaler.step(self.optimizers[index])
            self.optimizers[index].zero_grad()
        self._reached -= set(chosen)
        for scaler in self.scalers[:1] if self._program.shape == "together" else [self.scalers[i] for i in chosen]:
            scaler.update()

    def resume(self, keeps_gradients: bool) -> None:
        """Load the state that is saved now: into new scalers, with the same objects or without gradients."""
        saved = [copy.deepcopy(scaler.state_dict()) for scaler in self.scalers]
        if not keeps_gradients:
            self._start()
        self.scalers = self._new_scalers()
        for scaler, state in zip(self.scalers, saved, strict=True):
            scaler.load_state_dict(state)
