"""A choice of a test's cases in which each two of its arguments meet, or each argument is in one.

Most faults show with one argument, or with two that meet; of three or more axes the whole product says little more than
such a covering array of strength 2. The whole product runs on the CPU, and by ``ci/device.sh`` on each device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

__all__ = ["covering"]

Meeting = tuple[tuple[str, int], ...]


def covering(items: Iterable[pytest.Item], strength: int) -> list[pytest.Item]:
    """Return those of ``items`` that are chosen, in no order.

    Args:
        items: tests as pytest collected them.
        strength: how many arguments of a test meet in one of its cases, whichever they are. Arguments that its mark
            ``draws`` names count for nothing: of random draws of one kind the first says as much as any.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return [item for cases in tests.values() for item in _chosen(cases, strength)]


def _chosen(cases: list[pytest.Item], strength: int) -> list[pytest.Item]:
    """Take the case that brings the most new meetings, as long as one brings any."""
    left = {case: _meetings(case, strength) for case in cases}
    chosen: list[pytest.Item] = []
    seen: set[Meeting] = set()
    while left:
        best = max(left, key=lambda case: len(left[case] - seen))
        new = left.pop(best) - seen
        if not new:
            break
        seen |= new
        chosen.append(best)
    return chosen


def _meetings(case: pytest.Item, strength: int) -> set[Meeting]:
    """The arguments that meet in a case, ``strength`` at a time; of a case with fewer, all."""
    arguments = case.callspec.params if hasattr(case, "callspec") else {}
    drawn = {name for mark in case.iter_markers("draws") for name in mark.args}
    # Cases share their arguments.
    axes = sorted((name, id(value)) for name, value in arguments.items() if name not in drawn)
    return set(itertools.combinations(axes, strength)) or {tuple(axes)}
