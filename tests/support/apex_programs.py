"""Random programs over Apex's interface, made from a seed, and what the last ``apex.amp`` gave for them.

``python tests/support/apex_programs.py FILE`` records the results of the ``apex`` that can be imported, moved to CPU
tensors. Weights, inputs and rates are small multiples of powers of two, so the results hardly depend on the processor.
What docs/apex.md lists as different stays out of the programs.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

SEEDS = range(600)


@dataclass(frozen=True)
class Program:
    """What a script does.

    Attributes:
        level: O0 to O3.
        models: the number of models, each with its optimizer.
        losses: the number of losses, each with its scale.
        kind: ``sgd``, ``momentum`` or ``adam``.
        options: further arguments of ``amp.initialize``.
        lines: what is done after it: the name of a method of :class:`_Script`, and its arguments.
    """

    level: str
    models: int
    losses: int
    kind: str
    options: dict[str, Any]
    lines: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)


def make(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    level = draw.choice(["O0", "O1", "O2", "O2", "O2", "O3"])
    models, losses = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])
    options: dict[str, Any] = {}
    scale = draw.choice(["default", "dynamic", "dynamic", 8.0, "128.0"])
    if scale != "default":
        options["loss_scale"] = scale
    if draw.random() < 0.2:
        options |= {"min_loss_scale": 2.0**13, "max_loss_scale": 2.0**17}
    if level == "O2" and draw.random() < 0.3:
        options |= draw.choice([{"keep_batchnorm_fp32": False}, {"master_weights": False}])
    if level == "O3" and draw.random() < 0.4:
        options |= draw.choice([{"keep_batchnorm_fp32": True}, {"master_weights": True}])
    dynamic = scale == "dynamic" or (scale == "default" and level in ("O1", "O2"))
    made = Program(level, models, losses, draw.choice(["sgd", "momentum", "adam"]), options)
    for _ in range(draw.randint(3, 7)):
        made.lines.extend(_iteration(draw, made, dynamic))
    return made


def _iteration(draw: random.Random, made: Program, dynamic: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The lines of one pass of a training loop."""
    everyone = tuple(range(made.models))
    bounds = (13, 17) if "min_loss_scale" in made.options else (3, 12)
    if draw.random() < 0.15:
        yield "look", (draw.choice(everyone),)
    if draw.random() < 0.15:
        yield "set_scale", (draw.randrange(made.losses), 2.0 ** draw.randint(*bounds))
    if draw.random() < 0.1:
        yield "amp_state", ()
    if draw.random() < 0.1:
        yield "added", (draw.choice(everyone),)
    yield "zero", (draw.choice(["optimizer", "optimizer", "model after step"]),)
    backwards = draw.choice([1, 1, 1, 2, 3])
    loss_id = draw.randrange(made.losses)
    delays = draw.random() < 0.25
    for number in range(backwards):
        used = everyone if draw.random() < 0.7 else (draw.choice(everyone),)
        inf = draw.choice(["half", "single"]) if dynamic and draw.random() < 0.12 and number == backwards - 1 else ""
        if not delays:
            loss_id = draw.randrange(made.losses)
        used = everyone if delays else used
        scale = draw.choice([0.25, 0.5, 1.0])
        yield "backward", (used, loss_id, scale, draw.randrange(1000), inf, delays and number < backwards - 1)
    if draw.random() < 0.2:
        yield "clip", (draw.choice(everyone), draw.choice([0.25, 1.0]))
    if draw.random() < 0.15:
        yield "rate", (draw.choice(everyone), draw.choice([0.0625, 0.25]))
    yield "step", ()


class _Net(nn.Module):
    """Half and single parameters at O2, one that gets no gradient, and one that joins its optimizer late."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2, eps=0.0)
        self.unused = nn.Linear(1, 1)
        self.late = nn.Parameter(torch.ones(2))
        for param in self.parameters():
            with torch.no_grad():
                param.copy_((torch.rand(param.shape) * 8).round() / 8 - 0.5)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.inner(x)) * self.late
        return out

    def train(self, mode: bool = True) -> _Net:
        """The statistics stay 0 and 1, with which batch norm rounds nothing."""
        del mode
        return self


class _Script:
    def __init__(self, amp: Any, program: Program) -> None:
        self.amp, self.program = amp, program
        torch.manual_seed(len(program.lines))
        nets = [_Net() for _ in range(program.models)]
        self.lates = [net.late for net in nets]
        self.joined = [False] * len(nets)
        optimizers = [self._optimizer([p for p in net.parameters() if p is not net.late]) for net in nets]
        given = {**program.options, "opt_level": program.level, "num_losses": program.losses, "verbosity": 0}
        self.models, self.optimizers = amp.initialize(nets, optimizers, **given)

    def _optimizer(self, params: list[Any]) -> torch.optim.Optimizer:
        if self.program.kind == "adam":
            return torch.optim.Adam(params, lr=0.0625, eps=2.0**-8)
        return torch.optim.SGD(params, lr=0.125, momentum=0.5 if self.program.kind == "momentum" else 0.0)

    def look(self, index: int) -> None:
        with torch.no_grad():
            self.models[index](torch.ones(1, 3))

    def set_scale(self, loss_id: int, scale: float) -> None:
        scaler = self.amp._amp_state.loss_scalers[loss_id]
        if scaler.dynamic:
            scaler._loss_scale = scale

    def amp_state(self) -> None:
        self.amp.load_state_dict(self.amp.state_dict())

    def added(self, index: int) -> None:
        if not self.joined[index]:
            self.joined[index] = True
            self.optimizers[index].add_param_group({"params": [self.lates[index]], "lr": 0.25})

    def zero(self, how: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            if how != "optimizer":
                model.zero_grad()
        for late, joined in zip(self.lates, self.joined, strict=True):
            if not joined:
                late.grad = None

    def backward(self, used: tuple[int, ...], loss_id: int, factor: float, seed: int, inf: str, delay: bool) -> None:
        draw = torch.Generator().manual_seed(seed)
        loss: Any = 0.0
        for index in used:
            x = torch.randint(-4, 5, (4, 3), generator=draw) / 4.0
            loss = loss + self.models[index](x).float().sum() * (factor / 4)
        optimizers = [self.optimizers[index] for index in used]
        with self.amp.scale_loss(
            loss, optimizers if len(optimizers) > 1 else optimizers[0], loss_id=loss_id, delay_unscale=delay
        ) as scaled:
            scaled.backward()
            if inf:
                grads = [p.grad for index in used for p in self.models[index].parameters() if p.grad is not None]
                wanted = torch.float16 if inf == "half" else torch.float32
                found = [grad for grad in grads if grad.dtype == wanted] or grads
                found[0].view(-1)[0] = float("inf")

    def clip(self, index: int, limit: float) -> None:
        nn.utils.clip_grad_norm_(list(self.amp.master_params(self.optimizers[index])), limit)

    def rate(self, index: int, lr: float) -> None:
        self.optimizers[index].param_groups[0]["lr"] = lr

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def numbers(self) -> list[float]:
        """Every parameter, and every master, in the order of models and groups."""
        held = [p for model in self.models for p in model.parameters()]
        own = {id(p) for p in held}
        held += [m for o in self.optimizers for m in self.amp.master_params(o) if id(m) not in own]
        return [number for tensor in held for number in tensor.detach().double().flatten().tolist()]


def run(amp: Any, program: Program) -> dict[str, Any]:
    """Run ``program`` over a module with Apex's interface.

    Returns:
        ``scales`` and ``unskipped`` of each loss after each step, ``numbers`` at the end, or the type of an ``error``.
    """
    scales: list[list[list[float]]] = []
    try:
        script = _Script(amp, program)
        for name, arguments in program.lines:
            getattr(script, name)(*arguments)
            if name == "step":
                scales.append([[row["loss_scale"], row["unskipped"]] for row in amp.state_dict().values()])
        return {"scales": scales, "numbers": script.numbers()}
    except Exception as error:
        return {"scales": scales, "error": type(error).__name__}
    finally:
        handle = getattr(amp._amp_state, "handle", None)
        if handle is not None:
            handle._deactivate()


def short(numbers: list[float]) -> str:
    """The numbers as text with five digits each."""
    return " ".join(f"{number:.5g}" for number in numbers)


def record(amp: Any, path: Path) -> None:
    """Write the results of all programs."""
    rows = []
    for seed in SEEDS:
        with contextlib.redirect_stdout(None):
            found = run(amp, make(seed))
        rows.append({**found, "numbers": short(found["numbers"])} if "numbers" in found else found)
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    import importlib

    torch.set_num_threads(1)
    record(importlib.import_module("apex.amp"), Path(sys.argv[1]))
