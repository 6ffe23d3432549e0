"""Restores the mark of the region when torch's activation checkpointing recomputes code in backward.

torch's checkpointing restores the autocast state of the device and of the CPU, and nothing else. Two functions of torch
take the function to recompute as an argument. :func:`watch` replaces both by wrappers, which pass a function that first
restores the mark and the slot. The compiler chooses among its compiled versions of a block by that state. Without it,
backward could run a version that was compiled for another caller, silently in other dtypes.

Code that ran outside of regions is recomputed outside of regions, even if backward itself runs inside a region.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from xamp.casting import active
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private.autograd import wrap_checkpoint_generator

__all__ = ["watch"]

_patched: list[str] = []
_lock = threading.RLock()


def watch() -> None:
    """Make torch's checkpointing restore marks; :mod:`xamp.casting.node_numbers` serves other libraries."""
    # Here, since with torch 2.7 it takes 240 ms, which a mere import of xamp should not.
    from torch.utils import checkpoint

    with _lock:
        if _patched:
            return
        wrap_checkpoint_generator(functools.partial(_restoring, position=0))
        reentrant = checkpoint.CheckpointFunction
        reentrant.forward = staticmethod(_restoring(reentrant.forward, 1))  # type: ignore[method-assign]
        _patched.append("torch.utils.checkpoint")


def _restoring(original: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wrap ``original`` so that its argument at ``position``, the function to recompute, restores the present state."""

    @functools.wraps(original)
    def checkpointing(*args: Any, **kwargs: Any) -> Any:
        restored = functools.partial(_run_restored, active.snapshot(), args[position])
        return original(*args[:position], restored, *args[position + 1 :], **kwargs)

    return keep_eager(checkpointing, inner=False)


@functools.partial(keep_eager, inner=False)
def _run_restored(snapshot: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = active.replay(*snapshot)
    try:
        return function(*args, **kwargs)
    finally:
        active.restore(before)
