"""Finds the device that ``xamp.accel`` uses, and checks arguments that name a device."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypeAlias

import torch

from xamp.contract import Backend
from xamp.errors import BackendUnavailable, PolicyError, UnsupportedPolicy
from xamp.registry import device_in_use
from xamp.registry.registry import HOST

__all__ = ["Device", "InUse", "check_device", "count", "in_use", "index_of", "missing"]

Device: TypeAlias = torch.device | str | int | None


class InUse(NamedTuple):
    """The device in use.

    Attributes:
        device_type: the type of :func:`xamp.device`.
        backend: the backend of that device type.
        runtime: see :meth:`xamp.contract.Backend.runtime`.
    """

    device_type: str
    backend: Backend
    runtime: Any


_last: tuple[device_in_use.InUse, InUse] | None = None
_made_current: str | None = None  # the last value of XAMP_DEVICE that was applied as torch's current device


def in_use() -> InUse:
    """Return the device in use with its runtime; every call of ``xamp.accel`` comes here.

    Raises:
        BackendUnavailable: as :func:`xamp.device` and :func:`xamp.distributed_backend`, or torch has no module for the
            device.
    """
    global _last
    used = device_in_use.in_use()
    if _last is None or _last[0] is not used:
        _last = used, _with_runtime(used)
    return _last[1]


def _with_runtime(used: device_in_use.InUse) -> InUse:
    global _made_current
    chosen, backend = used
    try:
        runtime = backend.runtime(chosen.type)
    except Exception as error:
        raise BackendUnavailable(
            f"xamp.accel on device type {chosen.type!r}: backend {backend.name!r} has no runtime: {error}\n"
            "Its class must override Backend.runtime, see xamp.contract."
        ) from error
    wanted, index = os.environ.get(device_in_use.DEVICE_VARIABLE), index_of(chosen)
    # Without this, XAMP_DEVICE=type:1 would put tensors on device 1, while statistics and synchronize() would be those
    # of device 0. It is done once per value of the variable, so that a set_device() of the script stays in force.
    if index is not None and wanted != _made_current and hasattr(runtime, "set_device"):
        runtime.set_device(index)
    _made_current = wanted
    return InUse(chosen.type, backend, runtime)


def count() -> int:
    """Return the number of indices of the device in use: 1 on a CPU."""
    used = in_use()
    if hasattr(used.runtime, "device_count"):
        return int(used.runtime.device_count())
    return len(used.backend.devices())


def index_of(device: torch.device) -> int | None:
    """Return the index of ``device``, which may be None, contrary to torch's annotations."""
    return device.index


def check_device(name: str, device: Device) -> int | None:
    """Check that ``device`` is a device of the type in use. On a CPU any index is valid, because it has no meaning.

    Args:
        name: the function of ``xamp.accel`` that got the argument.
        device: a device as torch.cuda takes it. That function checks negative indices.

    Returns:
        The index; None for the current device.

    Raises:
        PolicyError: ``device`` is not a device, or is of another type.
        BackendUnavailable: there is no device with that index.
    """
    if device is None:
        return None
    call, used = f"accel.{name}({device!r})", in_use()
    index = _index(call, device, used.device_type)
    if index is not None and used.device_type != HOST and index >= count():
        device_in_use.require_index(used.device_type, index, used.backend, call)
    return index


def _index(call: str, device: object, in_use_type: str) -> int | None:
    take = f"Pass an index (int), None for the current device, or a device of type {in_use_type!r}: xamp.device(index)"
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise PolicyError(f"{call}: this is no device. {take}; make an int of an environment variable.") from None
    if not isinstance(device, torch.device):
        raise PolicyError(f"{call}: must be an int, a torch.device, a str or None. {take}.")
    if device.type != in_use_type:
        raise PolicyError(
            f"{call}: the device in use is of type {in_use_type!r}. {take}; or have the whole process use the other "
            f"one: {device_in_use.DEVICE_VARIABLE}={device.type}."
        )
    return index_of(device)


def missing(name: str, instead: str = "") -> UnsupportedPolicy:
    """Return the error for a function of torch.cuda that the device in use does not have.

    Args:
        name: the function of ``xamp.accel``.
        instead: the remedy; if empty, the message shows how to guard the call.
    """
    used = in_use()
    has = getattr(used.runtime, "__name__", type(used.runtime).__name__)
    instead = instead or f'Guard the call: if xamp.device_type() != "{used.device_type}".'
    return UnsupportedPolicy(
        f"accel.{name}(): the device in use is of type {used.device_type!r}, {has} has no {name}, and no neutral "
        f"answer would be right. {instead}"
    )
