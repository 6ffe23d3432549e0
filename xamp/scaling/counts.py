"""What the steps of a session did, as the host learns of it.

A step that the device decides ends before the host knows whether it was skipped. Its numbers arrive later, without a
wait. Then the step is counted, logged if it was skipped, and judged: a run of overflows that no smaller scale cures is
an error. No code of xamp runs at a replay of a captured graph, so a step that is captured counts on the device, and the
host reads that when somebody asks.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from xamp.errors import LossScaleCollapsed
from xamp.ground.late_reads import HISTORY_LAG, copies_without_waiting, copy_without_waiting
from xamp.ground.log import say
from xamp.ground.pickle_names import pickled_as
from xamp.policy import levels_where
from xamp.scaling.gradients import Gradients
from xamp.scaling.scale import DeviceState, LossScaler, clock

__all__ = ["COLLAPSE_RUN", "CollapseWatch", "Counts", "History", "Outcomes", "Stats", "StepOutcome"]

COLLAPSE_RUN = 50
"""Overflows in a row, at the floor or at a static scale, after which ``LossScaleCollapsed`` is raised."""


@pickled_as("StepOutcome")
class StepOutcome(enum.Enum):
    """What ``optimizer.step()`` did."""

    APPLIED = "applied"
    SKIPPED = "skipped"


@pickled_as("Stats")
@dataclasses.dataclass(eq=False)
class Stats:
    """Counts of optimizer steps, over all optimizers of a session.

    Attributes:
        applied: steps taken.
        skipped: steps that were skipped because a gradient overflowed.
    """

    applied: int = 0
    skipped: int = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class Counts(Stats):
    """The counts of one session, as far as the host knows of them, and what its optimizers' outcomes share.

    Attributes:
        verbosity: 0: overflows are not logged.
        names_of: returns the qualified names of parameters, for messages.
        moves_before_step: a scale moves before the step that is recorded; False: after it, by ``update()``.
        by_flag: the chip tells of an overflow by a flag, so that no gradient shows it.
        scalers: the loss scales.
        runs: loaded runs of overflows, by index of the optimizer, which may not be added yet.
    """

    verbosity: int
    names_of: Callable[[Iterable[torch.Tensor]], list[str]]
    moves_before_step: bool
    by_flag: bool
    scalers: Sequence[LossScaler] = ()
    runs: dict[int, int] = dataclasses.field(default_factory=dict)


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
    """Counts the overflows in a row of one optimizer that no smaller scale can cure: :attr:`run`.

    The numbers are the host's, or tensors on the device, which :class:`Replays` writes in place.
    """

    def __init__(self, counts: Counts, run: Any, scales: Any = None) -> None:
        self._counts = counts
        self.run = run
        self.scales: Any = scales if scales is not None else self._host_scales()  # after the last step

    def resume(self, run: int) -> None:
        """Start again after ``run`` overflows in a row, with the scales that the host set."""
        self.run, self.scales = run, self._host_scales()

    def _host_scales(self) -> Sequence[float]:
        return [scaler.host_scale for scaler in self._counts.scalers]

    def clean(self, scales: Sequence[float]) -> None:
        """Record a step that did not overflow."""
        self.run = 0
        self.scales = scales

    def count_overflow(self, scales: Sequence[float], used: Iterable[int]) -> bool:
        """Record a step that overflowed; return whether it completes a run of :data:`COLLAPSE_RUN`.

        Args:
            scales: all loss scales at that step.
            used: indices of the scales that scaled the losses of that step.
        """
        self.run, complete = self.after(True, scales, used)
        self.scales = scales
        return bool(complete)

    def after(self, overflowed: Any, scales: Any, used: Iterable[int]) -> tuple[Any, Any]:
        """Return what :func:`run_after` returns of one more step, at which all loss scales were ``scales``."""
        had = self.scales if self._counts.moves_before_step else scales
        return run_after(self.run, overflowed, had, used, self._counts.scalers)


class Replays:
    """Counts one optimizer's steps on the device, from the first that is captured in a graph.

    The run of overflows is the device's from then on: eager steps go into it too, by operators that only such an
    optimizer pays for. The number of eager steps is the host's.

    Attributes:
        possible: the device can capture a step.
        flag: the overflow flag of the step that was captured last, as the newest replay left it; None: none was.
        used: indices of the loss scales of that step.
    """

    def __init__(self, counts: Counts, memory: DeviceState) -> None:
        self._captures = memory.captures
        self.possible = memory.captures is not None
        self.flag: torch.Tensor | None = None
        self.used: Sequence[int] = ()
        self._told = 0
        if self.possible:  # here, for a tensor that is made in a capture starts anew with each replay
            device = memory.values.device
            self._numbers = torch.zeros(4, dtype=torch.int64, device=device)  # steps, skipped, complete runs, run
            self._watch = CollapseWatch(counts, self._numbers[3], torch.full_like(memory.scales, float("inf")))

    def capturing(self) -> bool:
        """Return whether a graph is being captured now."""
        return self._captures is not None and self._captures()

    @torch.no_grad()
    def count(self, flag: torch.Tensor, scales: torch.Tensor, used: Iterable[int]) -> None:
        """Put into the graph the operators that count one step.

        Args:
            flag: fp32 scalar, 1.0 where the step is skipped. It must be of this step alone.
            scales: fp32, shape (losses,): all loss scales at this step.
            used: indices of those that scaled its losses.
        """
        self.flag, self.used = flag, tuple(used)
        self._numbers[0].add_(1)
        self._numbers[1].add_(flag.ne(0))
        self.follow(flag, scales, self.used)

    @torch.no_grad()
    def follow(self, flag: torch.Tensor, scales: torch.Tensor, used: Iterable[int]) -> None:
        """Let a step go into the run. The arguments are those of :meth:`count`."""
        run, complete = self._watch.after(flag.ne(0), scales, used)
        self._numbers[2].add_(complete)
        self._watch.run.copy_(run)
        self._watch.scales.copy_(scales)

    def read(self) -> tuple[int, int]:
        """Return how many replayed steps were applied and skipped. Waits for the device."""
        if self.flag is None:
            return 0, 0
        steps, skipped = self._numbers[:2].tolist()
        return steps - skipped, skipped

    def newly_collapsed(self) -> bool:
        """Return whether a run of overflows that no smaller scale can cure is complete, and was not told yet."""
        if self.flag is None:
            return False
        before, self._told = self._told, int(self._numbers[2])
        return self._told > before

    def overflow_run(self) -> int:
        """Return what :meth:`Outcomes.overflow_run` returns, where a graph holds a step."""
        complete, run = self._numbers[2:].tolist()
        return COLLAPSE_RUN - 1 if complete > self._told else run

    def resume(self, run: int, scales: torch.Tensor) -> None:
        """Count from 0 again, after ``run`` overflows in a row with ``scales``."""
        if self.flag is not None:
            self._numbers.zero_()
            self._watch.run.fill_(run)
            self._watch.scales.copy_(scales)
            self._told = 0

    def snapshot(self) -> tuple[Any, ...]:
        """Return what :meth:`resume` changes, for :meth:`put_back`."""
        return () if self.flag is None else (self._told, self._numbers.clone(), self._watch.scales.clone())

    def put_back(self, before: tuple[Any, ...]) -> None:
        """Undo :meth:`resume`."""
        if before:
            self._told, numbers, scales = before
            self._numbers.copy_(numbers)
            self._watch.scales.copy_(scales)


class History:
    """The values of a tensor at each step, read without waiting for the device where that is possible.

    Of a device that has asynchronous copies the host reads one :data:`HISTORY_LAG` steps later. The lag is fixed, so
    that all ranks read the same step at the same time. On other devices, and in host memory, it reads at once.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._late = not values.is_cpu and copies_without_waiting(values.device)
        self._waiting: collections.deque[tuple[Any, torch.Tensor, Any]] = collections.deque()

    def push(self, step: Any) -> Sequence[tuple[Any, list[float]]]:
        """Record the state as it is after ``step``; return the records that have become readable, oldest first."""
        if not self._late:
            return ((step, self._values.tolist()),)
        self._waiting.append((step, *self._copy()))
        return (self._oldest(),) if len(self._waiting) > HISTORY_LAG else ()

    def forget(self) -> None:
        """Drop all records."""
        self._waiting.clear()

    def waiting_records(self) -> Sequence[Any]:
        """Return the records that have not been read, for :meth:`put_back`."""
        return tuple(self._waiting)

    def put_back(self, records: Sequence[Any]) -> None:
        """Undo :meth:`forget`."""
        self._waiting = collections.deque(records)

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

    def _copy(self) -> tuple[torch.Tensor, Any]:
        return copy_without_waiting(self._values)

    def _oldest(self) -> tuple[Any, list[float]]:
        step, late, event = self._waiting.popleft()
        event.synchronize()
        return step, late.tolist()


class Outcomes:
    """The outcomes of one optimizer's steps.

    Attributes:
        last: what the last step did: an outcome, or the flag on the device that tells it; None before the first.
        seen: the device state as it was at the newest step that was counted; None before the first.
        seen_at: when that step was, by :data:`xamp.scaling.scale.clock`.
        replays: counts what the device did with steps that were captured in a graph.
    """

    def __init__(self, counts: Counts, memory: DeviceState, index: int, gradients: Gradients) -> None:
        self.last: StepOutcome | torch.Tensor | None = None
        self.seen: Sequence[float] | None = None
        self.seen_at = 0
        self.replays = Replays(counts, memory)
        self._counts = counts
        self._index = index
        self._gradients = gradients
        self._watch = CollapseWatch(counts, counts.runs.get(index, 0))

    def live_in(self, memory: DeviceState) -> None:
        """Read ``memory`` from now on. All records of the previous memory must have been read."""
        self._memory = memory
        self._history = History(memory.values)

    # ---------------------------------------------------------------- a step ends

    def record(self, flag: torch.Tensor) -> Sequence[tuple[Any, Sequence[float]]]:
        """Record the device state of this step, in a graph on the device; return the records that became readable."""
        if self.replays.possible:
            if self.replays.capturing():
                self.replays.count(flag, self._memory.scales, self._gradients.used)
                return ()
            if self.replays.flag is not None:
                self.replays.follow(flag, self._memory.scales, self._gradients.used)
        return self._history.push((self._gradients.used, clock()))

    def observe(self, step: tuple[Collection[int], int], values: Sequence[float]) -> None:
        """Count, log and judge one step whose numbers the host has.

        Args:
            step: the indices of the loss scales that were used, and the time of the step.
            values: the device state at the step.

        Raises:
            LossScaleCollapsed: the step completes a run of overflows that no smaller scale could cure.
        """
        used, at = step
        counts, scales = self._counts, self._memory.scales_in(values)
        if not self._memory.overflowed(values, self._index):  # then one line, so that no interrupt comes in between
            self.seen, self.seen_at, counts.applied = values, at, counts.applied + 1
            self._watch.clean(scales)
            return
        self.seen, self.seen_at, counts.skipped = values, at, counts.skipped + 1
        collapsed = self._watch.count_overflow(scales, used)
        if self.replays.flag is not None:
            collapsed = self.replays.newly_collapsed()
        if counts.verbosity:
            self.tell_of_overflow(scales, used)
        if collapsed:
            raise LossScaleCollapsed(self._collapse_message(scales, used))

    def observe_all(self) -> None:
        """Count, log and judge every recorded step. Waits for the device."""
        for late in self._history.drain():
            self.observe(*late)

    def judge_replays(self) -> None:
        """Raise a LossScaleCollapsed where replays met a run of overflows that no smaller scale could cure."""
        if self.replays.newly_collapsed():
            raise LossScaleCollapsed(self._collapse_message(self._memory.values.tolist(), self.replays.used))

    # ---------------------------------------------------------------- what is known

    def known(self) -> StepOutcome | None:
        """Return what the last step did. May wait for the device."""
        if not isinstance(self.last, torch.Tensor):
            return self.last
        known = StepOutcome.SKIPPED if bool(self.last) else StepOutcome.APPLIED
        if self.last is not self.replays.flag:  # to which the next replay writes again
            self.last = known
        return known

    def not_counted(self) -> Stats:
        """Return the steps, replays among them, that the counts of the session do not hold. Waits for the device."""
        found = Stats(*self.replays.read())
        for _, values in self._history.peek():
            if self._memory.overflowed(values, self._index):
                found.skipped += 1
            else:
                found.applied += 1
        return found

    def arrived(self) -> Sequence[Sequence[float]]:
        """Return the device state at each step that is not counted yet and can be read without waiting."""
        return [values for _, values in self._history.arrived()]

    def newest(self) -> tuple[int, Sequence[float]] | None:
        """Return the device state at the newest step that the host can read without waiting, and when that step was."""
        late = list(self._history.arrived())
        if late:
            (_, at), values = late[-1]
            return at, values
        return None if self.seen is None else (self.seen_at, self.seen)

    @property
    def uncounted(self) -> int:
        """The number of steps that the host has not counted yet."""
        return self._history.waiting

    def overflow_run(self) -> int:
        """Return the overflows in a row, up to the last step, that no smaller scale could cure. Waits for the device.

        Of a run whose error has not been raised yet it returns the number with which the next overflow raises it.
        """
        if self.replays.flag is not None:
            return self.replays.overflow_run()
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
        self.seen = None
        self._watch.resume(overflow_run)
        self.replays.resume(overflow_run, self._memory.scales)

    def snapshot(self) -> tuple[Any, ...]:
        """Return what :meth:`resume` changes, for :meth:`put_back`."""
        return copy.copy(self._watch), self._history.waiting_records(), self.seen, self.replays.snapshot()

    def put_back(self, before: tuple[Any, ...]) -> None:
        """Undo :meth:`resume`."""
        watch, records, self.seen, replays = before
        self._watch = copy.copy(watch)
        self.replays.put_back(replays)
        self._history.put_back(records)

    # ---------------------------------------------------------------- messages

    def tell_of_overflow(self, scales: Sequence[float], used: Collection[int]) -> None:
        """Log that a step was skipped. ``scales``: all loss scales at the step; ``used``: indices of its own."""
        if not self._counts.moves_before_step:  # a GradScaler: its update() backs off after the step
            scales = [s.rules.after_overflow(scale) for s, scale in zip(self._counts.scalers, scales, strict=True)]
        say("gradient overflow: step skipped, loss scale %s", ", ".join(f"{scales[i]:g}" for i in used))

    def _collapse_message(self, scales: Sequence[float], used: Collection[int]) -> str:
        at = ", ".join(f"{scales[i]:g}" for i in used)
        rules = self._counts.scalers[next(iter(used))].rules
        kind = f"at its floor (min_loss_scale={rules.floor:g})" if rules.dynamic else "static"
        names = self._counts.names_of(self._gradients.not_finite())
        nearest = f" Nearest to the loss is {names[-1]}, the last of these in the model." if len(names) > 1 else ""
        if len(names) > 1 and len(names) == sum(p.grad is not None for p in self._gradients.stepped):
            nearest = " These are all there are, so the loss itself may be inf or nan."
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        by_flag = "unknown, for this chip tells of an overflow by a flag"
        none = by_flag if self._counts.by_flag else "none at this moment"
        wide = ", ".join(levels_where(lambda row: row.dtype == "bfloat16"))
        return (
            f"optimizer.step(): {COLLAPSE_RUN} overflows in a row with the loss scale {at}, {kind}: no smaller scale "
            f"will cure it. Gradients that are not finite: {listed or none}.{nearest} Look for a "
            "division, log or exp there, lower the learning rate, keep the module in fp32 (keep_fp32), or use "
            f"bfloat16 ({wide}). The first module and operator: run a step in `with "
            "xamp.debug.find_nonfinite(model, optimizer) as found:`, then print(found.report)."
        )
