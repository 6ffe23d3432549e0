"""Tables that graphs keep: a replay runs no Python, and reads the tables of its capture again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xamp import onepass
from xamp.errors import StateError
from xamp.plans import available

__all__ = ["begin_in_graph", "plan_for_graphs"]

_SPARE, _LEAST = 32, 4

_in_graphs: Any = WeakIdKeyDictionary()
"""By what a graph must not outlive, an optimizer or its state: the plans whose memory it reads."""


class _GraphTables(onepass.PointerRing):
    """A ring from which each graph takes tables of its own, for as long as the plan lives.

    They are allocated before, since in a capture neither pinned memory can be had, nor an event be asked, nor a kernel
    be loaded. Between eager steps there is enough for 28 captures.

    Args:
        given: see the ring.
        capturing: returns whether a graph is being captured now.
    """

    def __init__(self, *given: Any, capturing: Callable[[], bool]) -> None:
        super().__init__(*given)
        self._capturing = capturing
        self._spare = self._new(_SPARE)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._words_in_graph: list[int] = []
        self._launched: set[tuple[object, ...]] = set()

    def begin(self) -> bool:
        """Forget what was sent in other captures, which is not there before they are replayed.

        Returns:
            Whether there are tables for another round of a check and a step.
        """
        self._words_in_graph = []
        return len(self._spare) >= _LEAST

    def send(self, words: list[int]) -> torch.Tensor:
        if not self._capturing():
            if len(self._spare) < _LEAST:
                self._spare += self._new(_SPARE)
            return super().send(words)
        if not self._words_in_graph or words != self._words_in_graph[: len(words)]:
            self._words_in_graph = []
            self._kept.append(self._spare.pop())
            self._write(*self._kept[-1], words)
            self._words_in_graph = words
        return self._kept[-1][1]

    def before_launch(self, kernel: tuple[object, ...]) -> None:
        if kernel in self._launched:
            return
        if self._capturing():
            raise StateError(
                f"a graph is being captured, and a step in one pass needs a kernel that no eager step has launched "
                f"yet ({kernel[0]}), which cannot be loaded now: take one eager step with the very same calls first, "
                "clipping and a scaler included, or initialize with fused=False and an optimizer made with fused=True."
            )
        self._launched.add(kernel)

    def note_launch(self) -> None:
        if not self._capturing():
            super().note_launch()


def plan_for_graphs(
    rule: onepass.Rule, rows: Sequence[onepass.Row], capturing: Callable[[], bool] | None
) -> onepass.Plan:
    """Return a plan that graphs can hold: they read its memory, see :func:`begin_in_graph`.

    ``capturing`` returns whether one is being captured now; None: the device has none.

    Raises:
        ValueError: see :func:`xamp.plans.available.plan`.
    """
    if capturing is None:
        return available.plan(rule, rows)
    return available.plan(rule, rows, functools.partial(_GraphTables, capturing=capturing))


def begin_in_graph(plan: onepass.Plan, owner: object) -> bool:
    """Make ``plan`` ready for a check and a step in the graph that is being captured; return whether it is.

    It is kept until ``owner`` is gone, whatever takes its place before.
    """
    if not isinstance(plan.tables, _GraphTables) or not plan.tables.begin():
        return False
    kept = _in_graphs.setdefault(owner, [])
    if plan not in kept:
        kept.append(plan)
    return True
