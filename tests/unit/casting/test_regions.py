"""A region is left whatever ends it: an error of the model, or Ctrl-C at a line of entering or leaving it.

Covers: xamp.casting.active, xamp.casting.region_mark.
"""

from __future__ import annotations

import pytest
import torch
from injection import Fault

from xamp.casting import active
from xamp.casting.region_mark import Mark, mark_of

MARKS = {
    "native": mark_of("cpu", torch.bfloat16, False, None),
    "portable": mark_of("cpu", torch.bfloat16, True, None),
    "no casts": mark_of("cpu", None, False, None),
}
each_mark = pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
State = tuple[bool, torch.dtype, bool, torch.dtype | None, Mark | None]


def state() -> State:
    cached = torch.is_autocast_cache_enabled()
    dtype = torch.get_autocast_dtype("cpu")
    return torch.is_autocast_enabled("cpu"), dtype, cached, active.get_slot(), active.innermost()


def entered(mark: Mark, fault: Fault) -> Fault:
    """Enter and leave a region with a fault in entering it."""
    found = None
    with fault:
        found = active.enter(mark, active.next_number(), cached=False)
    if found is not None:
        active.leave(found)
    return fault


def left(mark: Mark, fault: Fault) -> Fault:
    """Enter and leave a region with a fault in leaving it."""
    found = active.enter(mark, active.next_number(), cached=False)
    with fault:
        active.leave(found)
    return fault


@each_mark
@pytest.mark.parametrize("call", [entered, left])
def test_an_interrupt_in_entering_or_leaving_leaves_no_autocast_on(call: object, mark: Mark) -> None:
    assert callable(call)
    with torch.autocast("cpu", torch.float16):  # a state that a region has to bring back
        before = state()
        points = call(mark, Fault("line")).points
        assert points > 8
        first = 2 if call is left else 0  # before the `try` of `leave` nothing can be put back, as in torch's
        for n in range(first, points):
            assert call(mark, Fault("line", n)).raised
            assert state() == before, n
    assert not torch.is_autocast_enabled("cpu")
