"""What entries in a device's autocast are made of: rows of the table, names of keys, casts of arguments, operators."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from xamp.casting.ops.table import RULES, UNLISTED, Rule
from xamp.torch_compat.torch_private import dispatch
from xamp.values.containers import TO

__all__ = [
    "EVERY",
    "HERE",
    "LOWER",
    "SINGLE",
    "CastArguments",
    "IsOnDevice",
    "autocast_key",
    "cast_all",
    "device_test",
    "exists",
    "has_entry",
    "operator",
    "python_function",
]

LOWER = (torch.float16, torch.bfloat16)
SINGLE = (*LOWER, torch.float32)
"""The dtypes that entries cast, and no others."""

IsOnDevice = Callable[[torch.Tensor], bool]
CastArguments = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]
"""Takes the arguments of a call, and returns them cast."""

_NOT_BY_NAME = frozenset(("binary_cross_entropy", "frobenius_norm", "linalg_matrix_norm", "nuclear_norm", "norm"))
"""Operators that several overloads share whose arguments do not tell them apart for certain."""


def exists(overload: str) -> bool:
    """Whether this torch has ``overload``; ``"mm"`` stands for the default one."""
    return dispatch.has_kernel(f"aten::{overload}")


EVERY: Mapping[str, Rule] = types.MappingProxyType({**RULES, **UNLISTED})
"""The rows of both tables."""

HERE: Mapping[str, Rule] = types.MappingProxyType({name: rule for name, rule in RULES.items() if exists(name)})
"""The rows of the table whose overloads this torch has: an older one lacks operators that a newer one brought."""


def operator(overload: str) -> Any:
    """Return the operator overload of that name: ``torch.ops.aten.softmax.int`` for ``"softmax.int"``."""
    packet, _, name = overload.partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")


def autocast_key(device_type: str) -> str:
    """Return the name of the dispatcher key on which autocast's entries for a device type are registered."""
    return f"Autocast{dispatch.key_for_device(device_type)}"


def has_entry(overload: str, key: str) -> bool:
    """Tell whether ``overload`` has an entry on ``key``, as :func:`autocast_key` names it."""
    return dispatch.has_kernel_for_key(f"aten::{overload}", key)


def device_test(device_type: str) -> IsOnDevice:
    """Return a test for tensors on this device type; the tensor's own flag is 0.2 us faster than ``device.type``."""
    if hasattr(torch.Tensor, f"is_{device_type}"):
        return attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def cast_all(args: Any, kwargs: Any, dtype: torch.dtype, on_device: IsOnDevice) -> Any:
    """Cast fp16, bf16 and fp32 tensors on the device."""
    made = []
    for value in args:
        if isinstance(value, torch.Tensor):
            given = value.dtype
            if given is not dtype and given in SINGLE and on_device(value):
                value = TO[dtype](value)
        elif isinstance(value, (list, tuple)):
            value = cast_all(value, None, dtype, on_device)[0]
        made.append(value)
    if kwargs:
        kwargs = dict(zip(kwargs, cast_all(kwargs.values(), None, dtype, on_device)[0], strict=True))
    return made, kwargs


def python_function(overload: str) -> Callable[..., Any] | None:
    """Return the function of ``torch._C`` that calls ``overload`` when it gets its arguments; None: there is none.

    Such functions take no None in a list of tensors.
    """
    packet = overload.partition(".")[0]
    tensors = [argument for argument in operator(overload)._schema.arguments if "Tensor" in str(argument.type)]
    if packet in _NOT_BY_NAME or any(each.kwarg_only or "List[Optional" in str(each.type) for each in tensors):
        return None
    homes = (home for home in dispatch.HOMES if hasattr(home, packet))
    return next((getattr(home, packet) for home in homes), None)
