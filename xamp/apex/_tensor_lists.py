"""What the functions of ``amp_C`` share: how large pieces of lists are, numbers from tensors, norms and the flag.

Each works on one piece of its lists after the other (:mod:`xamp.ground.pieces`), for temporaries of whole lists are as
large as the model. Results do not depend on the pieces: norms of the parts of a tensor are put together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.ground import kernels
from xamp.ground.pieces import Lists, cut, groups
from xamp.registry.registry import HOST

__all__ = ["joined", "limit_of", "norms", "number", "raise_flag", "split", "whole_norm"]

_CHUNK = 2**14
"""So many elements torch's kernel for the CPU sums in fp32 without harm: of 38 million it gives a norm 2e-3 too low."""


PIECE, PIECE_ON_HOST = 2**23, 2**18
"""So many elements has a piece at most. On a card that is a third of what one kernel of an operator on lists takes; a
processor keeps its temporaries in its cache."""


def limit_of(lists: Lists) -> int:
    """Return how many elements a piece of the lists has at most."""
    return PIECE_ON_HOST if len(lists[0]) and lists[0][0].device.type == HOST else PIECE


def split(lists: Lists) -> Iterator[tuple[slice, Lists]]:
    """Yield the lists, detached, in pieces, and which tensors each has, or of which tensor it is a part."""
    limit = limit_of(lists)
    return ((places, piece) for places, group in groups(lists, limit) for piece in cut(group, limit))


def number(value: Any) -> Any:
    """Return ``value`` as what a foreach operator takes: a Python number, or a tensor without dimensions."""
    return value.detach().reshape(()) if isinstance(value, torch.Tensor) else value


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the norm of each tensor, computed in fp32 (fp64 for fp64), shape ``[len(tensors)]``."""
    wide = kernels.plain([t.detach() for t in tensors])
    if not wide:
        return torch.zeros(0)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in wide) else torch.float32
    filled = [t if t.numel() else t.new_zeros(1) for t in wide]
    if order != math.inf and filled[0].device.type == HOST:
        return torch.stack([_norm_in_chunks(t, order, dtype) for t in filled])
    return torch.stack(kernels.norms(filled, order, dtype))


def _norm_in_chunks(tensor: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    if tensor.numel() <= _CHUNK:
        return kernels.norms([tensor], order, dtype)[0]
    parts = kernels.norms(tensor.reshape(-1).split(_CHUNK), order, dtype)
    whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), order)
    return whole.to(dtype)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each tensor from the norms of its parts, each of shape ``[number of tensors]``."""
    if len(parts) == 1:
        return parts[0]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(list(parts)).double(), dim=0)
    return norm.to(parts[0].dtype)


def whole_norm(parts: torch.Tensor, order: float = 2.0) -> torch.Tensor:
    """Return the norm over all from the norms of the parts, shape ``[1]``, as the kernels return it."""
    if not parts.numel():
        return parts.new_zeros(1)
    norm: torch.Tensor = torch.linalg.vector_norm(parts, order)
    return norm.reshape(1)


def raise_flag(flag: torch.Tensor, *values: Sequence[torch.Tensor]) -> None:
    """Set ``flag`` to 1 if an element of ``values`` is inf or nan. The host does not wait."""
    for tensors in values:
        if len(tensors):
            flag.masked_fill_(~torch.isfinite(norms(tensors, float("inf"))).all().to(flag.device), 1)
