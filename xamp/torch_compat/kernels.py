"""torch's operators on lists of tensors that a training step calls, or single operators on a device that lacks them.

No device has all of them in every dtype: torch's CUDA kernel that unscales gradients has no bfloat16, and a vendor's
device may have no operators on lists at all. Which are missing is not listed here. The device is asked when its backend
is probed (:mod:`xamp.registry.trials`), and :func:`record_missing` keeps what it lacks. A function below calls torch's
operator where the device has it in the dtypes of its arguments, else operators on single tensors with the same results.
No function waits for the device, and all of them can stand in a graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence, Set

import torch

from xamp.torch_compat.torch_private import operators

__all__ = [
    "POWER_OF_TWO",
    "copy_",
    "foreach_of",
    "in_usual_format",
    "is_missing",
    "lerp_",
    "missing",
    "multiply_",
    "norms",
    "on",
    "record_missing",
    "register_formats",
    "set_power_of_two",
    "unscale_",
    "update_scale_",
]

POWER_OF_TWO = "is_power_of_two"
"""The attribute of an inverse scale that says that its value is a power of two; see :func:`set_power_of_two`."""

_AS_WIDE_AS_FP32 = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes that hold the powers of two that fp32 holds, down to 2**-126. fp16 ends at 2**-24."""

_UNSCALE, _UPDATE = "_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"

_missing: dict[tuple[str, str], frozenset[torch.dtype]] = {}
_formats: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}

# --- what the device has


def record_missing(kernel: str, device_type: str, dtype: torch.dtype) -> None:
    """Remember that a device of a type lacks ``kernel``, an operator's name in torch, for ``dtype``.

    From then on no device of that type is asked to run it: cards of one machine may differ, single operators are right
    on all of them, and a thread that trains meanwhile never sees a gap closed.
    """
    _missing[kernel, device_type] = _missing.get((kernel, device_type), frozenset()) | {dtype}


def register_formats(device_type: str, plain: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Remember that operators on lists refuse storage formats of a device; ``plain`` gives a tensor the usual one."""
    _formats[device_type] = plain


def in_usual_format(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of one device as operators on lists take them: a copy of each that has another format."""
    change = _formats.get(tensors[0].device.type) if _formats and tensors else None
    return tensors if change is None else [change(tensor) for tensor in tensors]


def missing(kernel: str, device_type: str) -> Set[torch.dtype]:
    """Return the dtypes for which a device of a type was found to lack ``kernel``."""
    return _missing.get((kernel, device_type), frozenset())


def is_missing(kernel: str, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the device of ``tensors`` lacks ``kernel`` for the dtype, or the format, of one of them."""
    gaps = _missing.get((kernel, tensors[0].device.type)) if _missing and tensors else None
    if gaps is not None and not gaps.isdisjoint({tensor.dtype for tensor in tensors}):
        return True
    return not _are_plain(tensors) if _formats else False


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(operator.is_, tensors, in_usual_format(list(tensors))))


def foreach_of(tensors: Sequence[torch.Tensor]) -> bool | None:
    """Return the argument ``foreach=`` for torch's functions that clip: False, or None for their own choice."""
    return False if is_missing("_foreach_norm", tensors) or is_missing("_foreach_mul_", tensors) else None


# --- the operators


def copy_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target, of any dtype."""
    if is_missing("_foreach_copy_", targets) or is_missing("_foreach_copy_", sources):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return
    operators.foreach_copy_(targets, sources)  # type: ignore[arg-type]


def lerp_(targets: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move each target by ``weight`` of the way to its end."""
    if is_missing("_foreach_lerp_", targets):
        for target, end in zip(targets, ends, strict=True):
            target.lerp_(end, weight)
        return
    operators.foreach_lerp_(targets, ends, weight)  # type: ignore[call-overload]


def norms(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return the norm of each tensor, scalar tensors of ``dtype``; None: of the tensor's own. None may be empty."""
    if is_missing("_foreach_norm", tensors):
        return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]
    return list(operators.foreach_norm(tensors, order, dtype=dtype)) if tensors else []  # type: ignore[arg-type]


def multiply_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply ``tensors``, all of one dtype and on the device of ``factor``, in place; each product is rounded once.

    Args:
        tensors: floating tensors.
        factor: fp32, one element. Where it is known as a power of two, that is one kernel also for bf16: the factor is
            cast, which loses nothing. An operator on a list whose scalar has another dtype is a kernel a tensor.
    """
    if not tensors:
        return
    dtype, factor = tensors[0].dtype, _scalar(factor)
    if dtype is not factor.dtype and dtype in _AS_WIDE_AS_FP32 and _is_power_of_two(factor):
        factor = factor.to(dtype)
    if dtype is factor.dtype and not is_missing("_foreach_mul_", tensors):
        operators.foreach_mul_(tensors, factor)  # type: ignore[call-overload]
        return
    # With a dimension the factor takes part in the promotion of dtypes, so the product is computed in fp32. Lists whose
    # shapes differ are a kernel a tensor, but one call: an interrupt comes before all of it or after.
    held, wide = [tensor if tensor.dim() else tensor.view(1) for tensor in tensors], factor.reshape(1)
    if not is_missing("_foreach_mul_", tensors):
        operators.foreach_mul_(held, [wide] * len(held))
        return
    for tensor in held:
        tensor.mul_(wide)


def unscale_(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale as :meth:`xamp.contract.Backend.unscale_` says, by torch's kernel for the dtypes that it takes here.

    Raises:
        RuntimeError: a gradient is sparse or complex. Nothing was changed then.
    """
    grads, left = list(grads), _missing.get((_UNSCALE, found_inf.device.type)) if _missing else None
    if _formats and not _are_plain(grads):
        left = frozenset(grad.dtype for grad in grads)
    if left and not left.isdisjoint({grad.dtype for grad in grads}):
        _unscale_without(left, grads, found_inf, inv_scale)
    else:
        operators.amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


@torch.no_grad()  # as torch's kernel: gradients of gradients do not see it
def _unscale_without(
    left: Set[torch.dtype], grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Unscale gradients of which some have a dtype in ``left``, which torch's kernel does not take here."""
    without = [grad for grad in grads if grad.dtype in left]
    for grad in without:
        if grad.layout is not torch.strided:
            raise RuntimeError(f"gradients to unscale must be dense, not {grad.layout}")
    groups = [[g for g in without if g.dtype is dtype and g.numel()] for dtype in {g.dtype: None for g in without}]
    groups = [group for group in groups if group]
    # The largest absolute values tell of inf and nan. They come first, since they may find no memory.
    finite = [torch.stack(norms(group, math.inf)).isfinite().all() for group in groups]
    if len(without) < len(grads):
        rest = [grad for grad in grads if grad.dtype not in left]
        operators.amp_foreach_non_finite_check_and_unscale_(rest, found_inf, inv_scale)
    for group, is_finite in zip(groups, finite, strict=True):
        found_inf.copy_(torch.where(is_finite.reshape(found_inf.shape), found_inf, torch.ones_like(found_inf)))
        multiply_(group, inv_scale)


def update_scale_(
    scale: torch.Tensor, tracker: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Move a scale as ``torch._amp_update_scale_`` does: back off if ``found_inf``, else count, and grow in due time.

    Without the kernel the product is in fp32, the only dtype that every device has. The kernel's is in fp64 and rounded
    to fp32, which for a factor that is no fp32 number, such as 1.1, may be the next one.

    Args:
        scale: fp32, one element.
        tracker: int32, one element: clean updates since the scale last moved.
        found_inf: fp32, one element.
        growth: the factor after ``interval`` clean updates, unless the scale would be inf.
        backoff: the factor after an overflow.
        interval: clean updates until the scale grows.
    """
    if not _missing or not is_missing(_UPDATE, [scale]):  # mostly nothing is, which costs no call
        operators.amp_update_scale_(scale, tracker, found_inf, growth, backoff, interval)
        return
    overflowed, clean = found_inf.reshape(scale.shape).ne(0), tracker + 1
    due, grown = clean.eq(interval), scale * growth
    after_clean = torch.where(due & grown.isfinite(), grown, scale)
    tracker.copy_(torch.where(overflowed | due, torch.zeros_like(clean), clean))
    scale.copy_(torch.where(overflowed, scale * backoff, after_clean))


def set_power_of_two(number: torch.Tensor, is_one: bool) -> None:
    """Mark a scalar tensor whose value is always a power of two, as the host knows without reading it."""
    setattr(number, POWER_OF_TWO, is_one)


def on(device: torch.device, number: torch.Tensor) -> torch.Tensor:
    """Return a scalar tensor on ``device``, with the same :data:`POWER_OF_TWO`."""
    moved = number.to(device)
    if moved is not number:
        set_power_of_two(moved, _is_power_of_two(number))
    return moved


def _is_power_of_two(number: torch.Tensor) -> bool:
    return bool(getattr(number, POWER_OF_TWO, False))


def _scalar(number: torch.Tensor) -> torch.Tensor:
    """Return ``number`` without dimensions, with the same :data:`POWER_OF_TWO`."""
    if number.dim() == 0:
        return number
    scalar = number.reshape(())
    set_power_of_two(scalar, _is_power_of_two(number))
    return scalar
