"""Handles, which control the casts around torch's functions, and the list of active handles.

A handle owns a :class:`~xamp.apex._casts.Casting`. Until it is deactivated, it keeps the functions replaced
(:mod:`xamp.apex._patches`). Several handles may be active. The newest decides how to cast; when it ends, the one before
it decides again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from xamp.apex import _casts, _functions, _patches
from xamp.apex._amp_state import _amp_state as state
from xamp.apex._casts import Casting

__all__ = ["CastsHandle", "clear_caches", "disable_casts", "start"]

_handles: list[CastsHandle] = []
_lock = threading.RLock()
_Handle = TypeVar("_Handle", bound="CastsHandle")


class CastsHandle:
    """Controls the casts around functions, for the whole process, until :meth:`_deactivate`.

    Args:
        loss_scale: accepted as in Apex, and not used: ``amp.initialize`` does the scaling.
        enable_caching: keep the casts of Parameters until the cache is cleared.
        verbose: log each cast.
        casting: tells replaced functions how to cast; None makes one.
        wanted: what the handle needs to be patched; None means Apex's lists only.
    """

    def __init__(
        self,
        loss_scale: Any = "dynamic",
        enable_caching: bool = True,
        verbose: bool = False,
        *,
        casting: Casting | None = None,
        wanted: _patches.Wanted | None = None,
    ) -> None:
        self._casting = casting or Casting(torch.float16, caching=bool(enable_caching), verbose=bool(verbose))
        self._wanted = wanted or _patches.Wanted(tag=str(self._casting.lower))
        self._loss_scale = loss_scale

    def is_active(self) -> bool:
        """Whether the casts of this handle are on. Also True after :meth:`_deactivate`, as in Apex."""
        return self._casting.active

    @property
    def _is_active(self) -> bool:
        return self._casting.active

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        self._casting.switch(bool(value))

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """Switch the casts of this handle off in a block, for all threads."""
        with self._casting.paused():
            yield

    def _clear_cache(self) -> None:
        """Clear the cache: forget the casts of Parameters."""
        self._casting.clear()

    def _deactivate(self) -> None:
        """End the casts of this handle. The last handle restores all functions. A second call does nothing."""
        with _lock:
            if self in _handles:
                _handles.remove(self)
                _casts.process.casting = _handles[-1]._casting if _handles else None
                _patches.release(self._wanted)
        self._clear_cache()

    @property
    def has_cache(self) -> bool:
        """Whether casts of Parameters are cached."""
        return self._casting.cache is not None

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """The cached casts, by Parameter."""
        return {} if self._casting.cache is None else self._casting.cache

    def remove_cache(self, param: torch.Tensor) -> None:
        """Remove the cast of ``param`` from the cache."""
        self._casting.remove(param)

    @property
    def verbose(self) -> bool:
        """Whether each cast is logged."""
        return self._casting.verbose


def start(
    make: type[_Handle],
    patch_type: torch.dtype,
    *,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    user_cast_preferred: bool | None = None,
    cast_all_floats: bool = False,
) -> _Handle:
    """Replace the functions, make a handle of class ``make``, and set it as ``_amp_state.handle``.

    Raises:
        RuntimeError: ``patch_type`` is neither ``torch.float16`` nor ``torch.bfloat16``.
        AttributeError, TypeError: a registered function cannot be replaced in its module.
    """
    if patch_type not in (torch.float16, torch.bfloat16):
        raise RuntimeError(
            "Unsupported patch_torch_functions_type passed to initialize."
            "Supported types are: torch.float16 and torch.bfloat16."
        )
    casting = Casting(
        patch_type,
        caching=bool(enable_caching),
        allow_banned=bool(allow_banned),
        verbose=bool(verbose),
        wide=bool(cast_all_floats),
    )
    with _lock:
        registered = _functions.take_registered()
        tag = f"{patch_type} {allow_banned} {cast_all_floats}"
        wanted = _patches.Wanted(registered, bool(user_cast_preferred), casting.wide, tag)
        handle = make(enable_caching=enable_caching, verbose=verbose, casting=casting, wanted=wanted)
        _patches.hold(wanted)
        _handles.append(handle)
        _casts.process.casting = casting
        _patches.tag_caches()  # an older handle may be paused, this one is not
        _functions.switch(True)
        state.handle = handle
    return handle


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch the casts of all handles off in a block, for all threads. Without handles this does nothing.

    In-place functions of the fp32 list, and banned functions, still refuse fp16 arguments in the block, as in Apex.
    """
    with _lock:
        handles = list(_handles)
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle._disable_casts())
        yield


def clear_caches() -> None:
    """Clear the cache of every handle: functions use that of the newest, whichever session a loss belongs to."""
    with _lock:
        handles = list(_handles)
    for handle in handles:
        handle._clear_cache()
