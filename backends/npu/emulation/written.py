"""Kernels written by hand: copies, and operators for which torch has no CPU kernel."""

# ruff: noqa: ARG001 - the signatures are those of the operators

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic, late, limits
from xamp.backends.npu.emulation.crossing import CPU, Crossing, aside, computed, dense, give, over
from xamp.backends.npu.emulation.deviations import CHANNELS_LAST
from xamp.backends.npu.emulation.torch_private import pack_padded_sequence, to_copy, unscale_

__all__ = ["ADDED", "KERNELS"]

_aten = torch.ops.aten


# ---- between card and host ----


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return over(tensor) if tensor.get_device() >= 0 else tensor


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with aside():
        written = _read(target)
        read = _read(source)
        written.copy_(read)
        if target.get_device() >= 0 and target.dtype is not source.dtype:  # else the bytes are moved unchanged
            arithmetic.settle(written, target.get_device(), arithmetic.Sources(read))
    if not non_blocking and (target.is_cpu or source.is_cpu):
        late.note_wait()
    return target


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source, non_blocking)


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.resize_(source.size())
    return _copy(target, source)


def _to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Copy as torch's own function, except that a card refuses channels_last, with torch_npu's message."""
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError(
            "Only contiguous_format or preserve_format is supported. (emulated Ascend, aten::_to_copy; "
            f"{CHANNELS_LAST})"
        )
    stays = device is None and layout is None and tensor.get_device() >= 0
    if limits.STRICT and dtype is torch.float64 and stays and tensor.dtype is not dtype:
        dtype = torch.float32  # as torch_npu does, with its warning; a copy from the host may be float64
        _warn_of_double()
    device = tensor.device if device is None else device
    with aside():
        source = _read(tensor)
        if not non_blocking and (device.type == "cpu" or tensor.is_cpu):
            late.note_wait()
        if device.type == "cpu":
            made: torch.Tensor = to_copy(source, dtype=dtype, device=CPU, memory_format=memory_format)
            return made.pin_memory() if pin_memory else made
        index: int | None = device.index
        if index is None:
            index = torch.accelerator.current_device_index()
        dtype = dtype or source.dtype
        if not dense(source) or memory_format is torch.contiguous_format:
            source = source.contiguous()
        if dtype is source.dtype:
            return give(source, index)
        made = torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=torch.device("npu", index))
        written = over(made)
        written.copy_(source)
        arithmetic.settle(written, index, arithmetic.Sources(source))
        return made


@functools.cache
def _warn_of_double() -> None:
    warnings.warn("Device do not support double dtype now, dtype cast replace with float. (emulated)", stacklevel=2)


def _local_scalar_dense(tensor: torch.Tensor) -> Any:
    late.note_wait()
    with aside():
        return over(tensor).item()


def _lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


# ---- fused recurrent cells, which CPUs lack ----


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor`` in float32 if it has 16 bits: fused kernels compute gates in float32 and round once."""
    return tensor.float() if tensor is not None and tensor.element_size() == 2 else tensor


def _sum(*terms: torch.Tensor | None) -> Any:
    given = [_wide(term) for term in terms if term is not None]
    total = given[0]
    for term in given[1:]:
        total = total + term  # type: ignore[operator]
    return total


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    enter, keep, new, out = _sum(input_gates, hidden_gates, input_bias, hidden_bias).chunk(4, 1)
    enter, keep, new, out = enter.sigmoid(), keep.sigmoid(), new.tanh(), out.sigmoid()
    after = keep * _wide(cell) + enter * new
    hidden = out * after.tanh()
    dtype = input_gates.dtype
    return hidden.to(dtype), after.to(dtype), torch.cat([enter, keep, new, out], 1).to(dtype)


def _lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_cell: torch.Tensor | None,
    before: torch.Tensor,
    after: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    dtype = workspace.dtype
    enter, keep, new, out = _sum(workspace).chunk(4, 1)
    squashed = _sum(after).tanh()
    hidden = _sum(grad_hidden) if grad_hidden is not None else torch.zeros_like(squashed)
    cell = hidden * out * (1 - squashed * squashed)
    if grad_cell is not None:
        cell = cell + _wide(grad_cell)
    gates = torch.cat(
        [
            cell * new * enter * (1 - enter),
            cell * _wide(before) * keep * (1 - keep),
            cell * enter * (1 - new * new),
            hidden * squashed * out * (1 - out),
        ],
        1,
    )
    bias = gates.sum(0).to(dtype) if has_bias else None
    return gates.to(dtype), (cell * keep).to(dtype), bias


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    input_reset, input_update, input_new = _sum(input_gates, input_bias).chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = _sum(hidden_gates, hidden_bias).chunk(3, 1)
    reset, update = (input_reset + hidden_reset).sigmoid(), (input_update + hidden_update).sigmoid()
    new = (input_new + reset * hidden_new).tanh()
    before = _sum(hidden)
    dtype = input_gates.dtype
    workspace = torch.cat([reset, update, new, before, hidden_new], 1)
    return (new + update * (before - new)).to(dtype), workspace.to(dtype)


def _gru_cell_backward(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    dtype = workspace.dtype
    reset, update, new, before, hidden_new = _sum(workspace).chunk(5, 1)
    wide = _sum(grad)
    of_new = wide * (1 - update) * (1 - new * new)
    of_update = wide * (before - new) * update * (1 - update)
    of_reset = of_new * hidden_new * reset * (1 - reset)
    gates = torch.cat([of_reset, of_update, of_new], 1)
    hidden_gates = torch.cat([of_reset, of_update, of_new * reset], 1)
    biases = (gates.sum(0).to(dtype), hidden_gates.sum(0).to(dtype)) if has_bias else (None, None)
    return (gates.to(dtype), hidden_gates.to(dtype), (wide * update).to(dtype), *biases)


# ---- others ----


def _pack_padded_sequence(*args: Any) -> Any:
    # Torch's own kernel, which calls the card's operators; the batch sizes that it returns stay on the host.
    return pack_padded_sequence(*args)


def _attention_choice(*args: Any, **kwargs: Any) -> int:
    return 0  # attention by matrix products and softmax, which are served here


def _convolution(*args: Any) -> Any:
    return _aten.convolution(*args)


def _convolution_backward(
    grad: Any, tensor: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, *rest: Any
) -> Any:
    groups = rest[1]
    bias_size = [weight.size(1) * groups if transposed else weight.size(0)]
    return _aten.convolution_backward(grad, tensor, weight, bias_size, stride, padding, dilation, transposed, *rest)


def _with_indices(name: str, position: int) -> Callable[..., Any]:
    """A loss over class indices, argument ``position``. A card takes them in int32 too, as ported scripts give them."""
    operator = getattr(_aten, name)

    def loss(*args: Any) -> Any:
        target = args[position]
        return operator(
            *args[:position], target.long() if target.dtype == torch.int32 else target, *args[position + 1 :]
        )

    return loss


def _bce_with_logits(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    positive: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    wide = map(_wide, (logits, target, weight, positive))
    made: torch.Tensor = _aten.binary_cross_entropy_with_logits(*wide, reduction)
    return made.to(logits.dtype)


_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"


def _unscale(grads: list[torch.Tensor], found: torch.Tensor, inverse: torch.Tensor) -> None:
    """On a chip that saturates the flag decides; after an overflow the gradients stay scaled."""
    if not arithmetic.SATURATES:
        with aside():
            crossing = Crossing(_UNSCALE)
            unscale_(*map(crossing.over, (grads, found, inverse)))
        return
    for name, scalar in (("inv_scale", inverse), ("found_inf", found)):
        if scalar.numel() != 1 or scalar.get_device() < 0:
            raise RuntimeError(f"{name} must be a 1-element NPU tensor (emulated Ascend, {_UNSCALE})")
    if len({grad.dtype for grad in grads}) > 1:
        raise RuntimeError(f"all tensors must have the same dtype (emulated Ascend, {_UNSCALE})")
    if not grads:
        return
    index = grads[0].get_device()
    with aside():
        if arithmetic.raised(index):
            arithmetic.clear(index)
            over(found).fill_(1.0)
            return
        factor = over(inverse).item()
        for grad in grads:
            over(grad).mul_(factor)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::copy_": _copy,
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from_and_resize,
    "aten::_to_copy": _to_copy,
    "aten::_local_scalar_dense": _local_scalar_dense,
    "aten::_lazy_clone": _lazy_clone,
    "aten::_pack_padded_sequence": _pack_padded_sequence,
    "aten::_fused_sdp_choice": _attention_choice,
}
_COMPUTED: dict[str, Callable[..., Any]] = {
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "aten::_thnn_fused_gru_cell": _gru_cell,
    "aten::binary_cross_entropy_with_logits": _bce_with_logits,
    "aten::nll_loss_forward": _with_indices("nll_loss_forward", 1),
    "aten::nll_loss_backward": _with_indices("nll_loss_backward", 2),
    "aten::nll_loss2d_forward": _with_indices("nll_loss2d_forward", 1),
    "aten::nll_loss2d_backward": _with_indices("nll_loss2d_backward", 2),
}
KERNELS.update({name: computed(name, function) for name, function in _COMPUTED.items()})
KERNELS[_UNSCALE] = _unscale

# Operators that torch_npu does not register, because its own kernels call another form of them.
ADDED: dict[str, Callable[..., Any]] = {
    "aten::_copy_from": _copy_from,
    "aten::_thnn_fused_gru_cell_backward": computed("aten::_thnn_fused_gru_cell_backward", _gru_cell_backward),
}
