"""The state of an optimizer that steps low-precision parameters, in pickles and after a load."""

from __future__ import annotations

import copy
from typing import Any

import torch

from xamp.scaling.masters import LOWER, is_low_precision

__all__ = ["pickled", "restore_numbers"]


def pickled(optimizer: Any, make: Any, args: Any, state: dict[str, Any]) -> Any:
    """Return what makes an optimizer with the model's parameters in place of masters, and with state in fp32.

    ``make``, ``args`` and ``state`` make a copy of ``optimizer``.
    """
    param_of = {id(master): param for param, master in optimizer._xamp.state.gradients.params.pairs}
    groups = [{**group, "params": [param_of.get(id(p), p) for p in group["params"]]} for group in state["param_groups"]]
    held = copy.copy(optimizer.state)
    held.clear()
    for param, kept in optimizer.state.items():
        held[param_of.get(id(param), param)] = _in_fp32(kept) if is_low_precision(param) else kept
    return make, args, {**state, "param_groups": groups, "state": held}


def _in_fp32(kept: Any) -> Any:
    """Return the state of a parameter whose steps are in low precision as that of one in fp32."""
    if not isinstance(kept, dict):
        return kept
    is_lower = {key: isinstance(value, torch.Tensor) and value.dtype in LOWER for key, value in kept.items()}
    return {key: value.float() if is_lower[key] else value for key, value in kept.items()}


def restore_numbers(optimizer: Any, saved: dict[str, Any]) -> None:
    """Give single numbers in the state (``mu_product`` of NAdam) their fp32 values back.

    torch casts all loaded state but ``step`` to the parameter's dtype. A step keeps such numbers in fp32.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in saved.get("param_groups", ()) for index in group["params"]]
    for index, param in zip(indices, params, strict=False):
        state = optimizer.state.get(param, {}) if param.dtype in LOWER else {}
        for key, value in saved["state"].get(index, {}).items() if state else ():
            held: Any = state.get(key)
            was_cast = isinstance(held, torch.Tensor) and held.dtype in LOWER and value.dtype == torch.float32
            if was_cast and not held.dim():
                state[key] = value.detach().to(held.device, copy=True)
