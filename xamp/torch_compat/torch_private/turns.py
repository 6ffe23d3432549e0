"""Lets who clears autocast's cache of casts, and who calls torch's kernels from Python, take turns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from xamp.torch_compat.torch_private import autocast

__all__ = ["take_turns"]

_turn: Any = threading.RLock()
_torchs = autocast.clear_autocast_cache


def take_turns() -> Any:
    """Return a lock; whoever clears the cache holds it from now on: xamp, and torch as it leaves a region."""
    if autocast.clear_autocast_cache is _torchs:
        autocast.clear_autocast_cache = _in_turn(_torchs)
        torch.clear_autocast_cache = _in_turn(torch.clear_autocast_cache)
    return _turn


def _in_turn(clear: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(clear)
    def in_turn() -> None:
        with _turn:
            clear()

    return in_turn
