"""States that other scalers wrote, and states of xamp that contain something that does not fit."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["RECORDED", "UNFIT", "with_other_numbers"]

_TORCH = {"scale": 512.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 2}

RECORDED: Mapping[str, tuple[Any, list[tuple[float, int]]]] = {
    "torch": (_TORCH, [(512.0, 2)]),
    "torch_of_several": ([_TORCH, {**_TORCH, "scale": 0.5, "_growth_tracker": 0}], [(512.0, 2), (1.0, 0)]),
    "torch_npu": ({**_TORCH, "dynamic": True}, [(512.0, 2)]),
    "torch_npu_static": ({**_TORCH, "dynamic": False}, [(64.0, 0)]),
    "apex": ({"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 1}}, [(32768.0, 1)]),
    "apex_of_many": (
        {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": i % 3} for i in (10, *range(10), 11)},
        [(2.0**i, i % 3) for i in range(12)],
    ),
}
"""By name: a state as another scaler wrote it, and the scale and growth tracker of each loss after loading it.

The run that loads it starts at a scale of 64. A scale below its floor of 1 becomes 1. A static scale is not loaded.
"""


def with_other_numbers(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with other numbers in it: if a run takes over any part of it, that shows."""
    made = copy.deepcopy(state)
    for scaler in made["scalers"]:
        scaler.update(scale=2.0, growth_tracker=1, dynamic=True)
    for named in made["masters"]:
        for master in named.values():
            master.add_(1.0)
    made["steps"] = {"applied": 70, "skipped": 7}
    return made


def _set(*path: Any, to: Any) -> Callable[[dict[str, Any]], str]:
    """A function that puts ``to`` into a state at ``path`` and returns the key that the message must name."""

    def put(state: dict[str, Any]) -> str:
        functools.reduce(lambda found, key: found[key], path[:-1], state)[path[-1]] = to
        return str(path[-1])

    return put


def _drop(state: dict[str, Any]) -> str:
    del state["steps"]
    return "'steps'"


def _one_loss_more(state: dict[str, Any]) -> str:
    state["scalers"].append({"dynamic": True, "scale": 1.0, "growth_tracker": 0})
    state["scalers"][0]["scale"] = 4.0
    return "loss_id=1"


def _last_master_of_another_shape(state: dict[str, Any]) -> str:
    named = state["masters"][0]
    name = next(reversed(named), "inner.weight")
    named[name] = torch.zeros(2, 7)
    return rf"\['{name}'\]"


UNFIT: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "schema": _set("schema", to=10**6),
    "missing": _drop,
    "unknown": _set("surprise", to=1),
    "scale": _set("scalers", 0, "scale", to=float("nan")),
    "count": _set("scalers", 0, "growth_tracker", to=-1),
    "losses": _one_loss_more,
    "name": _set("masters", 0, "no.such.weight", to=torch.zeros(3)),
    "shape": _last_master_of_another_shape,
}
"""Functions that break the state of a run with one dynamic scale; each returns a pattern for the error message."""
