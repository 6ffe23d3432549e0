"""Tables that graphs keep: a replay runs no Python, and reads the tables of its capture again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp import onepass
from xamp.plans import available

__all__ = ["begin_in_graph", "is_in_graph", "plan_for_graphs"]

_SPARE, _LEAST = 8, 4


class _GraphTables(onepass.PointerRing):
    """A ring from which each graph takes tables of its own, for as long as the plan lives.

    They are allocated before, since in a capture neither pinned memory can be had nor an event be asked.

    Args:
        given: see the ring.
        capturing: returns whether a graph is being captured now.
    """

    def __init__(self, *given: Any, capturing: Callable[[], bool]) -> None:
        super().__init__(*given)
        self._capturing = capturing
        self._spare = self._new(_SPARE)
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._words_in_graph: Sequence[float] = []

    def begin(self) -> bool:
        """Forget what was sent in other captures, which is not there before they are replayed.

        Returns:
            Whether there are tables for another round of a check and a step.
        """
        self._words_in_graph = []
        return len(self._spare) >= _LEAST

    def are_kept(self) -> bool:
        """Return whether a graph has one."""
        return bool(self._kept)

    def send(self, words: Sequence[float]) -> torch.Tensor:
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

    def used(self) -> None:
        if not self._capturing():
            super().used()


def plan_for_graphs(
    rule: onepass.Rule, rows: Sequence[onepass.Row], capturing: Callable[[], bool] | None
) -> onepass.Plan:
    """Return a plan that graphs can hold. They read its memory, so it must live as long as they do.

    ``capturing`` returns whether one is being captured now; None: the device has none.

    Raises:
        ValueError: see :func:`xamp.plans.available.plan`.
    """
    if capturing is None:
        return available.plan(rule, rows)
    return available.plan(rule, rows, functools.partial(_GraphTables, capturing=capturing))


def begin_in_graph(plan: onepass.Plan) -> bool:
    """Make ``plan`` ready for a check and a step in the graph that is being captured; return whether it is."""
    return isinstance(plan.tables, _GraphTables) and plan.tables.begin()


def is_in_graph(plan: onepass.Plan) -> bool:
    """Return whether a graph has tables of ``plan``."""
    return isinstance(plan.tables, _GraphTables) and plan.tables.are_kept()
