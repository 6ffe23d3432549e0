"""Loss scales on the device: where they are kept, and how they move.

All numbers that a session keeps on the device are elements of one fp32 tensor (:class:`DeviceState`). So where the
host must know whether a step is skipped, one read of a few bytes gives it the flags and every scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from xamp.policy import Policy
from xamp.torch_compat import kernels

__all__ = ["DeviceState", "LossScaler", "ScaleRules", "clock"]

_NEVER = 2**31 - 1  # a growth interval that no run reaches: the largest int32, the growth tracker's dtype

clock = itertools.count(1).__next__
"""Returns a larger number each time: which of two events of this process was later."""


class DeviceState:
    """One fp32 tensor: the scales, their inverses, a flag for each, and two overflow flags for each optimizer.

    Attributes:
        values: fp32, shape (3 * losses + 2 * optimizers,). The other attributes are views of it.
        scales, inverses: one element for each loss.
        overflowed_in_window: one for each loss: whether a backward with this scale overflowed since the scale moved.
        overflowed_now: one for each optimizer: whether the backward that just ended overflowed; scratch.
        overflowed_since_step: one for each optimizer: whether any backward since its last step overflowed.
    """

    def __init__(self, losses: int, optimizers: int, device: torch.device) -> None:
        self.values = torch.zeros(3 * losses + 2 * optimizers, dtype=torch.float32, device=device)
        parts: list[torch.Tensor] = list(self.values.split([losses, losses, losses, optimizers, optimizers]))
        self.scales, self.inverses, self.overflowed_in_window, self.overflowed_now, self.overflowed_since_step = parts
        self._losses = losses
        self._first_of_optimizers = 3 * losses + optimizers

    def lower_flags(self) -> None:
        """Lower all flags."""
        self.values[2 * self._losses :].zero_()

    def overflowed(self, values: Sequence[float], optimizer: int) -> bool:
        """Return ``overflowed_since_step`` of ``optimizer`` out of ``values``, which the host read from the device."""
        return values[self._first_of_optimizers + optimizer] != 0.0

    def scales_in(self, values: Sequence[float]) -> Sequence[float]:
        """Return the loss scales out of ``values``, which the host read from the device."""
        return values[: self._losses]


class ScaleRules(NamedTuple):
    """How a loss scale moves; see :func:`xamp.initialize` for the numbers.

    Attributes:
        dynamic: whether the scale moves at all.
        floor, ceiling: the scale stays between these.
    """

    dynamic: bool
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    floor: float
    ceiling: float

    @classmethod
    def of(cls, policy: Policy) -> ScaleRules:
        """Return the rules of a policy."""
        growth = policy.growth_factor, policy.backoff_factor, policy.growth_interval
        return cls(policy.dynamic, *growth, policy.min_loss_scale, policy.max_loss_scale)

    @property
    def falls(self) -> bool:
        """Whether an overflow makes the scale smaller."""
        return self.dynamic and self.backoff_factor < 1.0

    @property
    def keeps_powers_of_two(self) -> bool:
        """Whether every move makes a power of two of a power of two."""
        reached = (self.floor, self.ceiling) if self.ceiling < 2.0**127 else (self.floor,)  # it never grows to inf
        moves = (self.growth_factor, self.backoff_factor, *reached) if self.dynamic else ()
        return all(map(_is_power_of_two, moves))

    def within(self, scale: float) -> float:
        """Return ``scale``, or the bound that it has passed."""
        return min(max(scale, self.floor), self.ceiling)

    def after_overflow(self, scale: float) -> float:
        """Return ``scale`` as it is after an overflow."""
        return self.within(scale * self.backoff_factor) if self.falls else scale

    def moves_before_bound(self, scale: float) -> int:
        """Return how many updates cannot move ``scale`` out of its bounds, whatever they find."""
        moves = []
        if self.backoff_factor != 1.0:
            moves.append(math.log(scale / self.floor) / -math.log(self.backoff_factor))
        if self.growth_factor != 1.0:
            moves.append(math.log(self.ceiling / scale) / math.log(self.growth_factor))
        return int(max(min(moves, default=0.0), 0.0))


class LossScaler:
    """The loss scale of one ``loss_id``. :meth:`update` moves a dynamic one on the device; the host does not read it.

    Args:
        policy: has the first value and the rules.
        state: where the numbers lie.
        index: the ``loss_id``.
        note_use: see :meth:`xamp.scaling.capture.Capture.note_use_of_scale`; None: nothing is captured on the device.

    Attributes:
        scale: fp32 scalar tensor.
        factor: the same number; losses are multiplied by it.
        growth_tracker: int32 scalar tensor: clean updates since the scale last moved.
        rules: how the scale moves.
        host_scale: the value to which the host last set the scale; set_at: when, by :data:`clock`.
        window: tells one window from another, and one value from another: when the scale last moved or was set.
        overflowed_in_window: fp32 scalar: whether a backward with this scale overflowed since the scale last moved.
    """

    def __init__(self, policy: Policy, state: DeviceState, index: int, note_use: Callable[[], bool] | None) -> None:
        self.index = index
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=state.values.device)
        self.scale = state.scales[index]
        # Losses are multiplied by this tensor. All views of the state share one version counter, so autograd would take
        # a changed flag for a changed scale. ``.data`` shares the number, but has a version counter of its own.
        self.factor = self.scale.data
        self.overflowed_in_window = state.overflowed_in_window[index]
        self._inverse = state.inverses[index]
        self._note_use = note_use
        self.rules = ScaleRules.of(policy)
        self.set(self.rules.within(policy.init_scale) if policy.dynamic else policy.static_scale)

    def set(self, scale: float, growth_tracker: int = 0) -> None:
        """Set the scale and the growth tracker. Does not wait for the device."""
        # torch's kernel grows the scale where the tracker equals the interval; a larger one would never grow it.
        self.growth_tracker.fill_(min(growth_tracker, self.rules.growth_interval - 1))
        self.fill(scale)

    def fill(self, scale: float) -> None:
        """Set the scale and keep the growth tracker."""
        self.scale.fill_(scale)
        self.host_scale = scale
        self.set_at = self.window = clock()
        kernels.set_power_of_two(self._inverse, self.exact)
        self._known = 0.0, 0  # the value that the host has read, and how many updates cannot move it out of its bounds
        self._safe_updates = 0  # how many of these are left
        self._inverse_is_stale = True

    @property
    def exact(self) -> bool:
        """Whether every value that the scale can take is a power of two, so that multiplying by it is exact."""
        return _is_power_of_two(self.host_scale) and self.rules.keeps_powers_of_two

    @property
    def inverse(self) -> torch.Tensor:
        """fp32 scalar tensor, 1 / scale."""
        # First: what a graph holds must be right for scales that are no power of two.
        unseen = self._note_use is not None and self._note_use()
        if unseen:
            kernels.set_power_of_two(self._inverse, False)
        if unseen or self._inverse_is_stale:
            torch.reciprocal(self.scale, out=self._inverse)
            self._inverse_is_stale = False
        return self._inverse

    def moves_unseen(self) -> bool:
        """Return whether the scale may move without a call of :meth:`update`, so that the host does not know it."""
        return self._note_use is not None and self._note_use()

    def know(self, scale: float, inverse: float) -> None:
        """Take in the numbers that the host has just read, to compute less for the next backward.

        Far from its bounds the scale need not be clamped, and while scale * inverse is 1 the inverse need not be
        computed again: two of the seven small operators of such a step, 5 % of its time on a CPU.
        """
        self._inverse_is_stale = scale * inverse != 1.0
        if scale != self._known[0] and self.rules.dynamic:
            self._known = scale, self.rules.moves_before_bound(scale)
        self._safe_updates = self._known[1]

    def note_overflow(self, found_inf: torch.Tensor) -> None:
        """Raise the flag of the window by ``found_inf``, that of a backward with this scale: fp32, 1.0: an overflow."""
        torch.maximum(self.overflowed_in_window, found_inf, out=self.overflowed_in_window)

    def end_window(self, *, stepped: bool = True) -> None:
        """Move the scale by what was found since it last moved.

        Args:
            stepped: a step ends the window. False: the gradients were cleared without one. The scale then backs off if
                one of them overflowed, and counts no clean update; ``overflowed_since_step`` stays up for the step to
                come.
        """
        self.update(self.overflowed_in_window, None if stepped else _NEVER)
        self.overflowed_in_window.zero_()
        if not stepped:
            self.growth_tracker.sub_(1).clamp_(min=0)

    def parts(self) -> tuple[list[object], list[torch.Tensor]]:
        """Return the object and the tensors that :meth:`set` writes, but for the :class:`DeviceState`."""
        return [self], [self.growth_tracker]

    def update(self, found_inf: torch.Tensor, interval: int | None = None) -> None:
        """Back off if ``found_inf`` is 1.0, else count a clean update and grow when due, within the bounds.

        Args:
            found_inf: fp32, one element, on the scale's device. The host does not read it.
            interval: clean updates until the scale grows; None: as its rules say.
        """
        rules = self.rules
        if not rules.dynamic:
            return
        kernels.update_scale_(
            self.scale,
            self.growth_tracker,
            found_inf,
            rules.growth_factor,
            rules.backoff_factor,
            rules.growth_interval if interval is None else interval,
        )
        safe = 0 if self._note_use is not None and self._note_use() else self._safe_updates
        if not safe:
            self.scale.clamp_(rules.floor, rules.ceiling)
        self._safe_updates = safe and safe - 1
        self._inverse_is_stale = True
        self.window = clock()


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5
