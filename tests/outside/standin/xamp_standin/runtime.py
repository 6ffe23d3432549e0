"""``torch.standin``: what torch.cuda is on other machines."""

from __future__ import annotations

from typing import Any

from xamp_abacus.runtime import *  # noqa: F403

from xamp_standin import queue
from xamp_standin.facts import facts
from xamp_standin.queue import Event as Event


def get_device_name(device: Any = None) -> str:
    """What it stands for."""
    return f"stand-in for {facts().about['card']}"


def _is_in_bad_fork() -> bool:
    return queue.forked


def set_sync_debug_mode(mode: str) -> None:
    """Choose what a wait does: ``"default"``, ``"warn"`` or ``"error"``."""
    if mode not in ("default", "warn", "error"):
        raise RuntimeError(f"set_sync_debug_mode({mode!r}): it is one of default, warn, error")
    queue.mode = mode


def synchronize(device: Any = None) -> None:
    """Let the host wait for the device."""
    queue.wait()
