"""The device's own autocast: an entry for each operator that is cast, before all else happens to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.amp.autocast_mode import _cast

from xamp_abacus.memory import device_type

__all__ = ["KEY", "LISTS", "install", "lowered"]

KEY: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]

LISTS = {
    "lower": "linear matmul mm bmm addmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention layer_norm",
    "fp32": "softmax.int log_softmax.int nll_loss mse_loss",
}
"""The abacus's operators by what is done to their tensors. ``lower``: to the region's dtype; ``fp32``; ``fp32_dtype``:
their ``dtype`` is fp32 unless given; ``promote``: the widest of theirs; ``banned``: an error."""

_WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_BANNED = "torch.nn.functional.{0} is unsafe to autocast: use {0}_with_logits"
_HERE = torch._C.DispatchKeySet(KEY)

Entry = Callable[..., Any]


def install(library: torch.library.Library, operator: Callable[[str], Any], lists: Mapping[str, str]) -> None:
    """Register the entries of ``lists``, whose overloads ``operator`` finds by name."""
    make: dict[str, Callable[[str], Entry]] = {
        "lower": lambda name: _casting(operator(name), lambda *_: torch.get_autocast_dtype(device_type())),
        "fp32": lambda name: _casting(operator(name), lambda *_: torch.float32),
        "promote": lambda name: _casting(operator(name), _widest),
        "fp32_dtype": lambda name: _with_dtype(operator(name), operator(_WITH_DTYPE.get(name, name))),
        "banned": lambda name: functools.partial(_refuse, name),
    }
    for kind, names in lists.items():
        for name in names.split():
            library.impl(name, make[kind](name), "AutocastPrivateUse1")


def lowered(op: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Call ``op`` without autocast, on arguments that are cast."""
    with torch._C._ExcludeDispatchKeyGuard(_HERE):
        return op(*_cast(args, device_type(), dtype), **_cast(kwargs, device_type(), dtype))


def _casting(op: Any, dtype_of: Callable[..., torch.dtype]) -> Entry:
    return lambda *args, **kwargs: lowered(op, dtype_of(args, kwargs), *args, **kwargs)


def _widest(args: Any, kwargs: Any) -> torch.dtype:
    tensors = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, list) else [value])]
    dtypes = {each.dtype for each in tensors if isinstance(each, torch.Tensor) and each.device.type == device_type()}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(device_type())


def _with_dtype(op: Any, wide: Any) -> Entry:
    names = [argument.name for argument in op._schema.arguments]
    defaults = {
        argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
    }

    def entry(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names[1:], args, strict=False)), **kwargs}
        is_cast = first.is_floating_point() and first.dtype is not torch.float64 and given.get("dtype") is None
        with torch._C._ExcludeDispatchKeyGuard(_HERE):
            return wide(first, **{**defaults, **given, "dtype": torch.float32}) if is_cast else op(first, **given)

    return entry


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(_BANNED.format(name))
