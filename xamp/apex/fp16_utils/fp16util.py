"""``apex.fp16_utils.fp16util``: networks in half precision, and master weights by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from xamp.apex import apex_C
from xamp.torch_compat.torch_private.modules import BatchNorm

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]

clip_grad_norm = torch.nn.utils.clip_grad_norm_


class tofp16(nn.Module):  # noqa: N801, RUF100 - Apex's name
    """Casts its input to fp16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` in fp16."""
        return input.half()


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, BatchNorm) and module.affine is True


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Cast every batch norm with weights in ``module`` to fp32, in place, and return ``module``."""
    for child in module.modules():
        if _is_affine_batch_norm(child):
            child.float()
    return module


def network_to_half(network: nn.Module) -> nn.Module:
    """Cast ``network`` to fp16 in place, but not its batch norms, and return it behind a cast of the input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of ``module`` itself, not of its children, in place."""
    for param in module.parameters(recurse=False):
        if param.dtype.is_floating_point:
            param.data = param.data.to(dtype=dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype=dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.dtype.is_floating_point:
            buffer.data = buffer.data.to(dtype=dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` in place, but not its batch norms with weights, and return it."""
    for module in network.modules():
        if _is_affine_batch_norm(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in fp16, but for its batch norms, whose inputs are cast to fp16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=torch.half)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Run the network on the inputs in fp16."""
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Make fp32 masters of the parameters that require gradients.

    Args:
        model: its parameters may have several dtypes, unless ``flat_master``.
        flat_master: make one flat master of all.

    Returns:
        The model's parameters, and the masters.

    Raises:
        TypeError: ``flat_master``, and the parameters have several dtypes.
    """
    model_params: list[torch.Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        masters = [param.detach().clone().float().requires_grad_() for param in model_params]
        return model_params, masters
    if len({param.dtype for param in model_params}) > 1:
        raise TypeError(
            "prep_param_lists(flat_master=True): model may contain a mixture of parameters of different types. Use "
            "flat_master=False, or use FP16_Optimizer."
        )
    flat = nn.Parameter(apex_C.flatten([param.detach() for param in model_params]).float())
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the gradients of the model into those of the masters that :func:`prep_param_lists` made."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in model_params]
        flat: Any = master_params[0].grad
        flat.copy_(apex_C.flatten(grads))
        return
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        master.grad.detach().copy_(model.grad.detach())


def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the masters that :func:`prep_param_lists` made into the model."""
    values = [master.detach() for master in master_params]
    if flat_master:
        values = apex_C.unflatten(values[0], list(model_params))
    for model, value in zip(model_params, values, strict=True):
        model.detach().copy_(value)


def to_python_float(t: Any) -> Any:
    """Return the number in a tensor, or the first entry of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]
