"""Scaling, sums and norms over lists of tensors: the part of ``amp_C`` that is not an optimizer's step.

Each function takes ``(chunk_size, noop_flag, tensor_lists, *arguments)``. The chunk size makes no difference here. The
flag, an int32 tensor of shape ``[1]``, becomes 1 where the input holds inf or nan; the output is written all the same.

All of ``amp_C`` works on one piece of its lists after the other (:mod:`xamp.torch_compat.pieces`), for temporaries of
whole lists are as large as the model. Results do not depend on the pieces: norms of the parts of a tensor are put
together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.plans import lists as one_pass
from xamp.registry.registry import HOST
from xamp.torch_compat import kernels
from xamp.torch_compat.pieces import Lists, Piece, cut, floats, groups, store
from xamp.torch_compat.torch_private import operators
from xamp.updates import number

__all__ = [
    "grad_norm",
    "joined",
    "limit_of",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_maxnorm",
    "multi_tensor_norm_out",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "norms",
    "number",
    "raise_flag",
    "split",
    "update_scale_hysteresis",
    "whole_norm",
]


_CHUNK = 2**14
"""So many elements torch's kernel for the CPU sums in fp32 without harm: of 38 million it gives a norm 2e-3 too low."""


PIECE, PIECE_ON_HOST = 2**23, 2**18
"""So many elements has a piece at most. On a card that is a third of what one kernel of an operator on lists takes; a
processor keeps its temporaries in its cache."""


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: Any) -> None:
    """Write ``inputs * scale`` into the outputs. Lists: inputs, outputs, which may be one list."""
    raise_flag(noop_flag, tensor_lists[0])
    for _, (sources, targets) in split(tensor_lists):
        store(targets, operators.foreach_mul(floats(sources), number(scale)))


def multi_tensor_axpby(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    """Write ``a * x + b * y`` into the outputs. Lists: x, y, outputs.

    ``arg_to_check``: 0 and 1 look for inf and nan in x or in y, -1 in both.
    """
    raise_flag(noop_flag, *(tensor_lists[:2] if arg_to_check == -1 else (tensor_lists[arg_to_check],)))
    for _, (xs, ys, targets) in split(tensor_lists):
        sums = operators.foreach_mul(floats(xs), a)
        operators.foreach_add_(sums, operators.foreach_mul(floats(ys), b))
        store(targets, sums)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L2 norm over the one list, shape ``[1]``, and that of each tensor (else an empty tensor), in fp32."""
    return _norms_of(noop_flag, tensor_lists, 2.0, per_tensor)


multi_tensor_l2norm_mp = multi_tensor_l2norm


def multi_tensor_maxnorm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest magnitude over the one list, and that of each tensor, as :func:`multi_tensor_l2norm` does."""
    return _norms_of(noop_flag, tensor_lists, float("inf"), per_tensor)


def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: Any, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write ``inputs * scale`` into the outputs, and return the norms of what was written. Lists: inputs, outputs."""
    raise_flag(noop_flag, tensor_lists[0])
    return _both(_norms_times(tensor_lists, scale), 2.0, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of ``inputs * inv_scale``; the inputs stay. ``inv_scale``: a tensor with one element."""
    return _flagged(noop_flag, _norms_times(tensor_lists[:1], inv_scale), 2.0, per_tensor)


def multi_tensor_norm_out(
    chunk_size: int,
    noop_flag: torch.Tensor | None,
    tensor_lists: Lists,
    out: torch.Tensor,
    alpha: float,
    beta: float,
    norm_type: int,
) -> None:
    """Blend the norm of each tensor into ``out``, shape ``[number of tensors]``.

    ``norm_type`` 2: ``out = sqrt(alpha * out**2 + beta * norm**2)``; 0, the largest magnitude:
    ``out = alpha * out + beta * norm``.
    """
    found = norms(tensor_lists[0], 2.0 if norm_type == 2 else float("inf")).to(out)
    raise_flag(noop_flag, tensor_lists[0])
    if norm_type == 2:
        out.copy_((alpha * out.square() + beta * found.square()).sqrt())
    else:
        out.mul_(alpha).add_(found, alpha=beta)


def update_scale_hysteresis(
    current_scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    hysteresis_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> torch.Tensor:
    """Move a dynamic loss scale, which backs off only at the ``hysteresis``-th overflow. The host does not wait.

    Args:
        current_scale: fp32, one element; changed in place and returned.
        growth_tracker: int32, one element: clean steps since the scale last changed; changed in place.
        hysteresis_tracker: int32, one element: overflows left until the scale backs off; changed in place.
        found_inf: fp32, one element: above 0 where this step overflowed.
        growth_factor: the scale is multiplied by this after ``growth_interval`` clean steps.
        backoff_factor: the scale is multiplied by this when it backs off.
        growth_interval: see ``growth_factor``.
        hysteresis: what ``hysteresis_tracker`` is set to after a clean step.
    """
    found = found_inf > 0
    hysteresis_tracker.sub_(found.to(hysteresis_tracker.dtype))
    backs_off = found & (hysteresis_tracker <= 0)
    clean = growth_tracker + 1
    grows = ~found & (clean == growth_interval)
    grown = (current_scale.double() * growth_factor).to(current_scale.dtype)
    smaller = (current_scale.double() * backoff_factor).to(current_scale.dtype)
    # Apex's kernel is compiled to have no denormal numbers: it backs off to zero.
    smaller = torch.where(smaller < torch.finfo(smaller.dtype).smallest_normal, torch.zeros_like(smaller), smaller)
    kept = torch.where(grows & torch.isfinite(grown), grown, current_scale)
    current_scale.copy_(torch.where(backs_off, smaller, kept))
    growth_tracker.copy_(torch.where(found | grows, torch.zeros_like(clean), clean))
    hysteresis_tracker.copy_(torch.where(found, hysteresis_tracker, torch.full_like(hysteresis_tracker, hysteresis)))
    return current_scale


def _norms_of(
    flag: torch.Tensor, tensor_lists: Lists, order: float, per_tensor: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _flagged(flag, norms(tensor_lists[0], order), order, per_tensor)


def _norms_times(lists: Lists, scale: Any) -> torch.Tensor:
    """Return the norm of each tensor times ``scale``, which a second list, if there is one, gets."""
    found, limit = [], limit_of(lists)
    for _, group in groups(lists, limit):
        parts = []
        for sources, *targets in cut(group, limit):
            scaled = operators.foreach_mul(floats(sources), number(scale))
            parts.append(norms(scaled))
            for written in targets:
                store(written, scaled)
        found.append(joined(parts))
    return torch.cat(found) if found else norms([])


def _flagged(
    flag: torch.Tensor, each: torch.Tensor, order: float, per_tensor: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    whole, parts = _both(each, order, per_tensor)
    flag.masked_fill_(~torch.isfinite(whole).all().to(flag.device), 1)
    return whole, parts


def _both(each: torch.Tensor, order: float, per_tensor: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    return whole_norm(each, order), each if per_tensor else each.new_empty(0)


def limit_of(lists: Lists) -> int:
    """Return how many elements a piece of the lists has at most."""
    return PIECE_ON_HOST if len(lists[0]) and lists[0][0].device.type == HOST else PIECE


def split(lists: Lists) -> Iterator[tuple[slice, Piece]]:
    """Yield the lists, detached, in pieces, and which tensors each has, or of which tensor it is a part."""
    limit = limit_of(lists)
    return ((places, piece) for places, group in groups(lists, limit) for piece in cut(group, limit))


def norms(tensors: Sequence[torch.Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the norm of each tensor, computed in fp32 (fp64 for fp64), shape ``[len(tensors)]``."""
    wide = kernels.in_usual_format([t.detach() for t in tensors])
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


def grad_norm(owner: object, params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norm over the gradients of ``params``, which ``owner`` steps, as :func:`whole_norm` does."""
    pairs = [(param, param.grad) for param in params if param.grad is not None]
    grads = [grad for _, grad in pairs]
    found = one_pass.norm(owner, [param for param, _ in pairs], grads)
    return whole_norm(norms(grads)) if found is None else found


def raise_flag(flag: torch.Tensor | None, *values: Sequence[torch.Tensor]) -> None:
    """Set ``flag``, if there is one, to 1 if an element of ``values`` is inf or nan. The host does not wait."""
    for tensors in values:
        if flag is not None and len(tensors):
            flag.masked_fill_(~torch.isfinite(norms(tensors, float("inf"))).all().to(flag.device), 1)
