"""Loss scales on the device: where they are kept, how they move, and when they have collapsed.

All numbers of a session that live on the device are elements of one fp32 tensor (:class:`DeviceState`), so that where
the host has to know whether a step is skipped, one read of a few bytes tells it that and every scale.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.policy import Policy

__all__ = ["CollapseWatch", "DeviceState", "History", "LossScaler"]

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

    def overflowed(self, values: Sequence[float], optimizer: int) -> bool:
        """Whether ``optimizer`` overflowed, in ``values`` read from the device."""
        return values[self._first_sticky + optimizer] != 0.0

    def scales_in(self, values: Sequence[float]) -> Sequence[float]:
        """The loss scales, in ``values`` read from the device."""
        return values[: self._losses]


class LossScaler:
    """The scale of one ``loss_id``: static, or moved by :meth:`update` without the host knowing.

    Attributes:
        open: a ``scale_loss`` with this scale is being executed.
        scale: fp32 scalar tensor.
        factor: the same number, for losses to be multiplied by.
        version: counts the updates, so that the host can tell that a scale has not moved.
        exact: every value the scale can take is a power of two, so that multiplying by it loses nothing.
    """

    def __init__(self, policy: Policy, state: DeviceState, index: int) -> None:
        self.index = index
        self.open = False
        self.scale = state.scales[index]
        # What losses are multiplied by. ``.data`` shares the number but not the version counter, which all views of the
        # state share: autograd would take a moved flag for a changed scale.
        self.factor = self.scale.data
        self._inverse = state.inverses[index]
        self._inverse_is_stale = True
        self._losses = len(state.scales)
        self.version = 0
        self._policy = policy
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=state.values.device)
        start = min(max(policy.init_scale, policy.min_loss_scale), policy.max_loss_scale)
        self.initial = start if policy.dynamic else policy.static_scale
        self.scale.fill_(self.initial)
        moves = (policy.growth_factor, policy.backoff_factor, policy.min_loss_scale, policy.max_loss_scale)
        self._seen = 0.0
        self._full_slack = self._slack = 0
        self.exact = all(_is_power_of_two(x) for x in (self.initial, *(moves if policy.dynamic else ())))

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
        if scale != self._seen and self._policy.dynamic:
            policy = self._policy
            down = math.log(scale / policy.min_loss_scale) / -math.log(policy.backoff_factor)
            up = math.log(policy.max_loss_scale / scale) / math.log(policy.growth_factor)
            self._seen, self._full_slack = scale, int(min(down, up))
        self._slack = self._full_slack

    def update(self, found_inf: torch.Tensor) -> None:
        """Back off if ``found_inf`` is 1.0, else count a clean update and grow when due; never out of the bounds.

        Args:
            found_inf: fp32, one element, on the scale's device. It is not read by the host.
        """
        policy = self._policy
        if not policy.dynamic:
            return
        torch._amp_update_scale_(
            self.scale,
            self._growth_tracker,
            found_inf,
            policy.growth_factor,
            policy.backoff_factor,
            policy.growth_interval,
        )
        if self._slack:
            self._slack -= 1
        else:
            self.scale.clamp_(policy.min_loss_scale, policy.max_loss_scale)
        self._inverse_is_stale = True
        self.version += 1


def _is_power_of_two(value: float) -> bool:
    return math.frexp(value)[0] == 0.5


class CollapseWatch:
    """Counts, for one optimizer, the overflows in a row that no smaller scale can cure."""

    def __init__(self, policy: Policy, scalers: Sequence[LossScaler]) -> None:
        self._dynamic = policy.dynamic
        self._floor = policy.min_loss_scale
        self._scales: Sequence[float] = [scaler.initial for scaler in scalers]  # after the step before
        self._run = 0

    def clean(self, scales: Sequence[float]) -> None:
        """Take in a step that did not overflow."""
        self._run = 0
        self._scales = scales

    def collapsed(self, scales: Sequence[float], used: Sequence[int]) -> bool:
        """Take in a step that overflowed; whether it completes a run of :data:`COLLAPSE_RUN`.

        Args:
            scales: all loss scales after the step.
            used: indices of those that scaled this step's losses.
        """
        stuck = not self._dynamic or all(self._scales[i] <= self._floor for i in used)
        self._run = self._run + 1 if stuck else 0
        self._scales = scales
        return self._run > 0 and self._run % COLLAPSE_RUN == 0


class History:
    """What the device state was at each step, read without ever waiting for the device.

    In host memory, and on a device that has no such copies, it is read at once. Else it is copied asynchronously and
    read :data:`HISTORY_LAG` steps later: every rank reads the same step at the same step.
    """

    def __init__(self, state: DeviceState) -> None:
        self._values = state.values
        self._late = not state.values.is_cpu and _copies_without_waiting(state.values.device)
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


def _copies_without_waiting(device: torch.device) -> bool:
    """Whether the device can copy to the host while the host goes on, and say later that it has."""
    try:
        torch.empty(1, pin_memory=True)
        torch.get_device_module(device).Event().record()
    except (RuntimeError, AttributeError, NotImplementedError, AssertionError):
        return False
    return True
