"""Loss scales on the device: where they are kept, how they move, and when they have collapsed.

All numbers that a session keeps on the device are elements of one fp32 tensor (:class:`DeviceState`). So where the
host must know whether a step is skipped, one read of a few bytes gives it the flags and every scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from xamp.ground import kernels
from xamp.policy import Policy

if TYPE_CHECKING:
    from xamp.scaling.engine import Scope

__all__ = ["DeviceState", "LossScaler", "ScaleRules"]

_NEVER = 2**31 - 1  # a growth interval that no run reaches: the largest int32, the growth tracker's dtype

clock = itertools.count(1).__next__
"""Returns a larger number each time: which of two events of this process was later."""


class DeviceState:
    """One fp32 tensor: the scales, their inverses, a flag for each, and two overflow flags for each optimizer.

    Attributes:
        values: fp32, shape (3 * losses + 2 * optimizers,). The other attributes are views of it.
        scales, inverses: one element for each loss.
        found: one for each loss: whether a backward with this scale overflowed since the scale last moved.
        found_inf: one for each optimizer: whether the backward that just ended overflowed; scratch.
        found_inf_since_step: one for each optimizer: whether any backward since its last step overflowed.
        captures: see :meth:`xamp.contract.Backend.capture_check`.
    """

    def __init__(
        self, losses: int, optimizers: int, device: torch.device, captures: Callable[[], bool] | None = None
    ) -> None:
        self.captures = captures
        self.values = torch.zeros(3 * losses + 2 * optimizers, dtype=torch.float32, device=device)
        parts: list[torch.Tensor] = list(self.values.split([losses, losses, losses, optimizers, optimizers]))
        self.scales, self.inverses, self.found, self.found_inf, self.found_inf_since_step = parts
        self._losses = losses
        self._first_of_optimizers = 3 * losses + optimizers

    def lower_flags(self) -> None:
        """Lower all flags."""
        self.values[2 * self._losses :].zero_()

    def overflowed(self, values: Sequence[float], optimizer: int) -> bool:
        """Return ``found_inf_since_step`` of ``optimizer`` out of ``values``, which the host read from the device."""
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
        """Return what an overflow makes of ``scale``."""
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

    Attributes:
        scope: the ``scale_loss`` with this scale that was entered last and not left; see :meth:`is_open`.
        scale: fp32 scalar tensor.
        factor: the same number; losses are multiplied by it.
        growth_tracker: int32 scalar tensor: clean updates since the scale last moved.
        rules: how the scale moves; :meth:`follow` changes them.
        host_scale: the value to which the host last set the scale; set_at: when, by :data:`clock`.
        updates: tells one window from another: when the last update of a dynamic scale was done, by :data:`clock`.
        version: tells that the value may have changed: when it last may have, by :data:`clock`. No two scales have one.
        found: fp32 scalar: whether a backward with this scale overflowed since the scale last moved. Where there is one
            loss and one optimizer, that is the optimizer's ``found_inf_since_step``, and costs nothing.
        has_own_flag: :attr:`found` is a flag of the scale's own, and no optimizer's.
        exact: every value that the scale can take is a power of two, so that multiplying by it is exact.
    """

    def __init__(self, policy: Policy, state: DeviceState, index: int) -> None:
        self.index = index
        self.scope: Scope | None = None
        self.exact = False
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=state.values.device)
        self.version = self.updates = clock()
        self._is_in_graph = False  # a graph holds an update: replays move the scale, and nobody tells the host
        self.live_in(state)
        self.rules = ScaleRules.of(policy)
        self.set(self.rules.within(policy.init_scale) if policy.dynamic else policy.static_scale)

    def is_open(self) -> bool:
        """Return whether a ``scale_loss`` with this scale is being executed."""
        return self.scope is not None and self.scope.is_open()

    def live_in(self, state: DeviceState) -> None:
        """Keep the scale in ``state`` from now on."""
        self.scale = state.scales[self.index]
        # Losses are multiplied by this tensor. All views of the state share one version counter, so autograd would take
        # a changed flag for a changed scale. ``.data`` shares the number, but has a version counter of its own.
        self.factor = self.scale.data
        self._inverse = state.inverses[self.index]
        self._own_found = state.found[self.index]
        self._found_inf_since_step = (
            state.found_inf_since_step[0] if len(state.scales) == len(state.found_inf_since_step) == 1 else None
        )
        self._use_usual_flag()
        self._set_power_of_two()
        self._losses = len(state.scales)
        self._captures = state.captures

    def in_graph(self) -> bool:
        """Return whether replays of a graph may move the scale, or a graph is being captured that will."""
        if not self._is_in_graph and self._captures is not None:
            self._is_in_graph = self._captures()
            if self._is_in_graph:
                self._set_power_of_two()
        return self._is_in_graph

    def _set_power_of_two(self) -> None:
        """Say of the inverse whether it is a power of two. A graph is right for every scale that is set later."""
        kernels.set_power_of_two(self._inverse, self.exact and not self._is_in_graph)

    def set(self, scale: float, growth_tracker: int = 0) -> None:
        """Set the scale and the growth tracker. Does not wait for the device."""
        self.growth_tracker.fill_(growth_tracker)
        self.fill(scale)

    def fill(self, scale: float) -> None:
        """Set the scale and keep the growth tracker."""
        self.scale.fill_(scale)
        self.host_scale = scale
        self.set_at = clock()
        self.follow(self.rules)

    def follow(self, rules: ScaleRules) -> None:
        """Use ``rules`` from now on."""
        self.changed()
        self.rules = rules
        self.exact = _is_power_of_two(self.host_scale) and rules.keeps_powers_of_two
        self._set_power_of_two()

    def changed(self) -> None:
        """Forget what the host knew of the scale. Whoever writes to :attr:`scale` must call this."""
        self.exact = False
        self._set_power_of_two()
        self._known_scale = 0.0
        self._safe_updates_of_known = self._safe_updates = 0  # how many updates cannot leave the bounds
        self._inverse_is_stale = True
        self.version = clock()

    @property
    def inverse(self) -> torch.Tensor:
        """fp32 scalar tensor, 1 / scale."""
        # A capture is looked for first: what it records must be right for scales that are no power of two.
        if (self._captures is not None and self.in_graph()) or self._inverse_is_stale:
            torch.reciprocal(self.scale, out=self._inverse)
            self._inverse_is_stale = False
        return self._inverse

    def know(self, values: Sequence[float]) -> None:
        """Take in the device state as the host has just read it, to compute less for the next backward.

        Far from its bounds the scale need not be clamped, and while scale * inverse is 1 the inverse need not be
        computed again: two of the seven small operators of such a step, 5 % of its time on a CPU.
        """
        scale = values[self.index]
        self._inverse_is_stale = scale * values[self._losses + self.index] != 1.0
        if scale != self._known_scale and self.rules.dynamic:
            self._known_scale, self._safe_updates_of_known = scale, self.rules.moves_before_bound(scale)
        self._safe_updates = self._safe_updates_of_known

    def _use_usual_flag(self) -> None:
        self.has_own_flag = self._found_inf_since_step is None
        self.found = self._own_found if self._found_inf_since_step is None else self._found_inf_since_step

    def end_window(self, *, stepped: bool = True) -> None:
        """Move the scale by what was found since it last moved.

        Args:
            stepped: a step ends the window. False: the gradients were cleared without one. The scale then backs off if
                one of them overflowed, and counts no clean update; ``found_inf_since_step`` stays up for the step to
                come.
        """
        before = self.updates
        try:
            self.update(self.found, None if stepped else _NEVER)
        finally:
            if self.updates != before:
                self.lower_own_flag()
                if not stepped:
                    self.growth_tracker.sub_(1).clamp_(min=0)
                    self.found, self.has_own_flag = self._own_found, True

    def lower_own_flag(self) -> None:
        """Forget what was found since the scale last moved."""
        if self.has_own_flag:
            self._own_found.zero_()
            self._use_usual_flag()

    def update(self, found_inf: torch.Tensor, interval: int | None = None) -> None:
        """Back off if ``found_inf`` is 1.0, else count a clean update and grow when due, within the bounds.

        Args:
            found_inf: fp32, one element, on the scale's device. The host does not read it.
            interval: clean updates until the scale grows; None: as its rules say.
        """
        rules = self.rules
        if not rules.dynamic:
            return
        safe = 0 if self._captures is not None and self.in_graph() else self._safe_updates
        scale = self.scale
        before = scale._version
        self._safe_updates = 0
        self._inverse_is_stale = True
        self.version = done = clock()
        try:
            kernels.update_scale_(
                scale,
                self.growth_tracker,
                found_inf,
                rules.growth_factor,
                rules.backoff_factor,
                rules.growth_interval if interval is None else interval,
            )
            if safe:
                self._safe_updates = safe - 1
            else:
                scale.clamp_(rules.floor, rules.ceiling)
            self.updates = done
        except BaseException:
            if scale._version != before:  # the kernel has run
                scale.clamp_(rules.floor, rules.ceiling)
                self.updates = done
            raise


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5
