"""A CPU whose autocast casts recurrent layers to fp16 whatever the dtype of the region, as torch's does on GPUs.

There the entry stands further inside: the layer is a composite operator, which calls a kernel of the device's library,
and torch's autocast has an entry for that. So here too the cast comes after all entries for the layer itself. The
kernel wants its weights in one block of memory, and warns as cuDNN's does where they are not.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from op_entries import anew

from xamp.backends.cpu import CpuBackend
from xamp.casting.ops.parts import operator
from xamp.casting.ops.table import LAYERS
from xamp.contract import RecurrentLayer

__all__ = ["Call", "HalfLayers", "calls", "half_layers", "joined"]

Call = tuple[torch.dtype, set[torch.dtype], bool]
"""The dtype of a layer's input, those of its state and its weights, and whether the weights lie in one block."""

calls: list[Call] = []
"""What the kernel was called with, in turn."""
joined: list[RecurrentLayer] = []
"""The layers whose weights were joined, in turn."""

_AUTOCAST: Any = torch._C.DispatchKey.AutocastCPU


class HalfLayers(CpuBackend):
    """Says what its autocast does, and joins weights."""

    op_rules = {**CpuBackend.op_rules, **dict.fromkeys(sorted(LAYERS), "float16")}

    def join_weights_(self, weights: Sequence[torch.Tensor], layer: RecurrentLayer) -> None:
        joined.append(layer)
        block = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype)
        for weight, place in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(place.view(weight.shape).copy_(weight))


@contextlib.contextmanager
def half_layers() -> Iterator[None]:
    """Let the CPU be such a device."""
    library = torch.library.Library("aten", "IMPL")
    calls.clear()
    joined.clear()
    with anew(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in LAYERS:
            for key in ("CPU", "AutogradCPU"):
                library.impl(name, functools.partial(_layer, operator(name)), key)
        try:
            with torch.backends.mkldnn.flags(enabled=False):  # without AVX-512 a processor has no such layer in bf16
                yield
        finally:
            library._destroy()


def _layer(op: Any, *args: Any) -> Any:
    """Cast, where autocast reaches this far, and run the layer."""
    place = 3 if op._overloadname == "data" else 2
    if torch.is_autocast_enabled("cpu") and not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOCAST):
        args = tuple(_halved(arg) for arg in args)
    elif args[0].dtype in (torch.float16, torch.bfloat16) and not _is_one_block(args[place]):
        warnings.warn("RNN module weights are not part of single contiguous chunk of memory.", stacklevel=2)
    state, weights = args[place - 1], args[place]
    others = [*(state if isinstance(state, list) else [state]), *weights]
    calls.append((args[0].dtype, {each.dtype for each in others}, _is_one_block(weights)))
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
        return op.decompose(*args)


def _is_one_block(weights: Sequence[torch.Tensor]) -> bool:
    return len({weight.untyped_storage().data_ptr() for weight in weights}) == 1


def _halved(value: Any) -> Any:
    if isinstance(value, list):
        return [_halved(each) for each in value]
    return value.half() if isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16) else value
