"""Loss scales on the device: where they are kept, how they move, and when they have collapsed.

All numbers of a session that live on the device are elements of one fp32 tensor (:class:`DeviceState`), so that where
the host has to know whether a step is skipped, one read of a few bytes tells it that and every scale.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.policy import Policy

__all__ = ["CollapseWatch", "DeviceState", "History", "LossScaler", "ScaleRules"]

COLLAPSE_RUN = 50
"""Overflows in a row, at the floor or at a static scale, after which ``LossScaleCollapsed`` is raised."""

HISTORY_LAG = 16
"""Steps after which a device that must not be waited for is read; by then the copy has long arrived."""


class DeviceState:
    """One fp32 tensor: the scales, their inverses, and two overflow flags an optimizer.

    Attributes:
        values: fp32, shape (2 * losses + 2 * optimizers,).
        scales, inverses: by loss: views.
        flags: what the backward just left found, by optimizer: a view, scratch for :meth:`LossScaler.update`.
        sticky: whether any backward since the optimizer's last step overflowed, by optimizer: a view.
    """

    def __init__(self, losses: int, optimizers: int, device: torch.device) -> None:
        self.scales: torch.Tensor
        self.inverses: torch.Tensor
        self.flags: torch.Tensor
        self.sticky: torch.Tensor
        self.values = torch.zeros(2 * losses + 2 * optimizers, dtype=torch.float32, device=device)
        self.scales, self.inverses, self.flags, self.sticky = self.values.split(
            [losses, losses, optimizers, optimizers]
        )
        self._losses = losses
        self._first_sticky = 2 * losses + optimizers

    def lower_flags(self) -> None:
        """Take all flags down."""
        self.values[2 * self._losses :].zero_()

    def overflowed(self, values: Sequence[float], optimizer: int) -> bool:
        """Whether ``optimizer`` overflowed, in ``values`` read from the device."""
        return values[self._first_sticky + optimizer] != 0.0

    def scales_in(self, values: Sequence[float]) -> Sequence[float]:
        """The loss scales, in ``values`` read from the device."""
        return values[: self._losses]


@dataclasses.dataclass(frozen=True)
class ScaleRules:
    """How a loss scale moves; see :func:`xamp.initialize` for the numbers.

    Attributes:
        dynamic: whether it moves at all.
        floor, ceiling: it stays between these.
    """

    dynamic: bool
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    floor: float
    ceiling: float

    @classmethod
    def of(cls, policy: Policy) -> ScaleRules:
        """The rules of a policy."""
        return cls(
            policy.dynamic,
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
            policy.min_loss_scale,
            policy.max_loss_scale,
        )

    @property
    def falls(self) -> bool:
        """Whether an overflow makes the scale smaller."""
        return self.dynamic and self.backoff_factor < 1.0

    def within(self, scale: float) -> float:
        """``scale``, or the bound that it has passed."""
        return min(max(scale, self.floor), self.ceiling)

    def moves_before_bound(self, scale: float) -> int:
        """How many updates, whatever they find, cannot take ``scale`` out of its bounds."""
        moves = []
        if self.backoff_factor != 1.0:
            moves.append(math.log(scale / self.floor) / -math.log(self.backoff_factor))
        if self.growth_factor != 1.0:
            moves.append(math.log(self.ceiling / scale) / math.log(self.growth_factor))
        return int(max(min(moves, default=0.0), 0.0))


class LossScaler:
    """The scale of one ``loss_id``: static, or moved by :meth:`update` without the host knowing.

    Attributes:
        open: a ``scale_loss`` with this scale is being executed.
        scale: fp32 scalar tensor.
        factor: the same number, for losses to be multiplied by.
        growth_tracker: int32 scalar tensor: clean updates since the scale last moved.
        rules: how it moves; :meth:`follow` changes them.
        host_scale: what the host last set it to.
        version: counts the updates, so that the host can tell that a scale has not moved.
        exact: every value the scale can take is a power of two, so that multiplying by it loses nothing.
    """

    def __init__(self, policy: Policy, state: DeviceState, index: int) -> None:
        self.index = index
        self.open = False
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=state.values.device)
        self.version = 0
        self.live_in(state)
        self.rules = ScaleRules.of(policy)
        self.set(self.rules.within(policy.init_scale) if policy.dynamic else policy.static_scale)

    def live_in(self, state: DeviceState) -> None:
        """Keep the scale in ``state`` from now on."""
        self.scale = state.scales[self.index]
        # What losses are multiplied by. ``.data`` shares the number but not the version counter, which all views of the
        # state share: autograd would take a moved flag for a changed scale.
        self.factor = self.scale.data
        self._inverse = state.inverses[self.index]
        self._losses = len(state.scales)

    def set(self, scale: float, growth_tracker: int = 0) -> None:
        """Make ``scale`` the scale, after ``growth_tracker`` clean updates. Does not wait for the device."""
        self.growth_tracker.fill_(growth_tracker)
        self.fill(scale)

    def fill(self, scale: float) -> None:
        """Make ``scale`` the scale, and go on counting."""
        self.scale.fill_(scale)
        self.host_scale = scale
        self.follow(self.rules)

    def follow(self, rules: ScaleRules) -> None:
        """Move by ``rules`` from now on."""
        self.rules = rules
        moves = (rules.growth_factor, rules.backoff_factor, rules.floor, rules.ceiling) if rules.dynamic else ()
        self.exact = all(_is_power_of_two(x) for x in (self.host_scale, *moves))
        self.changed()

    def changed(self) -> None:
        """Whoever wrote to :attr:`scale` says so: what was known of it no longer holds."""
        self._seen = 0.0
        self._full_slack = self._slack = 0
        self._inverse_is_stale = True
        self.version += 1

    @property
    def inverse(self) -> torch.Tensor:
        """fp32 scalar tensor, 1 / scale."""
        if self._inverse_is_stale:
            torch.reciprocal(self.scale, out=self._inverse)
            self._inverse_is_stale = False
        return self._inverse

    def know(self, values: Sequence[float]) -> None:
        """The host has read the device state as it now is: what need not be computed for the next backward.

        So many updates cannot take the scale out of its bounds, and an inverse that still fits need not be made anew.
        Leaves out two of the seven small operators of a step whose decision the host reads (5 % of it on a CPU).
        """
        scale = values[self.index]
        self._inverse_is_stale = scale * values[self._losses + self.index] != 1.0
        if scale != self._seen and self.rules.dynamic:
            self._seen, self._full_slack = scale, self.rules.moves_before_bound(scale)
        self._slack = self._full_slack

    def update(self, found_inf: torch.Tensor) -> None:
        """Back off if ``found_inf`` is 1.0, else count a clean update and grow when due; never out of the bounds.

        Args:
            found_inf: fp32, one element, on the scale's device. It is not read by the host.
        """
        rules = self.rules
        if not rules.dynamic:
            return
        torch._amp_update_scale_(
            self.scale,
            self.growth_tracker,
            found_inf,
            rules.growth_factor,
            rules.backoff_factor,
            rules.growth_interval,
        )
        if self._slack:
            self._slack -= 1
        else:
            self.scale.clamp_(rules.floor, rules.ceiling)
        self._inverse_is_stale = True
        self.version += 1


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


class CollapseWatch:
    """Counts, for one optimizer, the overflows in a row that no smaller scale can cure.

    Attributes:
        run: how many there have been.

    Args:
        scalers: the loss scales.
        moved_before_step: a scale moves when its backward is checked, not after the step.
    """

    def __init__(self, scalers: Sequence[LossScaler], *, moved_before_step: bool = True) -> None:
        self._scalers = scalers
        self._moved_before_step = moved_before_step
        self.resume(0)

    def resume(self, run: int) -> None:
        """Start anew with the scales as the host set them, after ``run`` overflows in a row."""
        self.run = run
        self._scales: Sequence[float] = [scaler.host_scale for scaler in self._scalers]  # after the step before

    def clean(self, scales: Sequence[float]) -> None:
        """Take in a step that did not overflow."""
        self.run = 0
        self._scales = scales

    def collapsed(self, scales: Sequence[float], used: Sequence[int]) -> bool:
        """Take in a step that overflowed; whether it completes a run of :data:`COLLAPSE_RUN`.

        Args:
            scales: all loss scales when the step was taken.
            used: indices of those that scaled this step's losses.
        """
        had = self._scales if self._moved_before_step else scales
        stuck = all(had[i] <= rules.floor for i in used if (rules := self._scalers[i].rules).falls)
        self.run = self.run + 1 if stuck else 0
        self._scales = scales
        return self.run > 0 and self.run % COLLAPSE_RUN == 0


class History:
    """What the device state was at each step, read without ever waiting for the device.

    In host memory, and on a device that has no such copies, it is read at once. Else it is copied asynchronously and
    read :data:`HISTORY_LAG` steps later: every rank reads the same step at the same step.
    """

    def __init__(self, state: DeviceState) -> None:
        self._values = state.values
        self._late = not state.values.is_cpu and copies_without_waiting(state.values.device)
        self._waiting: collections.deque[tuple[Any, torch.Tensor, Any]] = collections.deque()

    def push(self, note: Any) -> Iterator[tuple[Any, list[float]]]:
        """Record the state now, with ``note``; yields what has become readable, oldest first."""
        if not self._late:
            yield note, self._values.tolist()
            return
        copy, event = self._copy()
        self._waiting.append((note, copy, event))
        if len(self._waiting) > HISTORY_LAG:
            yield self._oldest()

    def forget(self) -> None:
        """Drop everything recorded."""
        self._waiting.clear()

    def drain(self) -> Sequence[tuple[Any, list[float]]]:
        """Hand out everything recorded. Waits for the device."""
        return [self._oldest() for _ in range(len(self._waiting))] if self._waiting else ()

    def peek(self) -> Iterator[tuple[Any, list[float]]]:
        """What is recorded and not yet handed out. Waits for the device; the order of handing out does not change."""
        for note, copy, event in self._waiting:
            event.synchronize()
            yield note, copy.tolist()

    def _copy(self) -> tuple[torch.Tensor, Any]:
        device = self._values.device
        copy = torch.empty(self._values.shape, dtype=torch.float32, pin_memory=True)
        copy.copy_(self._values, non_blocking=True)
        event = torch.get_device_module(device).Event()
        event.record()
        return copy, event

    def _oldest(self) -> tuple[Any, list[float]]:
        note, copy, event = self._waiting.popleft()
        event.synchronize()
        return note, copy.tolist()


def copies_without_waiting(device: torch.device) -> bool:
    """Whether the device can copy to the host while the host goes on, and say later that it has."""
    try:
        torch.empty(1, pin_memory=True)
        torch.get_device_module(device).Event().record()
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return True
