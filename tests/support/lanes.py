"""A lane is one usable device with its backend: what a test marked ``device`` runs on."""

from __future__ import annotations

import pytest
import torch

from xamp.scaling.scale import HISTORY_LAG
from xamp.testing import Lane, usable_lanes  # by which pytest explains the asserts of its modules

__all__ = ["Lane", "lag", "lower", "needs_dtype", "needs_values", "usable_lanes"]


def lower(lane: Lane) -> torch.dtype:
    """bfloat16 where the lane computes in it, else the lower dtype that it has."""
    return getattr(torch, lane.can.dtypes[-1])  # type: ignore[no-any-return]


def needs_dtype(lane: Lane, dtype: torch.dtype) -> None:
    """Skip where the lane does not compute in ``dtype``."""
    if str(dtype).removeprefix("torch.") not in lane.can.dtypes:
        pytest.skip(f"{lane} does not compute in {dtype}")


def needs_values(lane: Lane) -> None:
    """Skip where an overflow is no inf or nan, so that nobody can tell which gradient it was in."""
    if lane.can.overflow != "inf":
        pytest.skip(f"{lane} tells an overflow by a flag, not by values: it does not say whose gradient overflowed")


def lag(lane: Lane, optimizer: str = "SGD") -> int:
    """After how many steps the host knows of a step of torch's ``optimizer``, where the device is read late.

    It is late where the device decides, in a fused form; what the host decides it knows at once.
    """
    return HISTORY_LAG if optimizer in lane.can.fused_optimizers else 0
