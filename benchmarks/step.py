"""A training step against the hand-written ``torch.amp`` loop: zero_grad, scale, backward, unscale, step, update.

The parameters are tiny and the graph is made once, so the time is that of the work around the numbers. Both sides use
the same optimizer form; neither includes a forward.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import xamp
from benchmarks import bounds
from benchmarks.report import Figure, of_ratio
from benchmarks.timing import clock_of, compare_made, synchronize

COUNTS = (1, 50, 300)
SHAPE = (4, 4)

Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
FORMS: dict[str, tuple[Make, bool]] = {
    "SGD foreach": (lambda p: torch.optim.SGD(p, lr=1e-6, foreach=True), False),
    "SGD fused": (lambda p: torch.optim.SGD(p, lr=1e-6, fused=True), True),
    "Adam fused": (lambda p: torch.optim.Adam(p, lr=1e-6, fused=True), True),
}
"""How each side makes its optimizer, and whether it is fused."""


class _Ready(torch.autograd.Function):
    """A loss whose backward is one multiplication, hardly 0.1 us for each parameter, so it does not hide the rest.

    The gradients are views of one buffer. Backward fills it and puts them in place. Autograd would take 2 us for each
    gradient, the same on both sides.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        ctx.params = params
        ctx.values = torch.full((len(params), *params[0].shape), 1e-3, device=leaf.device, dtype=params[0].dtype)
        ctx.buffer = torch.empty_like(ctx.values)
        ctx.views = list(ctx.buffer.unbind())
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None]:
        torch.mul(ctx.values, scale, out=ctx.buffer)
        for param, view in zip(ctx.params, ctx.views, strict=True):
            param.grad = view
        return None, None


class Loop:
    """Parameters, an optimizer over them, and a loss whose graph is kept and whose backward is cheap."""

    def __init__(self, count: int, make: Make, device: torch.device, shape: tuple[int, ...] = SHAPE) -> None:
        torch.manual_seed(0)
        tensors = [torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(count)]
        self.model = torch.nn.ParameterList(tensors)
        self.params: list[torch.nn.Parameter] = list(self.model.parameters())
        self.optimizer = make(self.params)
        self.loss = self.ready_loss()

    def ready_loss(self) -> torch.Tensor:
        """A loss whose gradients have the parameters' dtype."""
        leaf = torch.ones((), device=self.params[0].device, requires_grad=True)
        return _Ready.apply(leaf, self.params)  # type: ignore[no-any-return,no-untyped-call]


class Ours(Loop):
    def __init__(
        self,
        count: int,
        make: Make,
        device: torch.device,
        level: str,
        fused: bool | str,
        shape: tuple[int, ...] = SHAPE,
    ) -> None:
        super().__init__(count, make, device, shape)
        xamp.initialize(self.model, self.optimizer, level=level, fused=fused, growth_interval=10**6, verbosity=0)
        self.loss = self.ready_loss()  # initialize may have lowered the parameters

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with xamp.scale_loss(self.loss, self.optimizer) as scaled:
            scaled.backward(retain_graph=True)
        self.optimizer.step()

    def phases(self, lap: Callable[[str], None]) -> None:
        self.optimizer.zero_grad()
        lap("zero_grad")
        context = xamp.scale_loss(self.loss, self.optimizer)
        scaled = context.__enter__()
        lap("scale")
        scaled.backward(retain_graph=True)
        lap("backward")
        context.__exit__(None, None, None)
        lap("unscale+update")
        self.optimizer.step()
        lap("step")


class Theirs(Loop):
    def __init__(
        self,
        count: int,
        make: Make,
        device: torch.device,
        *,
        unscale: bool = True,
        shape: tuple[int, ...] = SHAPE,
    ) -> None:
        super().__init__(count, make, device, shape)
        self.scaler: Any = torch.amp.GradScaler(device.type, growth_interval=10**6)
        self.unscale = unscale

    def __call__(self) -> None:
        scaler = self.scaler
        self.optimizer.zero_grad()
        scaler.scale(self.loss).backward(retain_graph=True)
        if self.unscale:
            scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()

    def phases(self, lap: Callable[[str], None]) -> None:
        scaler = self.scaler
        self.optimizer.zero_grad()
        lap("zero_grad")
        scaled = scaler.scale(self.loss)
        lap("scale")
        scaled.backward(retain_graph=True)
        lap("backward")
        scaler.unscale_(self.optimizer)
        lap("unscale")
        scaler.step(self.optimizer)
        lap("step")
        scaler.update()
        lap("update")


def run(device: torch.device, rounds: int) -> list[Figure]:
    """Measure level O1 in each form and size, against a loop that calls ``unscale_`` and one that does not."""
    figures = []
    for unscale, told, bound in (
        (True, "", bounds.STEP_RATIO),
        (False, ", no unscale_", bounds.STEP_RATIO_WITHOUT_UNSCALE),
    ):
        for name, (make, fused) in FORMS.items():
            for count in COUNTS:
                sides = functools.partial(_sides, count, make, device, fused, unscale)
                pair = compare_made(sides, device, calls=calls_for(count), rounds=rounds)
                figures.append(of_ratio(f"{name}, {count}{told}", pair, bound[name]))
    return figures


def _sides(count: int, make: Make, device: torch.device, fused: bool, unscale: bool) -> tuple[Ours, Theirs]:
    ours = Ours(count, make, device, "O1", "auto" if fused else False)
    return ours, Theirs(count, make, device, unscale=unscale)


def calls_for(count: int) -> int:
    """How many calls run in a row, so that a round takes about the same time at every size."""
    return max(4, 200 // count)


def phases(device: torch.device, rounds: int) -> list[Figure]:
    """Measure the time of each phase, for xamp and for torch."""
    figures = []
    for name, (make, fused) in FORMS.items():
        for count in COUNTS:
            ours = Ours(count, make, device, "O1", "auto" if fused else False)
            theirs = Theirs(count, make, device)
            for side, loop in (("xamp", ours), ("torch", theirs)):
                times = phase_times(loop, device, rounds * 4)
                detail = "  ".join(f"{phase} {us:.1f}" for phase, us in times.items())
                figures.append(Figure(f"{name}, {count}, {side}", sum(times.values()), "us", None, detail))
    return figures


def phase_times(loop: Any, device: torch.device, rounds: int) -> dict[str, float]:
    seen: dict[str, list[float]] = {}
    clock = clock_of(device)
    for index in range(rounds + 20):
        last = clock()

        def lap(phase: str, keep: bool = index >= 20) -> None:
            nonlocal last
            synchronize(device)
            now = clock()
            if keep:
                seen.setdefault(phase, []).append((now - last) * 1e6)
            last = clock()

        loop.phases(lap)
    return {phase: statistics.median(values) for phase, values in seen.items()}
