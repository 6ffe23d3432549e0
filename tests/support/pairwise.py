"""A choice of a test's cases in which each two of its arguments meet.

Most faults show with one argument, or with two that meet; of three or more axes the whole product says little more than
a table of pairs. The whole product runs on the CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

__all__ = ["pairwise"]

Pair = tuple[tuple[str, int], ...]


def pairwise(items: Iterable[pytest.Item], number: int) -> list[pytest.Item]:
    """Return those of ``items`` that are chosen, in no order.

    Args:
        items: tests as pytest collected them.
        number: where several cases bring as many new pairs, the search for the first of them starts at this place, so
            that runs with other numbers choose other cases.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in tests.values() for item in _chosen(cases, number)]


def _chosen(cases: list[pytest.Item], number: int) -> list[pytest.Item]:
    """Take the case that brings the most new pairs, as long as one brings any."""
    start = number % len(cases)
    left = {case: _pairs(case) for case in (*cases[start:], *cases[:start])}
    chosen: list[pytest.Item] = []
    seen: set[Pair] = set()
    while left:
        best = max(left, key=lambda case: len(left[case] - seen))
        new = left.pop(best) - seen
        if not new:
            break
        seen |= new
        chosen.append(best)
    return chosen


def _pairs(case: pytest.Item) -> set[Pair]:
    """The pairs of arguments that meet in a case; of a case with one argument or none, that."""
    arguments = case.callspec.params if hasattr(case, "callspec") else {}
    axes = sorted((name, id(value)) for name, value in arguments.items())  # cases share their arguments
    return set(itertools.combinations(axes, 2)) or {tuple(axes)}
