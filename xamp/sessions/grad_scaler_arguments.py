"""The arguments of ``GradScaler``, and the errors that are torch's too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.ground.arguments import number_between
from xamp.policy import LARGEST_SCALE, SCALER_RANGES, SMALLEST_SCALE
from xamp.registry import device_in_use

__all__ = ["BadFactor", "EmptyState", "NothingChecked", "also_as_in_torch_amp", "one_element", "scaler_number"]


class NothingChecked(StateError, AssertionError):
    """An error that torch's GradScaler raises as an AssertionError."""


class BadFactor(PolicyError, AssertionError):
    """A wrong factor, for which torch's GradScaler raises an AssertionError."""


class EmptyState(CheckpointError, RuntimeError):
    """An empty state, for which torch's GradScaler raises a RuntimeError."""


def also_as_in_torch_amp(init: Callable[..., None]) -> Callable[..., None]:
    """Let ``GradScaler.__init__`` take a device first, as torch.amp's does, or as ``device=``."""

    @functools.wraps(init)
    def either(self: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        if args and device_in_use.names_device(args[0]):
            if device is not None:
                raise PolicyError(f"GradScaler({args[0]!r}, device={device!r}): names a device twice.")
            device, *rest = args
            args = tuple(rest)
        init(self, *args, **kwargs)
        if device is not None and self._enabled:
            device_in_use.require_in_use("GradScaler", device)

    return either


def scaler_number(name: str, value: object, low: float | None = None, high: float | None = None) -> float:
    """Return ``value`` as a number, checked against a range.

    The range of a scale is that of fp32; any other name has the range that ``initialize`` has for it. ``low`` and
    ``high`` replace the bounds of that range.
    """
    least, most, whole = (SMALLEST_SCALE, LARGEST_SCALE, False) if name.endswith("_scale") else SCALER_RANGES[name]
    return number_between(
        name, value, least if low is None else low, most if high is None else high, whole=whole, call="GradScaler"
    )


def one_element(value: float | torch.Tensor | None) -> object:
    """Return the number that ``update`` was given; a tensor must have one element and need no gradient."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1 or value.requires_grad:
        raise PolicyError(
            f"GradScaler.update(new_scale): must be a number or a tensor of one element that needs no gradient, and is "
            f"one of shape {tuple(value.shape)}, requires_grad={value.requires_grad}."
        )
    return value.item()
