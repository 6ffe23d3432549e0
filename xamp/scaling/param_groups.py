"""Puts other tensors into an optimizer's groups and state: masters for parameters, and state in another dtype."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.scaling.masters import LOWER
from xamp.values.containers import CASTABLE

__all__ = ["cast_state", "is_zero", "replace_params"]


def cast_state(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Cast existing optimizer state to the dtypes of ``params``, as ``load_state_dict`` would.

    ``params`` has, for each low-precision parameter of the model, what the optimizer steps: itself or its master.

    Returns:
        A function that makes low-precision state fp32 again. It restores the original tensors, unless a step has
        changed the cast ones.
    """
    cast: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor, int]] = []
    for param in params:
        state: dict[str, Any] = optimizer.state.get(param, {})
        for key, value in state.items():
            if key != "step" and isinstance(value, torch.Tensor) and value.dtype in CASTABLE:
                made = value.to(param.dtype)
                if made is not value:
                    cast.append((state, key, value, made, made._version))
    held_weakly = weakref.ref(optimizer)
    low_precision = any(p.dtype in LOWER for p in params)

    def undo() -> None:
        if not low_precision:  # if any state is in half precision, the optimizer itself chose that
            return
        before = {id(made): value for _, _, value, made, version in cast if made._version == version}
        found = held_weakly()
        for state in () if found is None else found.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.dtype in LOWER:
                    state[key] = before.get(id(value), value.float())

    try:
        for state, key, _, made, _ in cast:
            state[key] = made
        return undo
    except BaseException:
        for state, key, value, _, _ in cast:
            state[key] = value
        raise


def replace_params(optimizer: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replace the first of each pair by the second, in the groups and as keys of the state.

    A ZeroRedundancyOptimizer has another optimizer in it for this rank's share, and lists of which rank has what.
    """
    pairs = list(pairs)
    _replace_in(optimizer, pairs)
    if is_zero(optimizer) and hasattr(optimizer, "optim"):  # where it overlaps with DDP, only after two steps
        _replace_in(optimizer.optim, pairs)
        optimizer._clear_cache()


def _replace_in(optimizer: Any, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    new_of = {id(old): new for old, new in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in new_of]:
        optimizer.state[new_of[id(old)]] = optimizer.state[old]  # it is in both places before it leaves one
        del optimizer.state[old]


def is_zero(optimizer: object) -> bool:
    """Return whether ``optimizer`` is torch's ZeroRedundancyOptimizer, whose module may not be imported yet."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
