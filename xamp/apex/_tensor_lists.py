"""What the functions of ``amp_C`` share: lists in pieces and in fp32, numbers from tensors, writes that a flag prevents.

Each function of ``amp_C`` works on one piece of its lists after the other, since temporaries of whole lists are as large
as the model. Results do not depend on the pieces: norms of the parts of a tensor are put together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from xamp.ground import kernels
from xamp.ground import pieces as parts
from xamp.registry.registry import HOST

__all__ = [
    *("Lists", "cut", "floats", "groups", "joined", "norms", "number", "opened", "pieces", "raise_flag", "step_pieces"),
    *("store", "whole_norm"),
]

Lists = Sequence[Sequence[torch.Tensor]]

_LOWER = (torch.float16, torch.bfloat16)
_CHUNK = 2**14
"""So many elements torch's kernel for the CPU sums in fp32 without harm: of 38 million it gives a norm 2e-3 too low."""


PIECE, PIECE_ON_HOST = 2**23, 2**18
"""So many elements has a piece at most. On a card that is a third of what one kernel of an operator on lists takes; a
processor keeps its temporaries in its cache."""


def groups(lists: Lists) -> Iterator[tuple[slice, list[list[torch.Tensor]]]]:
    """Yield the lists, detached, in groups of whole tensors: see :func:`xamp.ground.pieces.groups`."""
    return parts.groups(lists, _limit(lists))


def pieces(lists: Lists) -> Iterator[tuple[slice, list[list[torch.Tensor]]]]:
    """Yield the lists, detached, in pieces, and which tensors each has, or of which tensor it is a part."""
    return ((places, piece) for places, group in groups(lists) for piece in cut(group))


def cut(group: Lists) -> Iterator[Lists]:
    """Yield a group in pieces: see :func:`xamp.ground.pieces.cut`."""
    return parts.cut(group, _limit(group))


def _limit(lists: Lists) -> int:
    return PIECE_ON_HOST if len(lists[0]) and lists[0][0].device.type == HOST else PIECE


def step_pieces(
    rule: Callable[[Lists], object],
    lists: Lists,
    copies: Lists = (),
    skip: torch.Tensor | None = None,
    obeys: bool = False,
) -> None:
    """Apply ``rule`` to the lists. It gets gradients and states in fp32 and writes into the states.

    Args:
        rule: see above.
        lists: the gradients, which stay, and the states, of which the parameters are the first.
        copies: lists of tensors that the new parameters are written to, besides.
        skip: see :func:`store`.
        obeys: the rule makes no temporaries and writes nothing where ``skip`` is not zero.
    """
    everything = [[tensor.detach() for tensor in tensors] for tensors in (*lists, *copies)]
    at_once = obeys and not (copies and skip is not None) and all(map(_is_wide, lists))
    for piece in [everything] if at_once else (piece for _, piece in pieces(everything)):
        grads, *states = piece[: len(lists)]
        work = [opened(tensors, skip is not None and not obeys) for tensors in states]
        rule([floats(grads), *work])
        for targets, values in zip(piece[1:], [*work, *work[:1] * len(copies)], strict=True):
            store(targets, values, skip)


def _is_wide(tensors: Sequence[torch.Tensor]) -> bool:
    held = [tensor.detach() for tensor in tensors]
    return all(map(operator.is_, held, floats(held)))


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in fp32, and as operators on lists take them: see :func:`xamp.ground.kernels.plain`.

    Those of 16 bits are copies. Where nothing is to do, a detached tensor is the very same.
    """
    held = [t.detach() if t.requires_grad else t for t in tensors]
    return kernels.plain([t.float() if t.dtype in _LOWER else t for t in held])


def opened(tensors: Sequence[torch.Tensor], apart: bool = False) -> list[torch.Tensor]:
    """Return detached tensors in fp32 to write into: themselves where that is possible, unless ``apart`` is asked for.

    What was written into copies gets back by :func:`store`.
    """
    return [w.clone() if apart and w is t else w for t, w in zip(tensors, floats(tensors), strict=True)]


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


def store(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor], skip: torch.Tensor | None = None) -> None:
    """Write ``values`` into ``targets``, in their dtypes.

    Args:
        targets: tensors of any floating dtype.
        values: as many, of the same shapes. A target among them, by itself, has its value already.
        skip: where this is not zero, on the device, the targets keep what they hold.
    """
    pairs = [(t.detach(), v) for t, v in zip(targets, values, strict=True) if v is not t]
    if skip is not None:
        raised = skip.reshape(()) != 0
        pairs = [(t, torch.where(raised.to(t.device), t, v.to(t.dtype))) for t, v in pairs]
    if pairs:
        kernels.copy_(*map(list, zip(*pairs, strict=True)))
