"""Of a test with many cases some run, which a seed draws; those that have found something always do.

Most faults of a product of levels, forms and lines show in many of its cases, so each run draws other ones. Its header
says the seed: with it in ``XAMP_TEST_SEED`` the same cases run again. ``--all`` and the seed ``every`` run all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator

import pytest

__all__ = ["left_out", "seed"]

_VARIABLE, _EVERY = "XAMP_TEST_SEED", "every"


def seed() -> str:
    """Return the seed of this run, which the processes that share its tests are given."""
    return os.environ.setdefault(_VARIABLE, str(random.SystemRandom().randrange(10**6)))


def left_out(items: Iterable[pytest.Item], most: int | None = None) -> Iterator[pytest.Item]:
    """Yield the cases that are not drawn, of tests marked ``drawn(count, keep=())``: ``keep`` has ids of cases.

    ``most``: of any test no more cases than this are drawn, marked or not.
    """
    if seed() == _EVERY:
        return
    tests: dict[tuple[str, object], list[pytest.Item]] = {}
    for item in items:
        name, _, case = item.nodeid.partition("[")
        mark = item.get_closest_marker("drawn")
        if case and (mark or most) and case.removesuffix("]") not in (mark.kwargs.get("keep", ()) if mark else ()):
            lane = item.callspec.params.get("lane") if hasattr(item, "callspec") else None
            tests.setdefault((name, lane), []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("drawn")
        count = min(each for each in (mark and mark.args[0], most) if each)
        cases.sort(key=lambda item: random.Random(f"{seed()} {item.nodeid}").random())
        yield from cases[count:]
