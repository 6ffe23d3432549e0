"""Operators as modes see them."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["local_scalar_dense", "to_copy"]

local_scalar_dense: Any = torch.ops.aten._local_scalar_dense.default
to_copy: Any = torch.ops.aten._to_copy.default
