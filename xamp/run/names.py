"""Handlers for the functions and classes of torch.cuda, torch.npu and torch.accelerator.

Torch calls its own functions of these names too (``torch.manual_seed`` seeds CUDA). Such calls are handed on: only what
the script and its libraries ask for is redirected.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from xamp import accel
from xamp.errors import UnsupportedPolicy
from xamp.run.devices import PRETENDED, Target
from xamp.run.site import Site, is_inside, like
from xamp.run.standins import stand_in

__all__ = ["answered", "answered_class", "asked", "current_accelerator", "is_cuda", "of_accelerator", "refused"]


def answered(site: Site) -> Any:
    """A function of torch.cuda that :mod:`xamp.accel` has."""
    original, name = site.original, site.label.rpartition(".")[2]
    holder: Any = accel.nvtx if ".nvtx." in site.label else accel

    def function(*args: Any, **kwargs: Any) -> Any:
        if original is not None and is_inside():
            return original(*args, **kwargs)
        site.note()
        args, kwargs = _mapped(site.target, args, kwargs)
        return getattr(holder, name)(*args, **kwargs)

    return like(original if original is not None else getattr(holder, name), function)


def answered_class(site: Site) -> Any:
    """A class of torch.cuda that :mod:`xamp.accel` has."""
    target = getattr(accel, site.label.rpartition(".")[2])

    def call(*args: Any, **kwargs: Any) -> Any:
        site.note()
        args, kwargs = _mapped(site.target, args, kwargs)
        return target(*args, **kwargs)

    return stand_in(target, call, site.original)


def _mapped(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def one(value: Any) -> Any:
        return target.map(value) if isinstance(value, (str, torch.device)) and target.is_foreign(value) else value

    return tuple(map(one, args)), {key: one(value) for key, value in kwargs.items()}


def asked(site: Site) -> Any:
    """A question such as ``torch.cuda.is_available()``: the truth, unless the user asked to pretend."""
    original, target, name = site.original, site.target, site.label.rpartition(".")[2]

    def function(*args: Any, **kwargs: Any) -> Any:
        if original is not None and is_inside():
            return original(*args, **kwargs)
        truth = original(*args, **kwargs) if original is not None else (0 if name == "device_count" else False)
        if not target.pretend:
            site.note(f"{site.label}() -> {truth}", kind="told", port="")
            return truth
        told = _pretended(target, name)
        site.note(f"{site.label}() -> {told}", kind="pretended", port="")
        return told

    return like(original if original is not None else getattr(accel, name), function)


def _pretended(target: Target, name: str) -> Any:
    if name == "device_count":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return max(1, ranks) if target.is_host else accel.device_count()
    return accel.is_bf16_supported() if name == "is_bf16_supported" else True


def of_accelerator(site: Site) -> Any:
    """A function of torch.accelerator, by the one of :mod:`xamp.accel` that ``site.port`` names."""
    original, name = site.original, site.port.rpartition(".")[2].rstrip("()")

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_inside():
            return original(*args, **kwargs)
        site.note()
        args, kwargs = _mapped(site.target, args, kwargs)
        return getattr(accel, name)(*args, **kwargs)

    return like(original, function)


def current_accelerator(site: Site) -> Any:
    """``torch.accelerator.current_accelerator``: the truth; CUDA where the user asked to pretend."""
    original, target = site.original, site.target

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_inside():
            return original(*args, **kwargs)
        told = torch.device(PRETENDED) if target.pretend else original(*args, **kwargs)
        site.note(f"{site.label}() -> {told}", kind="pretended" if target.pretend else "told", port="")
        return told

    return like(original, function)


def is_cuda(site: Site) -> Any:
    """``Tensor.is_cuda`` while the user asked to pretend; torch and xamp themselves get the truth."""
    original, target = site.original, site.target

    def get(self: Any) -> bool:
        if self.device.type == target.type and not is_inside():
            site.note("Tensor.is_cuda -> True", kind="pretended", port="")
            return True
        return bool(original.__get__(self))

    return property(get)


def refused(site: Site) -> Any:
    """A name that nothing can answer: a clear error, for the script. ``port`` says why and what to do."""
    original, target, name = site.original, site.target, site.label.rpartition(".")[2]
    advice = site.port.format(name=name)

    def function(*args: Any, **kwargs: Any) -> Any:
        if is_inside():
            return original(*args, **kwargs)
        if target.pretend and hasattr(accel, name) and name != "cudart":
            site.note(kind="pretended", port="")
            args, kwargs = _mapped(target, args, kwargs)
            return getattr(accel, name)(*args, **kwargs)
        site.note(kind="refused", port=advice)
        raise UnsupportedPolicy(
            f"{site.label}(): the device in use is of type {target.type!r}, and this cannot be redirected: {advice}."
        )

    return stand_in(original, function) if isinstance(original, type) else like(original, function)
