"""Lanes for tests marked ``device``. A lane is one usable device with its backend."""

from __future__ import annotations

import pytest
import torch

from xamp.testing import Lane, usable_lanes  # imported from here, so that pytest explains the asserts of its modules
from xamp.testing.reads import steps_late
from xamp.values.late_reads import HISTORY_LAG

__all__ = ["Lane", "lacks_dtype", "lag", "lower", "needs_dtype", "needs_values", "steps_late", "usable_lanes"]


def lower(lane: Lane) -> torch.dtype:
    """bfloat16 if the lane computes in it, else its other lower dtype."""
    return getattr(torch, lane.can.dtypes[-1])  # type: ignore[no-any-return]


def lacks_dtype(lane: Lane, dtype: torch.dtype) -> str:
    """Why the lane does not serve ``dtype``; empty if it does."""
    there = str(dtype).removeprefix("torch.") in lane.can.dtypes
    return "" if there else f"{lane} does not compute in {dtype}"


def needs_dtype(lane: Lane, dtype: torch.dtype) -> None:
    """Skip the test if the lane does not compute in ``dtype``."""
    if reason := lacks_dtype(lane, dtype):
        pytest.skip(reason)


def needs_values(lane: Lane) -> None:
    """Skip the test if an overflow is no inf or nan, so that nothing shows which gradient it was in."""
    if lane.can.overflow != "inf":
        pytest.skip(f"{lane} tells an overflow by a flag, not by values: it does not say whose gradient overflowed")


def lag(lane: Lane, optimizer: str = "SGD") -> int:
    """After how many steps the host learns what a step of torch's ``optimizer`` did, where it is made to read late.

    So it is in a test that uses :class:`late_history.LateHistory`; for others :func:`xamp.testing.reads.steps_late`
    tells by the device. It is late if the device decides, in a fused implementation; it knows at once if it decides
    itself.
    """
    return HISTORY_LAG if optimizer in lane.can.fused_optimizers else 0
