"""Kernels of torch_npu's own operators (``npu::``) that ordinary training uses."""

# ruff: noqa: ARG001 - the signatures are those of the operators

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic, deviations
from xamp.backends.npu.emulation.crossing import aside, computed, over
from xamp.backends.npu.emulation.torch_private import fft_c2c, fft_r2c, tensor_metadata, to_copy

__all__ = ["KERNELS", "STAYS"]

_npu: Any = torch.ops.npu

# These only read or make torch_npu's records; on a card they run no kernel.
STAYS = frozenset(
    f"npu::{name}"
    for name in (
        *("get_npu_format", "get_storage_size", "set_op_timeout_ms"),
        *("empty_with_format", "unsafe_empty_with_format", "_npu_format_cast.input_dtype"),
    )
)


def _format_cast(tensor: torch.Tensor, layout: int | torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """``tensor`` in a storage format, as torch_npu records it. Only the size of the memory changes, not the layout.

    torch_npu's own function allocates and may choose another format than the requested one: private formats can be
    forbidden, and on newer chips they are by default.
    """
    wanted = layout if isinstance(layout, int) else _npu.get_npu_format(layout)
    before = _npu.get_npu_format(tensor)
    if before == wanted:
        return tensor
    if deviations.are_plain(before, wanted):  # only the record changes, of this very tensor
        # The only form of the operator that is still torch_npu's own. It computes nothing and ignores the dtypes.
        relabelled: torch.Tensor = _npu._npu_format_cast.input_dtype(tensor, wanted, 0, 0)
        return relabelled
    options = {"dtype": tensor.dtype, "layout": tensor.layout, "device": tensor.device}
    size = _recorded_size(tensor)
    made: torch.Tensor = _npu.unsafe_empty_with_format(size, **options, acl_format=wanted, keep_format=False)
    deviations.formats.add(_npu.get_npu_format(made))
    if size != tuple(tensor.size()):
        # A view: its memory gets the other format as a whole, and the result is the same view of it.
        whole = tensor.as_strided(made.size(), made.stride(), 0)
        made.copy_(whole)
        return made.set_(made.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return made.copy_(tensor)


def _recorded_size(tensor: torch.Tensor) -> tuple[int, ...]:
    """The size of the tensor for which the memory of ``tensor`` was made, by torch_npu's record."""
    for record in tensor_metadata(tensor):
        name, *sizes = record.strip("/").split("/")
        if name == "base_sizes_":
            size = tuple(map(int, sizes))
            fits = math.prod(size) * tensor.element_size() <= tensor.untyped_storage().nbytes()
            return size if fits else tuple(tensor.size())
    return tuple(tensor.size())


def _format_cast_(tensor: torch.Tensor, layout: int | torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    made = _format_cast(tensor, layout)
    if isinstance(layout, torch.Tensor):
        made.copy_(layout)
    if made is not tensor:
        tensor.set_(made.untyped_storage(), 0, made.size(), made.stride())
    return tensor


# The offset of the address in torch's storage, after the reference counts.
_ADDRESS = 16
# torch_npu's own dtypes have numbers above torch's; its hifloat8 is 290.
_FIRST_OF_TORCH_NPU = 256


def _change_data_ptr(target: torch.Tensor, source: torch.Tensor, index: int) -> int:
    """Move the start of ``target``'s storage to element ``index`` of ``source``'s, without keeping that alive."""
    storage = target.untyped_storage()
    address = ctypes.c_void_p.from_address(storage._cdata + _ADDRESS)
    if (address.value or 0) != storage.data_ptr():
        raise NotImplementedError("npu::npu_change_data_ptr is not served on an emulated card with this torch")
    if (index + _npu.get_storage_size(target)) > _npu.get_storage_size(source):
        raise RuntimeError(f"Offsets overflow, got: offset(index) {index}")
    address.value = source.untyped_storage().data_ptr() + index * source.element_size()
    return 0


def _cast(tensor: torch.Tensor, dtype: torch.dtype, *more: Any) -> torch.Tensor:
    return tensor.to(dtype, copy=True)


def _cast_by_number(tensor: torch.Tensor, number: int, given: int | None = None) -> torch.Tensor:
    """``torch_npu.npu_dtype_cast``. torch_npu hands dtypes over by their numbers in C++."""
    own = [each for each in (number, given) if each is not None and not 0 <= each < _FIRST_OF_TORCH_NPU]
    if own:
        raise NotImplementedError(
            f"npu::npu_dtype_cast: torch_npu's own dtype {own[0]} is not served (emulated Ascend)"
        )
    made: torch.Tensor = to_copy(tensor, dtype=number)
    return made


def _bce_with_logits_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    positive: torch.Tensor | None,
    reduction: int,
) -> torch.Tensor:
    weighed = target if positive is None else positive * target
    result = ((weighed + 1 - target) * logits.sigmoid() - weighed) * grad
    if weight is not None:
        result = result * weight
    return (result / logits.numel() if reduction == 1 else result).to(logits.dtype)


def _gather_backward(grad: torch.Tensor, size: list[int], dim: int, index: torch.Tensor, sparse: bool) -> torch.Tensor:
    return torch.zeros(size, dtype=grad.dtype).scatter_add_(dim, index, grad)


def _renorm_backward(grad: torch.Tensor, tensor: torch.Tensor, p: float, dim: int, maximum: float) -> torch.Tensor:
    tiny = 1e-7  # torch's own value, against a division by zero
    others = [each for each in range(tensor.dim()) if each != dim % tensor.dim()]
    norm = torch.linalg.vector_norm(tensor, p, others, keepdim=True)
    if p == float("inf"):
        largest = tensor.abs() == norm
        of_norm = tensor.sign() * largest / largest.sum(others, keepdim=True)
    else:
        of_norm = tensor.sign() * (tensor.abs() / norm).pow(p - 1)
    along = (grad * tensor).sum(others, keepdim=True)
    scaled = grad * (maximum / (norm + tiny)) - along * maximum / (norm + tiny).square() * of_norm
    return torch.where(norm > maximum, scaled, grad)


def _r2c_backward(grad: torch.Tensor, dim: list[int], norm: int, onesided: bool, length: int) -> torch.Tensor:
    if onesided:
        size = list(grad.size())
        size[dim[-1]] = length
        whole = torch.zeros(size, dtype=grad.dtype)
        whole.narrow(dim[-1], 0, grad.size(dim[-1])).copy_(grad)
        grad = whole
    result: torch.Tensor = fft_c2c(grad, dim, norm, False)
    return result.real.contiguous()


def _c2r_backward(grad: torch.Tensor, dim: list[int], norm: int) -> torch.Tensor:
    result: torch.Tensor = fft_r2c(grad, dim, norm, True)
    doubled = grad.size(dim[-1]) - result.size(dim[-1])
    if doubled > 0:
        result.narrow(dim[-1], 1, doubled).mul_(2)
    return result


def _non_finite(grads: list[torch.Tensor]) -> bool:
    """Whether something overflowed. A chip with a flag reads and lowers it; others check the gradients."""
    if arithmetic.SATURATES:
        index = grads[0].get_device() if grads else 0
        found = arithmetic.raised(index)
        arithmetic.clear(index)
        return found
    with aside():
        return any(not bool(torch.isfinite(over(grad)).all()) for grad in grads)


def _status(tensor: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """The flag in the card's format: the first of eight numbers."""
    result = torch.zeros_like(tensor)
    if arithmetic.raised(tensor.get_device()):
        result[0] = 1
    return result


def _clear_status(tensor: torch.Tensor, mode: int = 0) -> torch.Tensor:
    arithmetic.clear(tensor.get_device())
    return torch.zeros_like(tensor)


def _new_status(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.float32, device=tensor.device)


def _fill_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(1)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return target.copy_(source)


KERNELS: dict[str, Callable[..., Any]] = {
    "npu::npu_format_cast": _format_cast,
    "npu::npu_format_cast.Tensor": _format_cast,
    "npu::_npu_format_cast": _format_cast,
    "npu::_npu_format_cast.aclnn": _format_cast,
    "npu::npu_format_cast_": _format_cast_,
    "npu::npu_format_cast_.acl_format": _format_cast_,
    "npu::npu_change_data_ptr": _change_data_ptr,
    "npu::npu_alloc_float_status": _new_status,
    "npu::npu_get_float_status": _status,
    "npu::npu_clear_float_status": _clear_status,
    "npu::_amp_foreach_non_finite_check": _non_finite,
    "npu::one_": _fill_one,
    "npu::copy_memory_": _copy,
    "npu::npu_view_copy": _copy,
}
_COMPUTED: dict[str, Callable[..., Any]] = {
    "npu::_npu_dtype_cast": _cast,
    "npu::npu_dtype_cast": _cast_by_number,
    "npu::npu_dtype_cast_backward": _cast,
    "npu::npu_binary_cross_entropy_with_logits_backward": _bce_with_logits_backward,
    "npu::npu_gather_backward": _gather_backward,
    "npu::npu_renorm_backward": _renorm_backward,
    "npu::fft_r2c_backward": _r2c_backward,
    "npu::fft_c2r_backward": _c2r_backward,
}
KERNELS.update({name: computed(name, function) for name, function in _COMPUTED.items()})
