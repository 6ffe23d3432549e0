"""Classes that stand in the place of a class of torch and hand calls on, while ``isinstance`` says what it said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["StandIn", "stand_in", "tensor_type"]


class StandIn(type):
    """The class of stand-ins. Two attributes of each say what it does: ``_xamp_call`` and ``_xamp_target``."""

    _xamp_call: Callable[..., Any]
    _xamp_target: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """What a call of the class does."""
        if "_xamp_call" not in vars(cls):  # a subclass that the script made
            return super().__call__(*args, **kwargs)
        return vars(cls)["_xamp_call"].__func__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        if "_xamp_call" not in vars(cls):
            return super().__instancecheck__(instance)
        return isinstance(instance, cls._xamp_target)

    def __subclasscheck__(cls, other: type) -> bool:
        if "_xamp_call" not in vars(cls):
            return super().__subclasscheck__(other)
        return other is cls or issubclass(other, cls._xamp_target)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_xamp") or "_xamp_target" not in vars(cls):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(cls._xamp_target, name)


def stand_in(target: Any, call: Callable[..., Any], original: Any = None) -> Any:
    """A class that is called as ``call`` and is otherwise ``target``.

    Args:
        target: the class of what a call returns.
        call: what a call does.
        original: the class in whose place it stands, if that is another one; it gives the name.
    """
    original = target if original is None else original
    names = {
        "_xamp_call": staticmethod(call),
        "_xamp_target": target,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return StandIn(original.__name__, (), names)


class _TensorType(StandIn):
    """The class of the stand-ins for ``torch.cuda.FloatTensor`` and others: an instance has a dtype and a device."""

    _xamp_dtype: torch.dtype
    _xamp_device: str

    def __instancecheck__(cls, instance: object) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype == cls._xamp_dtype
            and instance.device.type == cls._xamp_device
        )

    @property
    def dtype(cls) -> torch.dtype:
        """The dtype of its tensors."""
        return cls._xamp_dtype


def tensor_type(original: Any, dtype: torch.dtype, device: str, call: Callable[..., Any]) -> Any:
    """A stand-in for a legacy type of tensors.

    Args:
        original: the type in whose place it stands.
        dtype: the dtype of its tensors.
        device: the type of the device that its tensors are on.
        call: makes a tensor.
    """
    names = {
        "_xamp_call": staticmethod(call),
        "_xamp_target": original,
        "_xamp_dtype": dtype,
        "_xamp_device": device,
        "__module__": original.__module__,
        "__qualname__": original.__name__,
    }
    return _TensorType(original.__name__, (), names)
