"""What the device lacks, and what its autocast does to recurrent layers."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from xamp_abacus import autocast, kernels

from xamp_standin.facts import facts

__all__ = ["RECURRENT", "install"]

RECURRENT = tuple(f"{kind}.{form}" for kind in ("gru", "lstm", "rnn_relu", "rnn_tanh") for form in ("data", "input"))
_library = torch.library.Library("aten", "IMPL")


def install(name: str) -> None:
    """Take from the device ``name`` what the facts say that it lacks."""
    kernels.watchers += [_refuse, _refuse_other_memory]
    # Some are made of other operators, by torch, where a device has no kernel of its own.
    for operator in {*facts().refuses, *facts().waits}:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "PrivateUse1"):
            inner = operator.removeprefix("aten::")
            _library.impl(inner, functools.partial(kernels.run, kernels.operator("aten", inner)), "PrivateUse1")
    for operator in facts().fp32_numbers:
        packet = getattr(torch.ops.aten, operator.removeprefix("aten::"))
        for overload in packet.overloads():
            op = getattr(packet, overload)
            kernels.instead[op] = functools.partial(_with_fp32_numbers, op)
    for optimizer, error in facts().fused.items():
        if error:
            _refuse_fused(optimizer, error, name)
    for optimizer, error in facts().capturable.items():
        if error:
            _refuse_capturable(optimizer, name)
    for layer in RECURRENT if facts().recurrent else ():
        kernel = functools.partial(_recurrent, kernels.operator("aten", layer))
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            _library.impl(layer, kernel, key)


def _refuse(op: Any, args: Any) -> None:
    refused = facts().refuses.get(op.name())
    if refused is None:
        return
    first = args[0] if args else None
    for tensor in first if isinstance(first, (list, tuple)) else [first]:
        error = refused.get(str(getattr(tensor, "dtype", None)).removeprefix("torch."))
        if error:
            raise NotImplementedError(error)


def _refuse_other_memory(op: Any, args: Any) -> None:
    """A fused step is one kernel, which reads no memory but the device's; not even a counter on the host."""
    if op.name().startswith("aten::_fused_ada"):
        for tensor in (tensor for each in args if isinstance(each, (list, tuple)) for tensor in each):
            if tensor.is_cpu:
                raise RuntimeError(f"an illegal memory access was encountered in {op.name()}")


def _with_fp32_numbers(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute with the nearest fp32 numbers: ``1 - beta`` is then as far off as fp32 has few digits there."""
    return op(*args, **{name: _nearest(value) if type(value) is float else value for name, value in kwargs.items()})


def _nearest(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def _refuse_fused(optimizer: str, error: str, name: str) -> None:
    """Give torch's optimizer the check that its own is for a device which it does not know to be supported."""
    module: Any = importlib.import_module(getattr(torch.optim, optimizer).__module__)
    allowed = module._device_dtype_check_for_fused

    def check(param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if param.device.type == name:
            raise RuntimeError(error.format(dtype=param.dtype, device=name))
        allowed(param, *args, **kwargs)

    module._device_dtype_check_for_fused = check


def _refuse_capturable(optimizer: str, name: str) -> None:
    """Take the device from those for which torch's optimizer has a capturable form; the error is torch's own."""
    module: Any = importlib.import_module(getattr(torch.optim, optimizer).__module__)
    supported = module._get_capturable_supported_devices
    module._get_capturable_supported_devices = lambda *args, **kwargs: [
        kind for kind in supported(*args, **kwargs) if kind != name
    ]


@kernels.hidden
def _recurrent(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer, whose kernel has an entry of its own in the device's autocast, below that of the layer."""
    if torch._C._dispatch_tls_is_dispatch_key_excluded(autocast.KEY):
        return op.decompose(*args, **kwargs)
    dtype: torch.dtype = getattr(torch, facts().recurrent)
    return autocast.lowered(op.decompose, dtype, *args, **kwargs)
