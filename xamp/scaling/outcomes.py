"""What became of the steps of one optimizer, as the host learns of it.

A step that the device decides ends before the host knows whether it was skipped. Its numbers arrive later, without a
wait. Then the step is counted, logged if it was skipped, and judged: a run of overflows that no smaller scale cures is
an error. Steps in a captured graph are counted on the device, by :mod:`xamp.scaling.capture`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence

import torch

from xamp.errors import LossScaleCollapsed
from xamp.scaling.capture import Capture, Replays
from xamp.scaling.counts import (
    COLLAPSE_RUN,
    CollapseWatch,
    Counts,
    History,
    Stats,
    StepOutcome,
    collapse_message,
)
from xamp.scaling.gradients import Gradients
from xamp.scaling.scale import DeviceState, clock
from xamp.values.log import say

__all__ = ["Outcomes", "Record"]

Record = tuple[tuple[Collection[int], int], Sequence[float]]
"""One step: the indices of the loss scales that it used, the time, and the device state after it."""


class Outcomes:
    """The outcomes of one optimizer's steps.

    Attributes:
        last: what the last step did: an outcome, or the flag on the device that tells it; None before the first.
    """

    def __init__(self, counts: Counts, memory: DeviceState, index: int, gradients: Gradients, unseen: Capture) -> None:
        self.last: StepOutcome | torch.Tensor | None = None
        self._counts = counts
        self._memory = memory
        self._index = index
        self._gradients = gradients
        self._seen: tuple[int, Sequence[float]] | None = None  # the newest step that was counted: its time and state
        self._on_device = Replays(counts, memory, unseen)
        self._history = History(memory.values)
        self._watch = CollapseWatch(counts, counts.runs.get(index, 0))

    # ---------------------------------------------------------------- a step ends

    def nothing_stepped(self) -> None:
        """Note a step that found no gradient: it counts neither as applied nor as skipped."""
        self.last = None

    def unchecked(self, flag: torch.Tensor) -> None:
        """Note and count a step at a level that checks no gradient. ``flag``: fp32 scalar, for its device."""
        self.last = StepOutcome.APPLIED
        if not self._on_device.record(torch.zeros_like(flag), self._gradients.backwards.windows):
            self._counts.count(skipped=False)

    def decided_on_host(self, outcome: StepOutcome, values: Sequence[float]) -> Sequence[Record]:
        """Note a step of which the host knows all; return what :meth:`observe` is to judge, oldest first."""
        self.last = outcome
        return (*self._history.drain(), ((self._gradients.backwards.windows, clock()), values))

    def decided_on_device(self, flag: torch.Tensor) -> Sequence[Record]:
        """Note a step that the device decided by ``flag``; return what became readable of earlier ones."""
        self.last = flag
        used = self._gradients.backwards.windows
        if self._on_device.record(flag, used):
            return ()
        return self._history.push((used, clock()))

    def observe(self, step: tuple[Collection[int], int], values: Sequence[float]) -> None:
        """Count, log and judge one step whose numbers the host has.

        Args:
            step: the indices of the loss scales that were used, and the time of the step.
            values: the device state after the step.

        Raises:
            LossScaleCollapsed: the step completes a run of overflows that no smaller scale could cure.
        """
        used, at = step
        scales = self._memory.scales_in(values)
        skipped = self._memory.overflowed(values, self._index)
        self._seen = at, values
        self._counts.count(skipped=skipped)
        if not skipped:
            self._watch.clean(scales)
            return
        collapsed = self._watch.count_overflow(scales, used)
        if self._on_device.flag is not None:
            collapsed = self._on_device.take_collapse()
        if self._counts.verbosity:
            self.tell_of_overflow(scales, used)
        if collapsed:
            raise LossScaleCollapsed(self._collapse_message(scales, used))

    def judge_unseen(self) -> None:
        """Raise a LossScaleCollapsed where replays met a run of overflows that no smaller scale could cure."""
        if self._on_device.take_collapse():
            raise LossScaleCollapsed(self._collapse_message(self._memory.values.tolist(), self._on_device.scales))

    # ---------------------------------------------------------------- what is known

    def known(self) -> StepOutcome | None:
        """Return the outcome of the last step. May wait for the device."""
        if not isinstance(self.last, torch.Tensor):
            return self.last
        return StepOutcome.SKIPPED if bool(self.last) else StepOutcome.APPLIED

    def not_counted(self) -> Stats:
        """Return the steps, replays among them, that the counts of the session do not hold. Waits for the device."""
        found = Stats(*self._on_device.read())
        for _, values in self._history.peek():
            found = found.plus(skipped=self._memory.overflowed(values, self._index))
        return found

    def arrived(self) -> Sequence[Sequence[float]]:
        """Return the device state at each step that is not counted yet and can be read without waiting."""
        return [values for _, values in self._history.arrived()]

    def newest(self) -> tuple[int, Sequence[float]] | None:
        """Return when the newest step was that the host can read without waiting, and the device state after it."""
        late = list(self._history.arrived())
        if late:
            (_, at), values = late[-1]
            return at, values
        return self._seen

    @property
    def uncounted(self) -> int:
        """The number of steps that the host has not counted yet."""
        return self._history.waiting

    def overflow_run(self) -> int:
        """Return the overflows in a row, up to the last step, that no smaller scale could cure. Waits for the device.

        Of a run whose error has not been raised yet it returns the number with which the next overflow raises it.
        """
        if self._on_device.flag is not None:
            return self._on_device.overflow_run()
        watch, complete = copy.copy(self._watch), False
        for (used, _), values in self._history.peek():
            scales = self._memory.scales_in(values)
            if self._memory.overflowed(values, self._index):
                complete |= watch.count_overflow(scales, used)
            else:
                watch.clean(scales)
        return COLLAPSE_RUN - 1 if complete else watch.run

    # ---------------------------------------------------------------- checkpoints

    def resume(self, overflow_run: int) -> None:
        """Go on as after ``overflow_run`` overflows in a row, with the scales that were just loaded."""
        self._history.forget()
        self._seen = None
        self._watch.resume(overflow_run)
        self._on_device.resume(overflow_run)

    def parts(self) -> tuple[list[object], list[torch.Tensor]]:
        """Return the objects and the tensors that :meth:`resume` writes."""
        return [self, self._history, self._watch, self._on_device], self._on_device.tensors()

    # ---------------------------------------------------------------- messages

    def tell_of_overflow(self, scales: Sequence[float], used: Collection[int]) -> None:
        """Log that a step was skipped. ``scales``: all loss scales after the step; ``used``: indices of its own."""
        say("gradient overflow: step skipped, loss scale %s", ", ".join(f"{scales[i]:g}" for i in used))

    def _collapse_message(self, scales: Sequence[float], used: Iterable[int]) -> str:
        used = list(used)
        return collapse_message(
            ", ".join(f"{scales[i]:g}" for i in used),
            self._counts.scalers[used[0]].rules,
            self._counts.names_of(self._gradients.not_finite()),
            len(self._gradients.present()),
            self._counts.gradients_tell,
        )
