"""TorchScript's tables of the functions that it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["boolean_dispatched", "find_builtin", "forget_builtin", "register_builtin"]

find_builtin: Callable[[Any], str | None] = torch.jit._builtins._find_builtin
"""Returns the name of the operator that TorchScript calls in place of a function; None if there is none."""

register_builtin: Callable[[Any, str], None] = torch.jit._builtins._register_builtin
boolean_dispatched: Any = torch._jit_internal.boolean_dispatched


def forget_builtin(identity: int) -> None:
    """Remove the function that has this ``id``, by which the table is keyed."""
    torch.jit._builtins._get_builtin_table().pop(identity, None)
