"""``torch.standin``: what torch.cuda is on other machines."""

from __future__ import annotations

from typing import Any

from xamp_abacus.runtime import *  # noqa: F403
from xamp_abacus.runtime import _is_in_bad_fork as _is_in_bad_fork
from xamp_standin import queue
from xamp_standin.facts import facts
from xamp_standin.queue import Event as Event


def get_device_name(device: Any = None) -> str:
    """What it stands for."""
    return f"stand-in for {facts().about['card']}"


def synchronize(device: Any = None) -> None:
    """Let the host wait for the device."""
    queue.wait()
