"""Steps out of autocast regions of the code around, for backwards and steps. Loaded where there is such a region."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from xamp.casting import active, dtype_errors
from xamp.registry.registry import HOST
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private import autocast

__all__ = ["Regions"]


class Regions:
    """The regions of the code around a session's backward or step, of xamp's and of torch's: both step out of them.

    A node of backward runs in the autocast state of the call to ``backward()``, and would be cast to another dtype than
    its forward; an optimizer may multiply matrices too. A ``disable_casts`` block holds for forwards within, and stays.
    """

    def __init__(self, device_type: str, level: str, lower: torch.dtype | None) -> None:
        self._level, self._lower = level, lower
        self._kinds = [*filter(torch.amp.is_autocast_available, dict.fromkeys((device_type, HOST)))]

    @keep_eager
    def step_out(self) -> Any:
        """Switch autocast off, and take the mark away; return the argument for :meth:`step_in`."""
        on, mark = [kind for kind in self._kinds if autocast.is_autocast_enabled(kind)], active.innermost()
        is_marked = mark is not None and not mark.blocked
        if not on and not is_marked:
            return None
        for kind in on:
            autocast.set_autocast_enabled(kind, False)
        return _depth(), on, active.replay(None, None) if is_marked else None

    @keep_eager
    def step_in(self, left: Any) -> None:
        """Undo :meth:`step_out`, unless a region was entered or left meanwhile; drop casts of weights."""
        depth, on, before = left
        if _depth() == depth:
            for kind in on:
                autocast.set_autocast_enabled(kind, True)
            if before is not None:
                active.restore(before)
        active.drop_casts(active.innermost())

    def explain(self, error: BaseException) -> None:
        """See :func:`xamp.casting.dtype_errors.explain_backward`."""
        with contextlib.suppress(Exception):  # of an error that cannot say what it is
            dtype_errors.explain_backward(error, self._lower, self._level)


def _depth() -> int:
    autocast.autocast_increment_nesting()
    return autocast.autocast_decrement_nesting()
