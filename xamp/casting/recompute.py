"""What torch's activation checkpointing runs again in backward runs as it ran in forward.

Checkpointing restores the autocast state of the device and of the CPU, and nothing else. So the two places at which it
is given the function to run again hand it one that first puts back the mark of the region, and with it the state by
which the compiler chooses among what it compiled: a compiled block that was compiled for other callers too would
otherwise be run again as compiled for them, silently in other dtypes. Code outside of regions gets back that it is in
none, in a backward inside a region too.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

from xamp.casting import active
from xamp.casting.compiler import keep_eager

__all__ = ["watch"]

_watched: list[str] = []
_lock = threading.Lock()


def watch() -> None:
    """Have torch's checkpointing restore marks; :mod:`xamp.casting.node_numbers` serves other libraries'."""
    with _lock:
        if _watched:
            return
        _watched.append("torch.utils.checkpoint")
        with contextlib.suppress(AttributeError):  # neither is public: a later torch may lack them
            saved = checkpoint._checkpoint_without_reentrant_generator
            checkpoint._checkpoint_without_reentrant_generator = _restoring(saved, 0)
        with contextlib.suppress(AttributeError):
            reentrant = checkpoint.CheckpointFunction
            reentrant.forward = staticmethod(_restoring(reentrant.forward, 1))  # type: ignore[method-assign]


def _restoring(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    """``original`` with the function to run again, its argument at ``place``, made to restore what holds now."""

    @functools.wraps(original)
    def checkpointing(*args: Any, **kwargs: Any) -> Any:
        again = functools.partial(_again, active.standing(), args[place])
        return original(*args[:place], again, *args[place + 1 :], **kwargs)

    return keep_eager(checkpointing, inner=False)


@functools.partial(keep_eager, inner=False)
def _again(standing: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = active.replay(*standing)
    try:
        return function(*args, **kwargs)
    finally:
        active.restore(before)
