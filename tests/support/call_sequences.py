"""A training run and its fp32 reference, driven by arbitrary sequences of public calls.

:class:`World` holds a model under xamp and the same model in plain fp32. Each command does the same to both. From a
few facts (is a session live, are gradients scaled, did something overflow) it predicts whether xamp must carry the
command out or refuse it, and with which error. After each command it compares the weights, the scale and the outcome.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp import policy
from xamp.policy import Level, best_level

LEVELS = tuple(policy.LEVELS)
ORDERS = tuple(itertools.permutations("mox"))
GROWTH_INTERVAL, FLOOR, CEILING = 2, 1.0, 2.0**12

# Relative error that one step of a level may add, as a part of what the step moved; and of the weights themselves,
# where a level rounds them (O3 steps in fp16: 2**-11, over both layers and the momentum).
_OUTPUT_ERROR = {None: 1e-5, "float16": 0.02, "bfloat16": 0.15}
_STEP_ERROR = {None: 1e-5, "float16": 0.05, "bfloat16": 0.4}
"""Where what is stepped is lower; else that of outputs."""
_WEIGHT_ERROR = {None: 0.0, "float16": 4e-3, "bfloat16": 32e-3}


def _row(level: str | None) -> Level:
    """That of fp32 where there is no session."""
    return best_level(()) if level is None else policy.LEVELS[level]


def _step_error(level: str | None) -> float:
    row = _row(level)
    return (_STEP_ERROR if row.steps_lower else _OUTPUT_ERROR)[row.dtype]


def _weight_error(level: str | None) -> float:
    row = _row(level)
    return _WEIGHT_ERROR[row.dtype] if row.steps_lower else 0.0


class Net(nn.Module):
    """Two small layers; smooth, so that small errors stay small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return out


@dataclasses.dataclass
class Facts:
    """The facts that decide what the next call must do."""

    level: str | None = None  # of the live session
    static: float | None = None
    pending: bool = False  # gradients are still scaled, by delay_unscale
    pending_inf: bool = False
    came_through: bool = False  # gradients came through scale_loss since the last step
    stray: bool = False  # gradients came without scale_loss since the last step, at a level that notices
    dirty: bool = False  # the gradients contain inf or nan
    overflowed_since_step: bool = False  # a backward overflowed since the last step
    checked_since_step: bool = False  # a backward was checked since the last step
    window: bool = False  # a gradient was checked since the scale last moved
    window_inf: bool = False  # and one of them overflowed
    scale: float = 0.0
    tracker: int = 0

    @property
    def dynamic(self) -> bool:
        return _row(self.level).dynamic and self.static is None

    @property
    def checks(self) -> bool:
        return self.dynamic or (self.level is not None and self.static is not None)

    @property
    def masters(self) -> bool:
        return _row(self.level).master_weights

    @property
    def managed(self) -> bool:
        return self.checks or self.masters


@dataclasses.dataclass
class Saved:
    """A checkpoint of the run and of its reference."""

    model: Any
    optimizer: Any
    xamp: Any
    reference: Any
    reference_optimizer: Any
    facts: Facts


class World:
    """The run, its reference and the commands; see the module."""

    def __init__(self, lane: Lane, seed: int) -> None:
        torch.manual_seed(seed)
        self.lane = lane
        self.model = Net().to(lane.device)
        self.reference = copy.deepcopy(self.model)
        self.optimizer = self._optimizer(self.model)
        self.reference_optimizer = self._optimizer(self.reference)
        self.facts = Facts()
        self.saved: list[Saved] = []
        self.tolerance = 1e-6
        self.gradient_error = 0.0  # relative error of the accumulated gradients
        self.batches = 0

    @staticmethod
    def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # ---------------------------------------------------------------- commands

    def initialize(self, level: str, static: float | None) -> None:
        """``xamp.initialize``; refused while a session lives."""
        arguments: dict[str, Any] = {"level": level, "verbosity": 0, "growth_interval": GROWTH_INTERVAL}
        row = _row(level)
        if row.dynamic:
            arguments.update(loss_scale=static, init_scale=2.0**8, min_loss_scale=FLOOR, max_loss_scale=CEILING)
        call = functools.partial(xamp.initialize, self.model, self.optimizer, **arguments)
        if self.facts.level is not None:
            self._refused(xamp.StateError, "session", call)
            return
        if level not in self.lane.can.levels:
            self._refused(xamp.UnsupportedPolicy, "cannot run it", call)
            return
        call()
        if not row.dynamic:
            static = float(row.loss_scale) if row.scales else None
        stray = self._has_grads()
        self.facts = dataclasses.replace(
            Facts(), level=level, static=static, stray=stray, scale=static or (2.0**8 if row.dynamic else 1.0)
        )
        self.tolerance += _weight_error(level) * self._size()

    def backward(self, overflow: bool, delay: bool, through: bool) -> None:
        """A backward, in ``scale_loss`` or plain."""
        facts = self.facts
        # The rules of what an overflow hides are those of inf in a gradient, which some chips never show.
        overflow = overflow and through and facts.checks and self.lane.can.overflow == "inf"
        batch = self._batch()
        if through and facts.level is None:
            loss = self._loss(self.model, batch)
            self._refused(
                xamp.StateError, "not given to xamp.initialize", lambda: xamp.scale_loss(loss, self.optimizer)
            )
            return
        if not through and facts.masters and self._has_grads():
            return  # what it then means is in test_step_order.py
        if not through and facts.pending:
            return  # it would add plain gradients to scaled ones, as with torch's scaler
        had_grads = self._has_grads()
        self.gradient_error = max(self.gradient_error, _step_error(facts.level))
        loss = self._loss(self.model, batch) * (math.inf if overflow else 1.0)
        if through:
            self._enter(had_grads)
            with xamp.scale_loss(loss, self.optimizer, delay_unscale=delay) as scaled:
                scaled.backward()
        else:
            loss.backward()
        self._loss(self.reference, batch).backward()
        if not facts.managed:
            return
        if not through:
            facts.stray = facts.stray or not facts.came_through
            return
        self._after_backward(overflow, delay)

    def _enter(self, had_grads: bool) -> None:
        """Entering ``scale_loss`` after gradients were cleared without a step: an overflow among them counts."""
        facts = self.facts
        if facts.window and not (facts.came_through and had_grads):
            if facts.window_inf:
                self._move_scale(True)
            facts.window = facts.window_inf = False

    def _after_backward(self, overflow: bool, delay: bool) -> None:
        facts = self.facts
        facts.stray = False  # from now on these gradients count as scaled ones
        facts.dirty = facts.dirty or overflow
        if delay:
            facts.pending, facts.pending_inf = True, facts.pending_inf or overflow
            return
        found = overflow or facts.pending_inf or (facts.dirty and not facts.checked_since_step)
        facts.pending = facts.pending_inf = False
        facts.came_through = facts.checked_since_step = True
        if not facts.checks:
            return
        facts.window, facts.window_inf = True, facts.window_inf or found
        facts.overflowed_since_step = facts.overflowed_since_step or found

    def _move_scale(self, found: bool) -> None:
        facts = self.facts
        if not facts.dynamic:
            return
        facts.tracker = 0 if found else facts.tracker + 1
        if found:
            facts.scale = max(facts.scale / 2, FLOOR)
        elif facts.tracker == GROWTH_INTERVAL:
            facts.scale, facts.tracker = min(facts.scale * 2, CEILING), 0

    def step(self) -> None:
        """``optimizer.step()``: applied, skipped or refused."""
        facts = self.facts
        has_grads = self._has_grads()
        if facts.managed and has_grads and facts.pending:
            self._refused(xamp.StateError, "still scaled", self.optimizer.step)
            return
        if facts.managed and has_grads and not facts.came_through:
            self._refused(xamp.StateError, "did not come through scale_loss", self.optimizer.step)
            return
        self.optimizer.step()
        if facts.window:
            self._move_scale(facts.window_inf)
        if not facts.managed:
            self._reference_step(facts.level)
        elif facts.came_through:
            outcome = xamp.session(self.optimizer).last_step
            expected = xamp.StepOutcome.SKIPPED if facts.overflowed_since_step else xamp.StepOutcome.APPLIED
            assert outcome is expected, (outcome, facts)
            if not facts.overflowed_since_step:
                self._reference_step(facts.level)
        facts.came_through = facts.overflowed_since_step = facts.checked_since_step = False
        facts.window = facts.window_inf = False

    def _reference_step(self, level: str | None) -> None:
        before = self._flat(self.reference)
        self.reference_optimizer.step()
        moved = float((self._flat(self.reference) - before).norm())
        # the momentum repeats an error: in the end it counts ten times
        self.tolerance += (
            10 * max(self.gradient_error, _step_error(level)) * moved + _weight_error(level) * self._size()
        )

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.optimizer.zero_grad()
        self.reference_optimizer.zero_grad()
        self.gradient_error = 0.0
        facts = self.facts
        facts.dirty = facts.pending = facts.pending_inf = facts.stray = facts.came_through = False

    def clip(self, norm: float) -> None:
        """``xamp.clip_grad_norm_``, and the norm that it returns."""
        facts = self.facts
        call = functools.partial(xamp.clip_grad_norm_, self.optimizer, norm)
        if facts.pending and self._has_grads():
            self._refused(xamp.StateError, "still scaled", call)
            return
        got = float(call())
        if facts.dirty:
            assert not math.isfinite(got)
            return
        expected = float(torch.nn.utils.clip_grad_norm_(self.reference.parameters(), norm))
        error = 2 * self.gradient_error * expected + self.tolerance + 1e-4
        assert abs(got - expected) <= 10 * error, (got, expected)

    def save(self) -> None:
        """The states of model, optimizer and xamp."""
        if self.facts.level is None:
            self._refused(xamp.StateError, "not given to xamp.initialize", self._xamp_state)
        self.saved.append(
            Saved(
                copy.deepcopy(self.model.state_dict()),
                copy.deepcopy(self.optimizer.state_dict()),
                None if self.facts.level is None else self._xamp_state(),
                copy.deepcopy(self.reference.state_dict()),
                copy.deepcopy(self.reference_optimizer.state_dict()),
                dataclasses.replace(self.facts),
            )
        )

    def _xamp_state(self) -> Any:
        return xamp.session(self.optimizer).state_dict()

    def load(self, which: int, order: int) -> None:
        """Load one of the checkpoints, perhaps of another level, in some order."""
        if not self.saved:
            return
        saved = self.saved[which % len(self.saved)]
        for what in ORDERS[order]:
            if what == "m":
                self.model.load_state_dict(saved.model)
            elif what == "o":
                self.optimizer.load_state_dict(copy.deepcopy(saved.optimizer))
            elif saved.xamp is not None and self.facts.level is None:
                self._refused(xamp.StateError, "", lambda: xamp.load_state_dict(saved.xamp, self.optimizer))
            elif saved.xamp is not None:
                xamp.load_state_dict(saved.xamp, self.optimizer)
                facts = self.facts
                facts.came_through = facts.overflowed_since_step = facts.checked_since_step = False
                self.facts.window = self.facts.window_inf = False
        self.reference.load_state_dict(saved.reference)
        self.reference_optimizer.load_state_dict(copy.deepcopy(saved.reference_optimizer))
        self.tolerance += _weight_error(self.facts.level) * self._size()
        if saved.xamp is not None and saved.facts.dynamic and self.facts.dynamic:
            self.facts.scale, self.facts.tracker = saved.facts.scale, saved.facts.tracker

    def close(self) -> None:
        """Close the session: the objects are plain fp32 again."""
        facts = self.facts
        if facts.level is None:
            self._refused(xamp.StateError, "not given to xamp.initialize", lambda: xamp.session(self.model))
            return
        close = xamp.session(self.model).close
        if facts.pending and self._has_grads():
            self._refused(xamp.StateError, "still scaled", close)
            return
        if facts.dirty:  # a plain step would take the inf
            self.zero_grad()
        close()
        assert type(self.model) is Net
        assert type(self.optimizer) is torch.optim.SGD
        self.facts = Facts()

    def deepcopy(self) -> None:
        """A copy computes the same, with weights of its own."""
        twin = copy.deepcopy(self.model)
        batch = self._batch()
        with torch.no_grad():
            assert torch.equal(twin(batch), self.model(batch))
            for param in twin.parameters():
                param.zero_()
            assert not torch.equal(twin(batch), self.model(batch))
        self._refused(xamp.StateError, "not given to xamp.initialize", lambda: xamp.session(twin))

    def forward(self) -> None:
        """The model's output is fp32, and near the reference's."""
        batch = self._batch()
        with torch.no_grad():
            got, expected = self.model(batch), self.reference(batch)
        assert got.dtype is torch.float32
        self._close(got, expected, _OUTPUT_ERROR[_row(self.facts.level).dtype])

    def autocast(self, own: bool) -> None:
        """The model within an autocast region, xamp's or the session's."""
        batch = self._batch()
        if own and self.facts.level is None:
            self._refused(xamp.StateError, "not given to xamp.initialize", lambda: xamp.session(self.model))
            return
        region = xamp.session(self.model).autocast() if own else xamp.autocast()
        with torch.no_grad(), region:
            got = self.model(batch)
        with torch.no_grad():
            self._close(got.float(), self.reference(batch), 0.15)
        assert not torch.is_autocast_enabled(self.lane.device.type)

    def interrupted(self) -> None:
        """An exception in the body of ``scale_loss``, before the backward, changes nothing."""
        if self.facts.level is None:
            return
        loss = self._loss(self.model, self._batch())
        self._enter(self._has_grads())
        try:
            with xamp.scale_loss(loss, self.optimizer):
                raise KeyError("the data are at their end")
        except KeyError:
            pass

    # ---------------------------------------------------------------- after each command

    def check(self) -> None:
        """The weights and the scale are what they must be."""
        got = torch.cat([v.flatten().float() for v in self.model.state_dict().values()])
        distance = float((got - self._flat(self.reference)).norm())
        assert distance <= self.tolerance, (
            f"weights are {distance:g} from fp32's, {self.tolerance:g} allowed: {self.facts}"
        )
        if self.facts.level is not None:
            assert xamp.loss_scale(self.optimizer) == self.facts.scale, self.facts

    # ---------------------------------------------------------------- helpers

    def _refused(self, error: type[Exception], text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error) as raised:
            call()
        assert isinstance(raised.value, xamp.XampError)
        assert text in str(raised.value), (str(raised.value), self.facts)

    def _close(self, got: torch.Tensor, expected: torch.Tensor, error: float) -> None:
        allowed = error * float(expected.norm()) + 20 * self.tolerance + 1e-5
        assert float((got - expected).norm()) <= allowed, (got, expected, allowed)

    def _batch(self) -> torch.Tensor:
        self.batches += 1
        generator = torch.Generator().manual_seed(self.batches)
        return torch.randn(5, 6, generator=generator).to(self.lane.device)

    @staticmethod
    def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch)
        return out.float().square().mean()

    def _has_grads(self) -> bool:
        return any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]) or any(
            p.grad is not None for p in self.model.parameters()
        )

    def _size(self) -> float:
        return float(self._flat(self.reference).norm())

    @staticmethod
    def _flat(model: nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])
