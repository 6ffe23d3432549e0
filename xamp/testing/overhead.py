"""Tier overhead: what xamp costs more than mixed precision by hand, in time and memory.

It measures ratios of two sides in one process, or bytes of tensors; never seconds.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import xamp
from xamp.testing.lane import Lane
from xamp.testing.measure import Storages, best_ratio
from xamp.testing.numerics import dtype_of
from xamp.testing.tier import Tier, at_levels, casting
from xamp.torch_compat.torch_private import operators

__all__ = ["Overhead"]

STEP_RATIO = 1.25
"""A training step's time over that of the loop by hand. Measured on a CPU: 0.85."""
FORWARD_RATIO = 1.5
"""A forward's time over that of the same in ``torch.autocast``. Measured on a CPU: 1.0."""
FLAG_STEP_RATIO = 2.0
"""The step's ratio if extra operators lower and read a chip's overflow flag. Measured on an emulated chip: 1.5."""
FLAG_RATIO = 3.0
"""The forward's ratio on such a chip, for one small layer. A CPU: 1.5; an emulated chip: 2.2."""
MEMORY_RATIO = 1.02
"""Peak bytes at O1 and O4 over those of the loop by hand. Measured on a CPU: 1.0."""
MASTER_BYTES = 18.5
"""Peak bytes for each parameter at O2 and O5 with Adam: 2 for the parameter, 4 each for master, gradient and the two
moments, and temporaries. Measured on a CPU: 18.1, and 18.3 if Adam is not fused."""

LAYERS, WIDTH = 48, 96

FORMS: dict[str, dict[str, bool]] = {"SGD-foreach": {"foreach": True}, "SGD-fused": {"fused": True}}
"""By name: the arguments of SGD, the same on both sides."""


class Overhead(Tier):
    """What xamp costs more than mixed precision by hand."""

    tier = "overhead"

    @pytest.mark.parametrize("form", FORMS)
    def test_step(self, lane: Lane, form: str) -> None:
        """A step (zero_grad, scale_loss, backward, step; 50 parameters) takes hardly longer than by hand."""
        lane.need("O1")
        options = FORMS[form]
        if "fused" in options:
            lane.need("fused")
            if "SGD" not in lane.can.fused_optimizers:
                options = {}
        ours, theirs = (Steps(lane, options) for _ in range(2))
        fused = "auto" if options.get("fused") else False
        settings: dict[str, Any] = {"level": "O1", "fused": fused, "growth_interval": 10**6, "verbosity": 0}
        xamp.initialize(ours.model, ours.optimizer, **settings)
        scaler = scaler_by_hand(lane)
        bound = FLAG_STEP_RATIO if lane.can.overflow == "flag" else STEP_RATIO
        ratio = best_ratio(ours.managed, lambda: theirs.by_hand(scaler), lane, bound, calls=4)
        assert ratio <= bound
        assert xamp.session(ours.model).stats.skipped == 0

    @pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
    @casting
    def test_forward(self, lane: Lane, level: str, grad: bool) -> None:
        """A forward under the native op policy takes hardly longer than in ``torch.autocast``."""
        lane.need(level, "native")
        plain, managed = (Raised(4, 4).to(lane.device) for _ in range(2))
        xamp.initialize(managed, level=level, op_policy="native", verbosity=0)
        x, kind, dtype = torch.ones(4, 4, device=lane.device), lane.kind, getattr(torch, dtype_of(level))

        def theirs() -> torch.Tensor:
            with torch.autocast(kind, dtype=dtype):
                return plain(x)  # type: ignore[no-any-return]

        bound = FLAG_RATIO if lane.can.overflow == "flag" and grad else FORWARD_RATIO
        with contextlib.nullcontext() if grad else torch.no_grad():
            assert best_ratio(lambda: managed(x), theirs, lane, bound, calls=20) <= bound

    @casting
    def test_peak_memory(self, lane: Lane, level: str) -> None:
        """Training takes no more memory than with ``torch.autocast`` and ``torch.amp.GradScaler``."""
        lane.need(level)
        dtype = getattr(torch, dtype_of(level))
        ours = _peak(lane, level)
        theirs = _peak(lane, scaler=scaler_by_hand(lane, dtype == torch.float16), dtype=dtype)
        assert ours <= MEMORY_RATIO * theirs

    @at_levels(lambda row: row.master_weights)
    def test_memory_of_masters(self, lane: Lane, level: str) -> None:
        """With Adam and masters, training takes at most 18.5 bytes for each parameter."""
        lane.need(level)
        assert _peak(lane, level) / (LAYERS * WIDTH**2) <= MASTER_BYTES


# ---------------------------------------------------------------- by hand


class OwnScaler:
    """The part of a GradScaler that a loop needs, made of operators that every device has."""

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), 2.0**16, device=device)
        self._finite = torch.ones((), dtype=torch.bool, device=device)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss * self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, and checks that they are finite."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        operators.foreach_mul_(grads, self._scale.reciprocal())
        self._finite = torch.stack([grad.isfinite().all() for grad in grads]).all()

    def step(self, optimizer: Optimizer) -> None:
        """Steps, unless a gradient was not finite."""
        if bool(self._finite):
            optimizer.step()

    def update(self) -> None:
        """Halves the scale after an overflow."""
        self._scale.copy_(torch.where(self._finite, self._scale, self._scale / 2))


def scaler_by_hand(lane: Lane, enabled: bool = True) -> Any:
    """A torch GradScaler; if that does not run on the device, an :class:`OwnScaler`."""
    if not lane.has_grad_scaler:
        return OwnScaler(lane.device)
    return torch.amp.GradScaler(lane.kind, enabled=enabled, growth_interval=10**6)


# ---------------------------------------------------------------- what is timed


class _Ready(torch.autograd.Function):
    """A loss whose backward is one multiplication, so that it does not hide the cost of the rest.

    The gradients are views of one buffer. Backward fills it and puts them in place; autograd would take longer.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, params: list[torch.Tensor]) -> torch.Tensor:
        """() -> ()."""
        ctx.params = params
        ctx.values = torch.full((len(params), 4, 4), 1e-3, device=leaf.device)
        ctx.buffer = torch.empty_like(ctx.values)
        ctx.views = list(ctx.buffer.unbind())
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None]:
        """Fills the gradients."""
        torch.mul(ctx.values, scale, out=ctx.buffer)
        for param, view in zip(ctx.params, ctx.views, strict=True):
            param.grad = view
        return None, None


class Steps:
    """50 small parameters, an optimizer over them, and a loss whose graph is kept."""

    def __init__(self, lane: Lane, options: dict[str, bool]) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.ones(4, 4, device=lane.device)) for _ in range(50)])
        self.optimizer = SGD(self.model.parameters(), lr=1e-6, **options)
        leaf = torch.ones((), device=lane.device, requires_grad=True)
        self.loss: Any = _Ready.apply(leaf, list(self.model.parameters()))  # type: ignore[no-untyped-call]

    def managed(self) -> None:
        """A step under xamp."""
        self.optimizer.zero_grad()
        with xamp.scale_loss(self.loss, self.optimizer) as scaled:
            scaled.backward(retain_graph=True)
        self.optimizer.step()

    def by_hand(self, scaler: Any) -> None:
        """The same step with a GradScaler."""
        self.optimizer.zero_grad()
        scaler.scale(self.loss).backward(retain_graph=True)
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()


class Raised(nn.Linear):
    """A linear layer whose result is cast to fp32, on both sides, as xamp casts outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 4) -> (N, 4), fp32."""
        return super().forward(x).float()


# ---------------------------------------------------------------- what is weighed


def _peak(lane: Lane, level: str | None = None, scaler: Any = None, dtype: Any = None) -> int:
    """Peak bytes of all tensors in the third training step with Adam: at ``level``, or by hand if that is None."""
    gc.collect()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).to(lane.device)
    optimizer = _adam(model.parameters(), lane)
    if level is not None:
        xamp.initialize(model, optimizer, level=level, verbosity=0)
    x = torch.rand(1, WIDTH, device=lane.device)
    step = _managed_step if level is not None else _step_by_hand(scaler, dtype)
    with Storages(lane.kind) as storages:
        storages.note([*model.parameters(), *(p for g in optimizer.param_groups for p in g["params"]), x])
        for _ in range(3):
            storages.lap()
            step(model, optimizer, x)
        peak: int = storages.lap()
    return peak


def _adam(params: Iterable[nn.Parameter], lane: Lane) -> Optimizer:
    """Adam in the form that needs the least memory: fused if declared (on both sides), else the for-loop."""
    fused = "Adam" in lane.can.fused_optimizers
    return Adam(params, lr=1e-4, fused=True) if fused else Adam(params, lr=1e-4, foreach=False)


def _managed_step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def _step_by_hand(scaler: Any, dtype: torch.dtype) -> Callable[[nn.Module, Optimizer, torch.Tensor], None]:
    def step(model: nn.Module, optimizer: Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast(x.device.type, dtype=dtype):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return step
