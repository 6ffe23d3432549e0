"""TorchScript's tables of the functions that it knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["boolean_dispatched", "builtins"]

builtins: Callable[[], dict[int, str]] = torch.jit._builtins._get_builtin_table
"""Returns the table of the operators that TorchScript calls in place of functions, by the ``id`` of the function."""

boolean_dispatched: Any = torch._jit_internal.boolean_dispatched
