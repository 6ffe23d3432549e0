"""Random sequences of public calls: each call works, with fp32's numbers, or is refused with the error that it must.

Covers: xamp.sessions, xamp.scaling.
"""

from __future__ import annotations

from typing import Any

import pytest
from call_sequences import LEVELS, ORDERS, World
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lane

SEQUENCES = 2000
PARTS = 8  # test cases that share them, so that they run side by side

often = st.one_of(
    st.tuples(st.just("backward"), st.booleans(), st.just(False), st.just(True)),
    st.tuples(st.just("backward"), st.just(False), st.booleans(), st.just(True)),
    st.tuples(st.just("step")),
    st.tuples(st.just("zero_grad")),
    st.tuples(st.just("save")),
    st.tuples(st.just("load"), st.integers(0, 3), st.integers(0, len(ORDERS) - 1)),
)
seldom = st.one_of(
    st.tuples(st.just("initialize"), st.sampled_from(LEVELS), st.sampled_from([None, None, 128.0])),
    st.tuples(st.just("backward"), st.booleans(), st.booleans(), st.booleans()),
    st.tuples(st.just("clip"), st.sampled_from([0.1, 1.0, 100.0])),
    st.tuples(st.just("close")),
    st.tuples(st.just("deepcopy")),
    st.tuples(st.just("forward")),
    st.tuples(st.just("autocast"), st.booleans()),
    st.tuples(st.just("interrupted")),
)
first = st.tuples(st.just("initialize"), st.sampled_from(LEVELS), st.sampled_from([None, None, 128.0]))
sequences = st.tuples(st.lists(seldom, max_size=2), first, st.lists(st.one_of(often, seldom), min_size=4, max_size=24))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_works_or_is_refused(lane: Lane, part: int) -> None:
    @settings(max_examples=SEQUENCES // PARTS, deadline=None, derandomize=True, database=None)
    @given(sequences, st.integers(part * 1000, part * 1000 + 999))
    def run(sequence: tuple[list[Any], Any, list[Any]], seed: int) -> None:
        world = World(lane, seed)
        before, start, after = sequence
        for name, *arguments in (*before, start, *after):
            getattr(world, name)(*arguments)
            world.check()

    run()
