"""``exact_fp32``: full float32 precision on devices that by default compute float32 in fewer digits."""

from __future__ import annotations

import contextlib

import torch

from xamp.contract import Backend, Setting
from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.registry import device_in_use, registry

__all__ = ["ExactFp32", "exact_fp32"]


class ExactFp32:
    """The result of :func:`exact_fp32`. It is a context manager: leaving it calls :meth:`close`.

    Attributes:
        changed: the names of the changed settings; empty where float32 was exact already.
    """

    def __init__(self, changed: tuple[str, ...], undo: contextlib.ExitStack) -> None:
        self.changed = changed
        self._undo = undo

    def close(self) -> None:
        """Restore the settings. A second call does nothing."""
        self._undo.close()

    def __enter__(self) -> ExactFp32:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<exact_fp32, changed: {', '.join(self.changed) or 'nothing'}>"


def exact_fp32(device: torch.device | str | None = None) -> ExactFp32:
    """Compute float32 in full precision, from now on and in the whole process.

    Level O0 is the reference for the other levels. Devices have settings of their own that reduce the precision of
    float32 (TF32, HF32, float16 on some chips). ``initialize`` changes none of these settings, because they hold for
    the whole process. This function changes them::

        xamp.exact_fp32()           # for the rest of the process
        with xamp.exact_fp32():     # until the block ends
            ...

    Args:
        device: the device; None is :func:`xamp.device`.

    Returns:
        An object that restores the settings, by ``close()`` or as a context manager.

    Raises:
        UnsupportedPolicy: a setting that reduces the precision cannot be changed by a program, such as an environment
            variable. No setting is changed then.
        PolicyError: ``device`` is no device. BackendUnavailable: no backend for it works.
    """
    chosen = device_in_use.device() if device is None else _as_device(device)
    backend = registry.resolve("auto", chosen.type)
    with contextlib.ExitStack() as undo:
        changed = _apply(backend, chosen, undo)
        return ExactFp32(changed, undo.pop_all())


def _as_device(device: object) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError) as error:
        raise PolicyError(
            f"exact_fp32({device!r}): must be a device, such as {str(device_in_use.device())!r}."
        ) from error


def _apply(backend: Backend, device: torch.device, undo: contextlib.ExitStack) -> tuple[str, ...]:
    """Change the settings that reduce the precision until none is left: one setting may hide another."""
    changed: list[str] = []
    while rows := [row for row in backend.precision_settings(device) if row.exact or row.narrows_fp32]:
        for row in rows:
            if row.exact is None or row.name in changed:
                raise UnsupportedPolicy(_refusal(row, device))
            undo.callback(row.exact())
            changed.append(row.name)
    return tuple(changed)


def _refusal(row: Setting, device: torch.device) -> str:
    why = "a program cannot change it" if row.exact is None else "setting it back changes nothing"
    return f"exact_fp32({str(device)!r}): {row.name} is {row.value}, and {why}: {row.effect}. To undo: {row.undo}."
