"""Makes TorchScript compile the original of a replaced function where it meets the wrapper."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["forget_script", "tell_script"]


def tell_script(function: Any, wrapper: Any) -> None:
    """Make TorchScript compile ``function`` where it meets ``wrapper``, which replaces it."""
    op = torch.jit._builtins._find_builtin(function)
    if op is not None:
        torch.jit._builtins._register_builtin(wrapper, op)
    dispatched = torch._jit_internal.boolean_dispatched
    if isinstance(function, types.FunctionType) and function in dispatched:
        dispatched[wrapper] = dispatched[function]
    if isinstance(wrapper, types.FunctionType):
        wrapper.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]


def forget_script(wrapper: Any) -> None:
    """Remove ``wrapper`` from torch's table, which is keyed by the id of the object and would keep a stale entry."""
    torch.jit._builtins._get_builtin_table().pop(id(wrapper), None)
