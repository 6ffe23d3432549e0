"""Handlers for autocast, and for the legacy types of tensors (``torch.cuda.FloatTensor``)."""

from __future__ import annotations

import re
from typing import Any

import torch

from xamp.casting.autocast import autocast as region
from xamp.run.devices import Target
from xamp.run.site import Site, is_inside, like
from xamp.run.standins import tensor_type
from xamp.run.table import TENSOR_TYPES

__all__ = [
    "autocast",
    "autocast_gpu_dtype",
    "autocast_state",
    "default_tensor_type",
    "enter_autocast",
    "leave_autocast",
    "legacy_type",
    "tensor_type_argument",
]

_TENSOR_TYPE = re.compile(r"torch\.(cuda|npu)\.(\w+)")
_LOWER = (torch.float16, torch.bfloat16)


def autocast(site: Site) -> Any:
    """``torch.autocast.__init__``. The casts are those of :class:`xamp.autocast`, which are CUDA's on every device."""
    original, target = site.original, site.target

    def __init__(
        self: Any, device_type: Any, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if not (isinstance(device_type, str) and target.is_foreign(device_type)):
            original(self, device_type, dtype, enabled, cache_enabled)
            return
        site.note(f"autocast({device_type!r})")
        dtype = torch.float16 if dtype is None else dtype  # torch's default on CUDA
        original(self, target.type, dtype, enabled, cache_enabled)
        if self._enabled and dtype in _LOWER:
            self._xamp_region = region(dtype=dtype, cache_enabled=cache_enabled is not False)

    return like(original, __init__)


def enter_autocast(site: Site) -> Any:
    """``torch.autocast.__enter__`` of an object that :func:`autocast` redirected."""
    original = site.original

    def __enter__(self: Any) -> Any:
        opened = self.__dict__.get("_xamp_region")
        if opened is None:
            return original(self)
        opened.__enter__()
        return self

    return like(original, __enter__)


def leave_autocast(site: Site) -> Any:
    """``torch.autocast.__exit__`` of an object that :func:`autocast` redirected."""
    original = site.original

    def __exit__(self: Any, *raised: Any) -> Any:
        opened = self.__dict__.get("_xamp_region")
        return original(self, *raised) if opened is None else opened.__exit__(*raised)

    return like(original, __exit__)


def autocast_state(site: Site) -> Any:
    """``torch.is_autocast_enabled``, ``torch.get_autocast_dtype``: without a device type they mean CUDA."""
    original, target = site.original, site.target

    def state(*args: Any, **kwargs: Any) -> Any:
        named = args[0] if args else kwargs.get("device_type")
        if is_inside() or (named is not None and not target.is_foreign(named)):
            return original(*args, **kwargs)
        site.note()
        return original(target.type)

    return like(original, state, site.label)


def autocast_gpu_dtype(site: Site) -> Any:
    """``torch.get_autocast_gpu_dtype``."""
    original, target = site.original, site.target

    def state() -> Any:
        if is_inside():
            return original()
        site.note()
        return torch.get_autocast_dtype(target.type)

    return like(original, state, site.label)


# ---------------------------------------------------------------- legacy types of tensors


def legacy_type(site: Site) -> Any:
    """``torch.cuda.FloatTensor`` and the others."""
    name = site.label.rpartition(".")[2]
    target, on_host = site.target, getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        site.note()
        kwargs.pop("device", None)
        made = on_host(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args), **kwargs)
        return made if target.is_host else made.to(target.at(None))

    return tensor_type(site.original or on_host, getattr(torch, TENSOR_TYPES[name]), target.type, call)


def _legacy_dtype(value: Any, target: Target) -> torch.dtype | None:
    """The dtype that a legacy type of a redirected device names; None for what is none."""
    if isinstance(value, type) and hasattr(value, "_xamp_dtype"):
        found: torch.dtype = value._xamp_dtype
        return found
    spelled = _TENSOR_TYPE.fullmatch(value) if isinstance(value, str) else None
    if spelled is None or spelled[1] not in target.answers_for or spelled[2] not in TENSOR_TYPES:
        return None
    named: torch.dtype = getattr(torch, TENSOR_TYPES[spelled[2]])
    return named


def tensor_type_argument(site: Site) -> Any:
    """``Tensor.type(...)``. Without an argument it tells the truth, or what is pretended."""
    original, target = site.original, site.target

    def type_(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        wanted = _legacy_dtype(dtype, target)
        if wanted is not None:
            site.note(f"Tensor.type({dtype if isinstance(dtype, str) else f'torch.{site.family}.{dtype.__name__}'!r})")
            # As torch's own: a tensor that is on such a device stays on its card.
            return self.to(self.device if self.device.type == target.type else target.at(None), wanted)
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        told = original(self)
        if target.pretend and self.device.type == target.type and not is_inside():
            site.note("Tensor.type() says torch.cuda.*", kind="pretended", port="")
            return f"torch.cuda.{told.rpartition('.')[2]}"
        return told

    return like(original, type_, site.label)


def default_tensor_type(site: Site) -> Any:
    """``torch.set_default_tensor_type``."""
    original, target = site.original, site.target

    def set_default_tensor_type(t: Any) -> None:
        wanted = _legacy_dtype(t, target)
        if wanted is None:
            original(t)
            return
        site.note(f"torch.set_default_tensor_type({str(t) if isinstance(t, str) else f'torch.cuda.{t.__name__}'!r})")
        torch.set_default_dtype(wanted)
        if not target.is_host:
            torch.set_default_device(target.type)

    return like(original, set_default_tensor_type, site.label)
