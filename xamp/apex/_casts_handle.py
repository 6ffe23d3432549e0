"""A handle on the casts around torch's functions, and the list of those that live.

A handle owns a :class:`~xamp.apex._casts.Casting` and wants the installation (:mod:`xamp.apex._patches`) until it is
deactivated. Several may live: the newest decides, and when that ends the one before it does again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

from xamp.apex import _casts, _functions, _patches
from xamp.apex._casts import Casting
from xamp.apex._state import state

__all__ = ["CastsHandle", "clear_caches", "disable_casts", "start"]

_handles: list[CastsHandle] = []
_lock = threading.RLock()
_Handle = TypeVar("_Handle", bound="CastsHandle")


class CastsHandle:
    """Casts around functions that are in force until :meth:`_deactivate`, for the whole process.

    Args:
        loss_scale: taken for Apex's sake; scaling is ``amp.initialize``'s.
        enable_caching: casts of Parameters are kept until the cache is cleared.
        verbose: each cast is logged.
        casting: what its functions ask; made here if None.
        wanted: what is to be installed.
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
        """Whether its casts are not switched off; True after :meth:`_deactivate` too, as in Apex."""
        return self._casting.active

    @property
    def _is_active(self) -> bool:
        return self._casting.active

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        self._casting.switch(bool(value))

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        """Switch its casts off in a block, in all threads."""
        with self._casting.paused():
            yield

    def _clear_cache(self) -> None:
        """Forget the casts of Parameters."""
        self._casting.clear()

    def _deactivate(self) -> None:
        """End its casts. With the last handle, all functions are what they were; again it does nothing."""
        with _lock:
            if self in _handles:
                _handles.remove(self)
                _casts.process.casting = _handles[-1]._casting if _handles else None
                _patches.release(self._wanted)
        self._clear_cache()

    @property
    def has_cache(self) -> bool:
        """Whether casts of Parameters are kept."""
        return self._casting.cache is not None

    @property
    def cache(self) -> dict[torch.Tensor, torch.Tensor]:
        """The casts, by Parameter."""
        return {} if self._casting.cache is None else self._casting.cache

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cast of ``param``."""
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
    """Install the casts; the handle on them, a ``make``, is ``_amp_state.handle`` from now on.

    Raises:
        RuntimeError: ``patch_type`` is neither ``torch.float16`` nor ``torch.bfloat16``.
        AttributeError, TypeError: a registered function cannot be replaced where it stands.
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
        _functions.switch(True)
        state.handle = handle
    return handle


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Switch the casts around functions off in a block, in all threads; nothing happens where there are none.

    What writes fp16 numbers into a function of the fp32 list is refused in here too, as in Apex.
    """
    with _lock:
        handles = list(_handles)
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.enter_context(handle._disable_casts())
        yield


def clear_caches() -> None:
    """Forget the casts of Parameters, of every handle: functions ask the newest, whosever loss it is."""
    with _lock:
        handles = list(_handles)
    for handle in handles:
        handle._clear_cache()
