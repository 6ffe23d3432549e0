"""Chooses the device in use: the one that ``XAMP_DEVICE`` names, else the best accelerator that works, else the CPU."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from xamp.contract import Backend
from xamp.errors import BackendUnavailable, PolicyError
from xamp.registry.probe import Failed
from xamp.registry.registry import BACKEND_VARIABLE, HOST, REGISTRY

__all__ = [
    "DEVICE_VARIABLE",
    "InUse",
    "check",
    "device",
    "device_type",
    "distributed_backend",
    "in_use",
    "is_available",
    "names_device",
    "require_in_use",
    "require_index",
]

DEVICE_VARIABLE = "XAMP_DEVICE"
_logger = logging.getLogger("xamp")
_told: set[str] = set()
_SPELLING = re.compile(r"([a-z][a-z0-9_]*)(?::(\d+))?")


def device(index: int | None = None) -> torch.device:
    """The device to train on.

    Args:
        index: the index among the devices of that type. With None, ``XAMP_DEVICE`` gives the index. Where that has none
            either, the result has no index and means torch's current device. On a CPU the index is ignored, so that
            ``device(local_rank)`` is right there too.

    Returns:
        The device that ``XAMP_DEVICE`` names (``"cpu"``, or a type with or without ``:index``). Where the variable is
        not set, the usable accelerator whose backend has the highest priority; where there is none, the CPU. The first
        such call of a process uses the accelerator, to see whether it works, and what it finds holds for the process.
        A warning names one that is there and does not work, is busy or has no memory left.

    Raises:
        BackendUnavailable: ``XAMP_DEVICE`` names a device that is unknown or cannot be used, or there is no device of
            that index.
        PolicyError: ``index`` is not an int >= 0 or None.
    """
    if index is not None and (type(index) is not int or index < 0):
        raise PolicyError(f"device({index!r}): the index must be an int >= 0, or None for the current device.")
    kind, named_index, backend = _requested() or _best()
    if kind == HOST or backend is None:
        return torch.device(HOST)
    if index is not None:
        return require_index(kind, index, backend, f"device({index})")
    if named_index is not None:
        origin = f"{DEVICE_VARIABLE}={kind}:{named_index} (environment variable)"
        return require_index(kind, named_index, backend, origin)
    return torch.device(kind)


def device_type() -> str:
    """The type of :func:`device`, such as ``"cpu"``.

    Raises:
        BackendUnavailable: as :func:`device`.
    """
    return device().type


def is_available() -> bool:
    """Whether :func:`device` is an accelerator: one is usable, and ``XAMP_DEVICE`` does not ask for the CPU.

    Raises:
        BackendUnavailable: ``XAMP_DEVICE`` names a device that is unknown or cannot be used.
    """
    return device_type() != HOST


def distributed_backend() -> str:
    """The name for ``torch.distributed.init_process_group`` on :func:`device`.

    Raises:
        BackendUnavailable: as :func:`device`, or ``XAMP_BACKEND`` names a backend that does not serve it.
    """
    used = in_use()
    return used.backend.capabilities(used.device).process_group


class InUse(NamedTuple):
    """The device in use and its backend.

    Attributes:
        device: the device that :func:`device` returns.
        backend: the backend that ``XAMP_BACKEND`` names, else the best one for the device.
    """

    device: torch.device
    backend: Backend


_last: tuple[tuple[object, ...], InUse] | None = None


def in_use() -> InUse:
    """The device in use and its backend, cached until the environment or the registered backends change.

    No other function caches them. Finding them takes 20 us, a cached answer 2 us. While nothing changes, this function
    returns the same object, so that a caller can use it as the key for what it finds out about the device.

    Raises:
        BackendUnavailable: as :func:`device` and :func:`distributed_backend`.
    """
    global _last
    key = (os.environ.get(DEVICE_VARIABLE), os.environ.get(BACKEND_VARIABLE), REGISTRY, REGISTRY.generation)
    if _last is not None and _last[0] == key:
        return _last[1]
    chosen = device()
    found = InUse(chosen, REGISTRY.resolve("auto", chosen.type))
    _last = key, found
    return found


def names_device(value: object) -> bool:
    """Return whether ``value`` is a ``torch.device``, or a string that names one, such as ``"cuda:1"``."""
    if not isinstance(value, str):
        return isinstance(value, torch.device)
    try:
        return bool(torch.device(value.strip()))
    except RuntimeError:  # torch does not know it; a backend that is not loaded may
        return value.strip().partition(":")[0] in _types()


names_device._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see xamp.casting.region_mark


def require_in_use(call: str, given: object) -> str:
    """Return the type of the device that ``given`` names, which must be the device in use.

    Args:
        call: the call, for the error, as ``"autocast"``.
        given: a device type, a device, or a string of either.

    Raises:
        PolicyError: it is no device, or one of another type.
        BackendUnavailable: as :func:`device`.
    """
    spelled = _SPELLING.fullmatch(str(given).strip()) if isinstance(given, (str, torch.device)) else None
    if spelled is None:
        raise PolicyError(f"{call}({given!r}): is no device type. Leave it out: xamp finds the device.")
    kind, here = spelled[1], in_use().device.type
    if kind != here:
        raise PolicyError(
            f"{call}({str(given)!r}): the device in use is {here!r}, and {kind!r} is another one. Leave the device "
            f"out, so that the script runs on any; or choose it by the environment variable {DEVICE_VARIABLE}={kind}."
        )
    return kind


_Choice = tuple[str, int | None, Backend | None]


def check(value: str, origin: str, otherwise: str) -> torch.device:
    """Return the device that ``value`` names, a type with or without an index, if it can be used.

    Args:
        value: the name.
        origin: who names it, for the error, such as ``"--device cuda"``.
        otherwise: what else may be done, for the error.

    Raises:
        BackendUnavailable: it is unknown or cannot be used, or there is no device of that index.
    """
    kind, index, backend = _parsed(value, origin, otherwise)
    return torch.device(kind) if index is None or kind == HOST else require_index(kind, index, backend, origin)


def _requested() -> _Choice | None:
    """The device that ``XAMP_DEVICE`` asks for, checked; None where the variable is not set."""
    value = os.environ.get(DEVICE_VARIABLE, "").strip()
    if not value:
        return None
    otherwise = f"Or unset {DEVICE_VARIABLE} for the best one that works."
    return _parsed(value, f"{DEVICE_VARIABLE}={value} (environment variable)", otherwise)


def _parsed(value: str, origin: str, otherwise: str) -> tuple[str, int | None, Backend]:
    spelled = _SPELLING.fullmatch(value)
    if spelled is None:
        raise BackendUnavailable(
            f"{origin}: must be a device type, with or without an index, such as {HOST!r} or 'cuda:1'. {_choices()} "
            f"{otherwise}"
        )
    kind, index = spelled[1], spelled[2]
    types = _types()
    if kind not in types:
        raise BackendUnavailable(
            f"{origin}: no registered backend serves device type {kind!r}.{_guess(kind, types)} {_choices()} "
            f"{otherwise}"
        )
    try:
        backend = REGISTRY.best_for(kind)
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{origin}: {error}\n{_choices()} {otherwise}") from error.__cause__
    return kind, None if index is None else int(index), backend


def _guess(kind: str, types: Sequence[str]) -> str:
    """Return the type that is meant, for an error: two letters changed places, or one of four is another.

    Of three letters one in three is too much: ``gpu`` is no misspelling of ``xpu``.
    """
    close = [each for each in types if sorted(each) == sorted(kind)]
    close = close or difflib.get_close_matches(kind, types, n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""


def _best() -> _Choice:
    backend: Backend | None = None
    passed_over: dict[str, Failed] = {}
    for spec in REGISTRY.specs():
        outcome = REGISTRY.outcome(spec)
        if isinstance(outcome, Failed):
            if outcome.is_there:
                passed_over[spec.name] = outcome
        elif outcome.backend.device_type != HOST:
            backend = outcome.backend
            break
    kind = HOST if backend is None else backend.device_type
    _tell(passed_over, kind)
    return kind, None, backend


def _tell(passed_over: dict[str, Failed], chosen: str) -> None:
    """Log once that another device is taken in place of one that is there and does not work."""
    for name, failed in passed_over.items():
        if name not in _told:
            _told.add(name)
            text = "backend %r cannot be used: %s\nSo the device in use is %s. %s=%s says so."
            _logger.warning(text, name, failed, chosen, DEVICE_VARIABLE, chosen)


def require_index(kind: str, index: int, backend: Backend, origin: str) -> torch.device:
    """The device ``kind:index``; ``origin`` says in the error who asked for it.

    Raises:
        BackendUnavailable: there is no such device; the message lists those that exist.
    """
    present = list(backend.devices())
    if index >= len(present):
        listed = ", ".join(f"{kind}:{number} ({name})" for number, name in enumerate(present))
        raise BackendUnavailable(f"{origin}: there is no {kind}:{index}. There are {listed or 'none'}.")
    return torch.device(kind, index)


def _types() -> list[str]:
    return sorted({kind for spec in REGISTRY.specs() for kind in spec.device_types})


def _choices() -> str:
    usable = sorted({kind for row in REGISTRY.reports() if row.usable for kind in row.device_types})
    return f"Device types with a backend are {', '.join(_types())}; usable here: {', '.join(usable) or 'none'}."
