"""What TorchScript compiles where it meets a wrapper that stands in a function's place."""

from __future__ import annotations

import types
from typing import Any

import torch

__all__ = ["forget_script", "tell_script"]


def tell_script(function: Any, made: Any) -> None:
    """Have TorchScript compile ``function`` where it meets ``made``."""
    op = torch.jit._builtins._find_builtin(function)
    if op is not None:
        torch.jit._builtins._register_builtin(made, op)
    dispatched = torch._jit_internal.boolean_dispatched
    if isinstance(function, types.FunctionType) and function in dispatched:
        dispatched[made] = dispatched[function]
    if isinstance(made, types.FunctionType):
        made.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]


def forget_script(made: Any) -> None:
    """Undo what must not outlive ``made``: torch knows it by its address."""
    torch.jit._builtins._get_builtin_table().pop(id(made), None)
