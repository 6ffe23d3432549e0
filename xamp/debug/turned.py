"""Where runs turn to inf or nan, so that nothing after it can be compared: which step, and what brought it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xamp.debug.series import Key, Series

__all__ = ["Turned", "is_known", "not_compared", "turned"]

All = Mapping[Key, Series]
_EVERY = "Record with a smaller `every` to see the step and the module."


@dataclasses.dataclass(frozen=True)
class Turned:
    """Where a run, or both at once, has inf or nan from some step on to its end.

    Attributes:
        step: the first of these steps.
        seen: the first sample from then on, which shows modules; None where there is none.
        key: what has it first in that sample, in the order in which a step computes; None where nothing tells.
        origin: a sentence that says what brought it.
        run: the step to run again to see it happen.
    """

    step: int
    seen: int | None
    key: Key | None
    origin: str
    run: int

    @property
    def place(self) -> str:
        """Where it is seen first: in words, after "from step ... on"."""
        if self.key is None:
            return ""
        return f", first in {self.key}" if self.seen == self.step else f"; the next sample, step {self.seen}, shows it"


def is_known(a: float, b: float) -> bool:
    """Return whether two numbers can be compared: at least one of them is finite."""
    return math.isfinite(a) or math.isfinite(b)


def not_compared(pairs: Mapping[Key, Sequence[tuple[int, float, float]]]) -> str:
    """Return a note that counts the numbers of which neither run's is finite; empty where there is none.

    Args:
        pairs: for each series the steps, with the numbers of both runs.
    """
    total = sum(map(len, pairs.values()))
    lost = [(step, str(key)) for key, numbers in pairs.items() for step, a, b in numbers if not is_known(a, b)]
    if not lost:
        return ""
    step = min(lost)[0]
    first = next(name for at, name in lost if at == step)
    return f"{len(lost)} of {total} numbers could not be compared: neither run's is finite, from step {step}, {first}"


def turned(runs: Sequence[All], rank: Callable[[Key], Any]) -> Turned | None:
    """Return where all of ``runs`` have inf or nan for good; None where one has finite numbers at its end.

    Args:
        runs: the series of one run, or of two.
        rank: sorts series in the order in which a step computes them.
    """
    bad = {key: _bad_steps(key, runs) for key in runs[0] if all(key in run for run in runs)}
    tails = {key: tail for key, (steps, lost) in bad.items() if (tail := _tail(steps, lost)) is not None}
    loss = Key("loss")
    results = [key for key in bad if key.kind == "activation"]
    last = (
        loss if loss in bad else max(results, key=rank, default=None)
    )  # what a module gives may be meant, as a mask's
    telling = [key for key in tails if key.kind == "weights" or key == last]
    if not telling:
        return None
    step = min(tails[key] for key in telling)
    samples = sorted({s for key, (steps, _) in bad.items() if key != loss for s in steps if s >= step})
    if not samples:
        return Turned(step, None, None, _EVERY, step)
    seen = samples[0]
    before = max((s for key, (steps, _) in bad.items() if key != loss for s in steps if s < step), default=None)
    new = [key for key, tail in tails.items() if key != loss and tail <= seen and (before is None or tail > before)]
    new.sort(key=rank)
    origin, at = _origin(bad, new, seen, before, rank)
    return Turned(step, seen, new[0] if new else None, origin, step if at is None else at)


def _bad_steps(key: Key, runs: Sequence[All]) -> tuple[list[int], set[int]]:
    """Return the steps that all runs know, and those of them at which no run has a finite number."""
    steps = sorted(set.intersection(*(set(run[key]) for run in runs)))
    return steps, {step for step in steps if not any(math.isfinite(run[key][step]) for run in runs)}


def _tail(steps: Sequence[int], lost: set[int]) -> int | None:
    """Return the first step from which all are lost."""
    found = None
    for step in reversed(steps):
        if step not in lost:
            break
        found = step
    return found


def _origin(
    bad: Mapping[Key, tuple[list[int], set[int]]],
    new: Sequence[Key],
    seen: int,
    before: int | None,
    rank: Callable[[Key], Any],
) -> tuple[str, int | None]:
    """Say what brought it: the forward of the step that shows it, or the update of one before; and that one's step."""
    weights = [key.module for key in new if key.kind == "weights"]
    updates = sorted(
        (min(lost), rank(key), key.module) for key, (_, lost) in bad.items() if key.kind == "update" and lost
    )
    updates = [each for each in updates if each[0] <= seen]
    if not weights:
        told = f"The weights were finite before step {seen}, so it came in there: with the batch, or by an operator."
        modules = [module for at, _, module in updates if at == seen]
        if modules:
            told += f" The update of step {seen} took it into the weights of {_names(modules)}."
        return told, None
    at = max((each[0] for each in updates if each[0] < seen), default=None)
    if at is None:
        since = "" if before is None else f" after step {before}"
        return f"An update{since} brought it into the weights of {_names(weights)}. {_EVERY}", None
    modules = [module for step, _, module in updates if step == at]
    return f"The update of step {at}, in {_names(modules)}, brought it into the weights.", at


def _names(modules: Sequence[str]) -> str:
    shown = ", ".join(module or "the model itself" for module in modules[:3])
    return shown + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
