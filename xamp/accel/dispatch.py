"""Finds the function of the device in use for a name of ``xamp.accel``."""

from __future__ import annotations

import difflib
from typing import Any

from xamp.accel import neutral, streams
from xamp.accel.used_device import Device, check_device, count, in_use, missing

__all__ = ["attribute", "call", "call_on", "find", "takes_indices"]


def find(name: str) -> Any:
    """Return ``name`` from the runtime of the device in use, else its neutral answer, else None."""
    runtime = in_use().runtime
    if name in streams.__all__:  # all of them from the same module
        return getattr(runtime if hasattr(runtime, "Stream") else streams, name, None)
    found = getattr(runtime, name, None)
    if found is not None or name not in neutral.__all__:
        return found
    if name in neutral.INDEX_NAMES and takes_indices() and count() != 1:
        return None
    return getattr(neutral, name)


def call(name: str, *args: Any, instead: str = "") -> Any:
    """Call ``name`` on the device in use.

    Raises:
        UnsupportedPolicy: the device has no such function and no neutral answer; for ``instead`` see :func:`missing`.
    """
    found = find(name)
    if found is None:
        raise missing(name, instead)
    return found(*args)


def call_on(name: str, device: Device, *args: Any) -> Any:
    """Call ``name`` with ``args`` and ``device``, or without the latter if it is None or the device has no indices.

    Raises:
        PolicyError, BackendUnavailable: see :func:`check_device`.
        UnsupportedPolicy: as :func:`call`.
    """
    check_device(name, device)
    if device is None or not takes_indices():
        return call(name, *args)
    return call(name, *args, device)


def takes_indices() -> bool:
    """Tell whether the functions of the device in use take an index."""
    return hasattr(in_use().runtime, "set_device")


def attribute(name: str, own: list[str], part: str = "") -> Any:
    """Return an attribute of the device in use that ``xamp.accel`` does not list.

    Args:
        name: the name as written after ``xamp.accel.``, or after ``xamp.accel.memory.``.
        own: the names that this module has on every device.
        part: ``"memory"`` for ``xamp.accel.memory``; empty for ``xamp.accel``.

    Raises:
        AttributeError: the device has no such attribute; the message lists similar names.
    """
    where = f"xamp.accel.{part}" if part else "xamp.accel"
    if name.startswith("__"):  # inspect, pickle and others ask any module for these
        raise AttributeError(f"module {where!r} has no attribute {name!r}")
    used = in_use()
    holder = getattr(used.runtime, part, None) if part else used.runtime
    found = getattr(holder, name, None) if part else find(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name, {*own, *dir(holder)}, n=3)
    guess = f" Did you mean {', '.join(close)}?" if close else ""
    raise AttributeError(f"{where} has no {name!r} on the device in use, of type {used.device_type!r}.{guess}")
