"""Features that only torch_npu has: private storage formats, and optimizers that step flat buffers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from xamp.backends.torch_private import default_to_fused_or_foreach
from xamp.policy import levels_where

__all__ = ["join_gradients", "optimizer_refusal", "plain"]

_PACKAGE = "torch_npu"
# ND, NCHW, NHWC, NCDHW: every operator accepts them. Operators on lists of tensors raise on any other format.
_USUAL = (0, 1, 2, 30)
_ND = 2


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """See :meth:`xamp.contract.Backend.plain`."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "npu":
        return tensor
    if torch.ops.npu.get_npu_format(tensor) in _USUAL:
        return tensor
    made: torch.Tensor = sys.modules[_PACKAGE].npu_format_cast(tensor.detach(), _ND)
    return made


def optimizer_refusal(optimizer: Any, *, casts: bool) -> str:
    """See :meth:`xamp.contract.Backend.optimizer_refusal`.

    An ``NpuFused*`` optimizer joins parameters, gradients and state into flat buffers at its first step or
    ``zero_grad``. It then steps these buffers, even if the original tensors have been replaced since.
    """
    if not getattr(optimizer, "is_fused_optimizer", False):
        return "" if casts else _format_refusal(optimizer)
    plainly = type(optimizer).__name__.removeprefix("NpuFused")
    cure = f"torch.optim.{plainly}" if hasattr(torch.optim, plainly) else "an optimizer of torch.optim"
    if casts:
        if not optimizer.is_params_grads_combined:
            return ""  # it will join the masters, or the parameters once they are cast
        uncast = levels_where(lambda row: not row.casts_parameters)
        return (
            "steps flat buffers, in which it joined the parameters already, at its first step or zero_grad, and this "
            f"level casts them. Call initialize before that. Levels for it now: {', '.join(uncast)}; or use {cure}."
        )
    what, meanwhile = _stale(optimizer)
    if not what:
        return ""
    return (
        f"joined parameters, gradients and state into flat buffers, which it goes on stepping, but {what}. {meanwhile} "
        f"Or use {cure}."
    )


# Optimizers that were looked at: initialize asks, and each of their steps asks again.
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()


def _format_refusal(optimizer: Any) -> str:
    """Why its steps on lists of tensors would fail: some parameters are in a private format. Empty if they would not.

    Levels that cast parameters keep them in the usual format.
    """
    if optimizer in _looked_at:
        return ""
    for group in optimizer.param_groups:
        params = [getattr(p, "_local_tensor", p) for p in group["params"] if isinstance(p, torch.Tensor)]  # of DTensors
        private = sum(p.device.type == "npu" and torch.ops.npu.get_npu_format(p) not in _USUAL for p in params)
        if private and _steps_lists(group, params):
            return (
                f"steps lists of parameters, and {private} of them are in a private storage format, which torch_npu's "
                "operators on lists refuse. Set torch.npu.config.allow_internal_format = False before the model is "
                "moved to the NPU, or make the optimizer with foreach=False."
            )
    _looked_at.add(optimizer)
    return ""


def _steps_lists(group: Mapping[str, Any], params: list[torch.Tensor]) -> bool:
    if group.get("fused"):  # no kernel of these takes a private format; xamp refuses them for that
        return False
    if group.get("foreach") is not None or "foreach" not in group:
        return bool(group.get("foreach"))
    return bool(default_to_fused_or_foreach(params, bool(group.get("differentiable")), use_fused=False)[1])


def join_gradients(optimizer: Any) -> None:
    """See :meth:`xamp.contract.Backend.join_gradients`.

    A joined parameter without a gradient gets zeros, as torch_npu's ``zero_grad`` leaves them.
    """
    if not getattr(optimizer, "is_fused_optimizer", False) or not optimizer.is_params_grads_combined:
        return
    package = sys.modules[_PACKAGE]
    for params, buffer in zip(optimizer.params_all_group, optimizer.grads_all_group_combined, strict=True):
        if all(p.grad is None for p in params):
            continue
        place = 0
        for p in params:
            if p.grad is None or p.grad.data_ptr() != buffer.data_ptr() + place * buffer.element_size():
                part = torch.empty_like(p, requires_grad=False)
                package.npu_change_data_ptr(part, buffer, place)
                p.grad = part.zero_() if p.grad is None else part.copy_(p.grad)
            place += package.get_storage_size(p)


def _stale(optimizer: Any) -> tuple[str, str]:
    """Which joined tensors were replaced since, and how to avoid that; two empty texts if none were."""
    if not optimizer.is_params_grads_combined:
        return "", ""
    is_part = sys.modules[_PACKAGE].utils.combine_tensors.is_combined_tensor_valid
    joined = [p for params in optimizer.params_all_group for p in params]
    if not all(map(is_part, optimizer.params_all_group_combined, optimizer.params_all_group)):
        return "a parameter has other memory now", "Make the optimizer anew after changing parameters."
    grads = [[p.grad for p in params] for params in optimizer.params_all_group]
    there = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(map(is_part, optimizer.grads_all_group_combined, grads)) or {*map(id, there)} != {*map(id, joined)}:
        return (
            "not all gradients are those that it joined",
            "Clear them with optimizer.zero_grad(), never to None as model.zero_grad() does, and let every parameter "
            "have one.",
        )
    if optimizer.is_states_combined and not _states_are_parts(optimizer):
        return "its state was loaded after that", "Load it before the first step."
    return "", ""


def _states_are_parts(optimizer: Any) -> bool:
    spans = [
        (each.data_ptr(), each.data_ptr() + each.numel() * each.element_size())
        for each in _tensors(optimizer.combined_param_states_indexed_by_group)
    ]
    states = _tensors(list(optimizer.state.values()))
    return all(any(low <= each.data_ptr() < high for low, high in spans) for each in states)


def _tensors(nest: Any) -> Iterator[torch.Tensor]:
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (dict, list, tuple)):
        parts: Iterable[Any] = nest.values() if isinstance(nest, dict) else nest
        for each in parts:
            yield from _tensors(each)
