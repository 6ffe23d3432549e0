"""What the steps of one optimizer did, as the host learns of it.

A step on the device ends before the host knows whether it was skipped. Its numbers arrive later, without a wait. Then
the step is counted, logged if it was skipped, and judged: a run of overflows that no smaller scale cures is an error.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import torch

from xamp.contract import Backend
from xamp.errors import LossScaleCollapsed
from xamp.ground.compiler import keep_eager
from xamp.ground.log import say
from xamp.policy import levels_where
from xamp.scaling.gradients import Gradients
from xamp.scaling.late_reads import History
from xamp.scaling.replays import Replays
from xamp.scaling.scale import COLLAPSE_RUN, CollapseWatch, DeviceState, LossScaler, clock

__all__ = ["OutcomeOwner", "Outcomes", "Stats", "StepOutcome"]


class StepOutcome(enum.Enum):
    """What ``optimizer.step()`` did."""

    APPLIED = "applied"
    SKIPPED = "skipped"


class Stats:
    """Counts of optimizer steps, over all optimizers of a session.

    Attributes:
        applied: steps taken.
        skipped: steps that were skipped because a gradient overflowed.
    """

    def __init__(self, applied: int = 0, skipped: int = 0) -> None:
        self.applied = applied
        self.skipped = skipped

    def __repr__(self) -> str:
        return f"Stats(applied={self.applied}, skipped={self.skipped})"


class OutcomeOwner(Protocol):
    """The part of :class:`xamp.scaling.engine.Engine` that the outcomes of steps need."""

    backend: Backend
    device: torch.device
    memory: DeviceState
    overflow_runs: dict[int, int]
    counts: Stats
    verbosity: int
    moves_before_step: bool
    scalers: Sequence[LossScaler]

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters, for messages."""


class Outcomes:
    """The outcomes of one optimizer's steps.

    Args:
        engine: the engine that the optimizer belongs to.
        index: the index of the optimizer among the engine's.
        gradients: the optimizer's gradients.

    Attributes:
        last: what the last step did: an outcome, or the flag on the device that tells it; None before the first.
        seen: the device state as it was at the newest step that was counted; None before the first.
        seen_at: when that step was, by :data:`xamp.scaling.scale.clock`.
        replays: counts what the device did with steps that were captured in a graph.
    """

    def __init__(self, engine: OutcomeOwner, index: int, gradients: Gradients) -> None:
        self.last: StepOutcome | torch.Tensor | None = None
        self.seen: Sequence[float] | None = None
        self.seen_at = 0
        self.replays = Replays(engine.device, len(engine.scalers), engine.memory.captures)
        self._engine = engine
        self._index = index
        self._gradients = gradients
        self._watch = CollapseWatch(engine.scalers, moved_before_step=engine.moves_before_step)
        self._watch.resume(engine.overflow_runs.get(index, 0))
        self.live_in(engine.memory)

    def live_in(self, memory: DeviceState) -> None:
        """Read ``memory`` from now on. All records of the previous memory must have been read."""
        self._memory = memory
        self._history = History(memory)

    # ---------------------------------------------------------------- a step ends

    @keep_eager  # it may read the device, and is called where a step of torch's has broken the graph already
    def record(self, flag: torch.Tensor) -> Sequence[tuple[Any, Sequence[float]]]:
        """Record the device state of this step, in a graph on the device; return the records that became readable."""
        if self.replays.capturing():
            engine, scales = self._engine, self._memory.scales
            moved = engine.moves_before_step
            self.replays.count(flag, scales, engine.scalers, self._gradients.used, moved_before_step=moved)
            return ()
        return self._history.push((self._gradients.used, clock()))

    @keep_eager
    def observe(self, note: tuple[Collection[int], int], values: Sequence[float]) -> None:
        """Count, log and judge one step whose numbers the host has.

        Args:
            note: the indices of the loss scales that were used, and the time of the step.
            values: the device state at the step.

        Raises:
            LossScaleCollapsed: the step completes a run of overflows that no smaller scale could cure.
        """
        used, at = note
        counts, scales = self._engine.counts, self._memory.scales_in(values)
        if not self._memory.overflowed(values, self._index):  # then one line, so that no interrupt comes in between
            self.seen, self.seen_at, counts.applied = values, at, counts.applied + 1
            self._watch.clean(scales)
            return
        self.seen, self.seen_at, counts.skipped = values, at, counts.skipped + 1
        collapsed = self._watch.collapsed(scales, used)
        if self._engine.verbosity:
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
        if isinstance(self.last, torch.Tensor):
            if self.last is self.replays.flag:  # the next replay writes to it again
                return StepOutcome.SKIPPED if bool(self.last) else StepOutcome.APPLIED
            self.last = StepOutcome.SKIPPED if bool(self.last) else StepOutcome.APPLIED
        return self.last

    def unobserved(self) -> Iterable[bool]:
        """Yield, for each step that has not been counted yet, whether it overflowed. Waits for the device."""
        for _, values in self._history.peek():
            yield self._memory.overflowed(values, self._index)

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

        If a run is complete but its error has not been raised yet, the result is the number with which the next
        overflow raises it.
        """
        watch = copy.copy(self._watch)
        complete = [self._judge(watch, used, values) for (used, _), values in self._history.peek()]
        return COLLAPSE_RUN - 1 if any(complete) else watch.run

    def _judge(self, watch: CollapseWatch, used: Collection[int], values: Sequence[float]) -> bool:
        """Record one step in ``watch``. Return whether a run of overflows is complete."""
        scales = self._memory.scales_in(values)
        if self._memory.overflowed(values, self._index):
            return watch.collapsed(scales, used)
        watch.clean(scales)
        return False

    # ---------------------------------------------------------------- checkpoints

    def resume(self, overflow_run: int) -> None:
        """Go on as after ``overflow_run`` overflows in a row, with the scales that were just loaded."""
        self._history.forget()
        self.seen = None
        self._watch.resume(overflow_run)

    def kept(self) -> tuple[Any, ...]:
        """Return what :meth:`resume` changes, for :meth:`put_back`."""
        return copy.copy(self._watch), self._history.waiting_records(), self.seen

    def put_back(self, kept: tuple[Any, ...]) -> None:
        """Undo :meth:`resume`."""
        watch, records, self.seen = kept
        self._watch = copy.copy(watch)
        self._history.put_back(records)

    # ---------------------------------------------------------------- messages

    def tell_of_overflow(self, scales: Sequence[float], used: Collection[int]) -> None:
        """Log that a step was skipped.

        Args:
            scales: all loss scales at the step.
            used: the indices of those that scaled its losses.
        """
        if not self._engine.moves_before_step:  # a GradScaler: its update() backs off after the step
            scales = [s.rules.after_overflow(scale) for s, scale in zip(self._engine.scalers, scales, strict=True)]
        say("gradient overflow: step skipped, loss scale %s", ", ".join(f"{scales[i]:g}" for i in used))

    def _collapse_message(self, scales: Sequence[float], used: Collection[int]) -> str:
        at = ", ".join(f"{scales[i]:g}" for i in used)
        rules = self._engine.scalers[next(iter(used))].rules
        kind = f"at its floor (min_loss_scale={rules.floor:g})" if rules.dynamic else "static"
        names = self._engine.names_of(self._gradients.not_finite())
        whole = len(names) > 1 and len(names) == sum(p.grad is not None for p in self._gradients.stepped)
        nearest = " These are all there are, so the loss itself may be inf or nan." if whole else ""
        if len(names) > 1 and not whole:
            nearest = f" Nearest to the loss is {names[-1]}, the last of these in the model."
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        by_flag = self._engine.backend.capabilities(self._engine.device).overflow == "flag"
        none = "unknown, for this chip tells of an overflow by a flag" if by_flag else "none at this moment"
        wide = ", ".join(levels_where(lambda row: row.dtype == "bfloat16"))
        return (
            f"optimizer.step(): {COLLAPSE_RUN} overflows in a row with the loss scale {at}, {kind}: no smaller scale "
            f"will cure it. Gradients that are not finite: {listed or none}.{nearest} Look for a "
            "division, log or exp there, lower the learning rate, keep the module in fp32 (keep_fp32), or use "
            f"bfloat16 ({wide}). The first module and operator: run a step in `with "
            "xamp.debug.find_nonfinite(model, optimizer) as found:`, then print(found.report)."
        )
