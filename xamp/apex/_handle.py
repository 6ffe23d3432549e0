"""``amp.init`` and what it returns: a handle on the casts around torch's functions.

A handle owns a :class:`~xamp.apex._casts.Casting` and wants the installation (:mod:`xamp.apex._patches`) until it is
deactivated. Several may live: the newest decides, and when that ends the one before it does again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from xamp.apex import _casts, _functions, _patches
from xamp.apex._casts import Casting
from xamp.apex._state import state

if TYPE_CHECKING:
    from xamp.apex._legacy import OptimWrapper

__all__ = ["AmpHandle", "NoOpHandle", "clear_caches", "disable_casts", "init", "start"]

_handles: list[AmpHandle] = []
_lock = threading.RLock()


class AmpHandle:
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

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """``optimizer`` with loss scales of its own, one for each of ``num_loss`` losses between two steps."""
        return _wrap(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Scale a loss of ``optimizer``, which needs no ``amp.initialize``."""
        from xamp.apex._legacy import scale_by_handle

        return scale_by_handle(self, loss, optimizer)

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


class NoOpHandle:
    """What ``init(enabled=False)`` returns: a handle on nothing."""

    def is_active(self) -> bool:
        """Never."""
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """A wrapper that scales nothing."""
        return _wrap(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, _: Optimizer) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Hand the loss through."""
        return contextlib.nullcontext(loss)

    @property
    def has_cache(self) -> bool:
        """Never."""
        return False

    @property
    def verbose(self) -> bool:
        """Never."""
        return False

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""


def _wrap(optimizer: Optimizer, handle: AmpHandle | NoOpHandle, num_loss: int) -> OptimWrapper:
    from xamp.apex._legacy import OptimWrapper  # which needs the engine, and that this module

    return OptimWrapper(optimizer, handle, num_loss)


def init(enabled: bool = True, loss_scale: Any = "dynamic", *more: Any, **options: Any) -> AmpHandle | NoOpHandle:
    """Cast around torch's functions from now on, in every thread, as Apex's O1 does.

    The arguments are NVIDIA's, ``(enabled, loss_scale, enable_caching, verbose, allow_banned)``; with a dtype in the
    third place they are ROCm's, ``(enabled, loss_scale, patch_type, enable_caching, verbose, allow_banned)``. By name
    all may be given.

    Args:
        enabled: False returns a :class:`NoOpHandle` and installs nothing; decorated functions do nothing any more.
        loss_scale: taken and not used, as scaling is ``amp.initialize``'s.
        *more: ``enable_caching`` (True; casts of Parameters are kept until the handle's cache is cleared), ``verbose``
            (False; each cast is logged), ``allow_banned`` (False; ``F.binary_cross_entropy`` runs in fp32 instead of
            being refused), ``patch_type`` (``torch.float16``; the lower dtype) and ``user_cast_preferred`` (False; what
            was registered for a function holds in place of Apex's list, and not within it).
        **options: the same by name; and ``cast_all_floats`` (False): Apex's way with other dtypes: float64, and bf16
            where fp16 is the lower one, are cast too.

    Returns:
        The handle; ``handle._deactivate()`` undoes all of it.

    Raises:
        RuntimeError: ``patch_type`` is neither ``torch.float16`` nor ``torch.bfloat16``.
    """
    if more and isinstance(more[0], torch.dtype):  # ROCm's third place; the rest follows in the same order
        options["patch_type"], more = more[0], more[1:]
    given = _arguments(*more, **options)
    if not enabled:
        _functions.switch(False)
        return NoOpHandle()
    handle = start(**given)
    handle._loss_scale = loss_scale
    return handle


def _arguments(
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    patch_type: torch.dtype = torch.float16,
    user_cast_preferred: bool | None = None,
    *,
    cast_all_floats: bool = False,
) -> dict[str, Any]:
    return locals()


def start(
    patch_type: torch.dtype,
    *,
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    user_cast_preferred: bool | None = None,
    cast_all_floats: bool = False,
) -> AmpHandle:
    """What :func:`init` does where it is enabled, for ``amp.initialize`` too; the handle is ``_amp_state.handle``.

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
        handle = AmpHandle(enable_caching=enable_caching, verbose=verbose, casting=casting, wanted=wanted)
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
