"""What steps did, in numbers of the host: counts, runs of overflows, and values that are read some steps later.

Nothing here knows gradients or optimizers; :mod:`xamp.scaling.outcomes` is about the steps of one optimizer.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from xamp.policy import levels_where
from xamp.scaling.scale import LossScaler, ScaleRules
from xamp.values.late_reads import HISTORY_LAG, copies_without_waiting, copy_without_waiting

__all__ = [
    "COLLAPSE_RUN",
    "CollapseWatch",
    "Counts",
    "History",
    "Stats",
    "StepOutcome",
    "collapse_message",
    "run_after",
]

COLLAPSE_RUN = 50
"""Overflows in a row, at the floor or at a static scale, after which ``LossScaleCollapsed`` is raised."""


class StepOutcome(enum.Enum):
    """What ``optimizer.step()`` did."""

    APPLIED = "applied"
    SKIPPED = "skipped"


@dataclasses.dataclass(eq=False, frozen=True)
class Stats:
    """Counts of optimizer steps, over all optimizers of a session.

    Attributes:
        applied: steps taken.
        skipped: steps that were skipped because a gradient overflowed.
    """

    applied: int = 0
    skipped: int = 0

    def plus(self, *, skipped: bool) -> Stats:
        """Return the counts after one more step."""
        return Stats(self.applied + (not skipped), self.skipped + skipped)


@dataclasses.dataclass(eq=False, kw_only=True)
class Counts:
    """The counts of one session, and what its optimizers' outcomes share.

    Attributes:
        verbosity: 0: overflows are not logged.
        names_of: returns the qualified names of parameters, for messages.
        gradients_tell: an overflow shows in the gradients.
        all_scalers: returns the loss scales.
        applied, skipped: the counts, as far as the host knows of steps.
        runs: loaded runs of overflows, by index of the optimizer, which may not be added yet.
    """

    verbosity: int
    names_of: Callable[[Iterable[torch.Tensor]], list[str]]
    gradients_tell: bool
    all_scalers: Callable[[], Sequence[LossScaler]]
    applied: int = 0
    skipped: int = 0
    runs: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def scalers(self) -> Sequence[LossScaler]:
        """The loss scales."""
        return self.all_scalers()

    def count(self, *, skipped: bool) -> None:
        """Count one step."""
        if skipped:
            self.skipped += 1
        else:
            self.applied += 1

    @property
    def stats(self) -> Stats:
        """The counts."""
        return Stats(self.applied, self.skipped)

    def resume(self, steps: Mapping[str, int], known: Stats, runs: Mapping[int, int]) -> None:
        """Go on from a saved state: its counts, or where it has none those that are ``known``, and its ``runs``."""
        self.applied = steps.get("applied", known.applied)
        self.skipped = steps.get("skipped", known.skipped)
        self.runs = runs


def run_after(
    run: Any, overflowed: Any, had: Any, used: Iterable[int], scalers: Sequence[LossScaler]
) -> tuple[Any, Any]:
    """Return the overflows in a row after one more step, and whether they are a complete run.

    The one rule of what counts: the host asks it with numbers, a captured graph with tensors on the device, since no
    code of xamp runs at a replay. To count every step on the device would cost an eager one seven operators.

    Args:
        run: overflows in a row before the step, those alone that no smaller scale can cure.
        overflowed: whether the step was skipped.
        had: the loss scales with which it overflowed.
        used: indices of those that scaled its losses.
        scalers: all of the session.
    """
    for index in used:
        if (rules := scalers[index].rules).falls:
            overflowed = overflowed & (had[index] <= rules.floor)
    run = (run + 1) * overflowed
    return run, (run > 0) & (run % COLLAPSE_RUN == 0)


class CollapseWatch:
    """Counts the overflows in a row of one optimizer that no smaller scale can cure.

    The numbers are the host's, or tensors on the device, which the counting of captured steps writes in place.

    Attributes:
        run: the overflows in a row.
        scales: all loss scales after the last step.
    """

    def __init__(self, counts: Counts, run: Any, scales: Any = None) -> None:
        self._counts = counts
        self.run = run
        self.scales: Any = scales if scales is not None else self._host_scales()

    def resume(self, run: int) -> None:
        """Start again after ``run`` overflows in a row, with the scales that the host set."""
        self.run, self.scales = run, self._host_scales()

    def _host_scales(self) -> Sequence[float]:
        return [scaler.host_scale for scaler in self._counts.scalers]

    def clean(self, scales: Sequence[float]) -> None:
        """Record a step that did not overflow, with all loss scales as they are after it."""
        self.run = 0
        self.scales = scales

    def count_overflow(self, scales: Sequence[float], used: Iterable[int]) -> bool:
        """Record a step that overflowed; return whether it completes a run of :data:`COLLAPSE_RUN`.

        Args:
            scales: all loss scales after that step.
            used: indices of the scales that scaled the losses of that step.
        """
        self.run, complete = self.after(True, used)
        self.scales = scales
        return bool(complete)

    def after(self, overflowed: Any, used: Iterable[int]) -> tuple[Any, Any]:
        """Return the run of overflows after one more step: see :func:`run_after`."""
        return run_after(self.run, overflowed, self.scales, used, self._counts.scalers)


class History:
    """The values of a tensor at each step, read without waiting for the device where that is possible.

    Of a device that has asynchronous copies the host reads one :data:`HISTORY_LAG` steps later. The lag is fixed, so
    that all ranks read the same step at the same time. On other devices, and in host memory, it reads at once.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._late = self.comes_late(values)
        self._waiting: collections.deque[tuple[Any, torch.Tensor, Any]] = collections.deque()

    @staticmethod
    def comes_late(values: torch.Tensor) -> bool:
        """Return whether the host learns ``values`` some steps later."""
        return not values.is_cpu and copies_without_waiting(values.device)

    def _copy(self) -> tuple[torch.Tensor, Any]:
        """Begin to copy the values to the host; return the copy, and the event that tells when it is done."""
        return copy_without_waiting(self._values)

    def push(self, step: Any) -> Sequence[tuple[Any, list[float]]]:
        """Record the state as it is after ``step``; return the records that have become readable, oldest first."""
        if not self._late:
            return ((step, self._values.tolist()),)
        self._waiting.append((step, *self._copy()))
        return (self._oldest(),) if len(self._waiting) > HISTORY_LAG else ()

    def forget(self) -> None:
        """Drop all records."""
        self._waiting = collections.deque()

    def drain(self) -> Sequence[tuple[Any, list[float]]]:
        """Return all records and forget them. Waits for the device."""
        return [self._oldest() for _ in range(len(self._waiting))] if self._waiting else ()

    def peek(self) -> Iterator[tuple[Any, list[float]]]:
        """Yield all records and keep them. Waits for the device."""
        for step, late, event in self._waiting:
            event.synchronize()
            yield step, late.tolist()

    def arrived(self) -> Iterator[tuple[Any, list[float]]]:
        """Yield the records that can be read without waiting, oldest first, and keep them."""
        for step, late, event in self._waiting:
            if not event.query():
                return
            yield step, late.tolist()

    @property
    def waiting(self) -> int:
        """The number of records that have not been read."""
        return len(self._waiting)

    def _oldest(self) -> tuple[Any, list[float]]:
        step, late, event = self._waiting.popleft()
        event.synchronize()
        return step, late.tolist()


def collapse_message(at: str, rules: ScaleRules, names: Sequence[str], held: int, gradients_tell: bool) -> str:
    """Return the text of a LossScaleCollapsed.

    Args:
        at: the loss scales of the step.
        rules: how they move.
        names: of the parameters whose gradients are not finite.
        held: how many parameters have a gradient.
        gradients_tell: an overflow shows in the gradients; else the chip tells of it by a flag.
    """
    kind = f"at its floor (min_loss_scale={rules.floor:g})" if rules.dynamic else "static"
    nearest = f" Nearest to the loss is {names[-1]}, the last of these in the model." if len(names) > 1 else ""
    if len(names) > 1 and len(names) == held:
        nearest = " These are all there are, so the loss itself may be inf or nan."
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    none = "none at this moment" if gradients_tell else "unknown, for this chip tells of an overflow by a flag"
    wide = ", ".join(levels_where(lambda row: row.dtype == "bfloat16"))
    return (
        f"optimizer.step(): {COLLAPSE_RUN} overflows in a row with the loss scale {at}, {kind}: no smaller scale "
        f"will cure it. Gradients that are not finite: {listed or none}.{nearest} Look for a "
        "division, log or exp there, lower the learning rate, keep the module in fp32 (keep_fp32), or use "
        f"bfloat16 ({wide}). The first module and operator: run a step in `with "
        "xamp.debug.find_nonfinite(model, optimizer) as found:`, then print(found.report)."
    )
