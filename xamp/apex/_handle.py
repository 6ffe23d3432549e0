"""``amp.init`` and what it returns: a handle on the casts that also wraps optimizers and scales losses."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.apex import _functions
from xamp.apex._casts_handle import CastsHandle
from xamp.apex._casts_handle import start as start_casts
from xamp.apex._legacy import OptimWrapper, scale_by_handle

__all__ = ["AmpHandle", "NoOpHandle", "init", "start"]


class AmpHandle(CastsHandle):
    """Casts around functions, and the oldest of Apex's ways to scale a loss."""

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """``optimizer`` with loss scales of its own, one for each of ``num_loss`` losses between two steps."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Scale a loss of ``optimizer``, which needs no ``amp.initialize``."""
        return scale_by_handle(self, loss, optimizer)


start = functools.partial(start_casts, AmpHandle)
"""What :func:`init` does where it is enabled, and ``amp.initialize`` at O1 and O4."""


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
        return OptimWrapper(optimizer, self, num_loss)

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
