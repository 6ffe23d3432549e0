"""``amp.init`` and the handle that it returns. The handle controls the casts, wraps optimizers and scales losses."""

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
    """Controls the casts around functions, and scales losses by the oldest of Apex's interfaces."""

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap ``optimizer`` with loss scales of its own, one for each of ``num_loss`` losses between two steps."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, optimizer: Optimizer) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Scale a loss of ``optimizer``, which needs no ``amp.initialize``."""
        return scale_by_handle(self, loss, optimizer)


start = functools.partial(start_casts, AmpHandle)
"""Starts the casts, for an enabled :func:`init` and for ``amp.initialize`` at O1 and O4."""


class NoOpHandle:
    """The handle that ``init(enabled=False)`` returns. It does nothing."""

    def is_active(self) -> bool:
        """Always False."""
        return False

    @contextlib.contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def wrap_optimizer(self, optimizer: Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Return a wrapper that scales nothing."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: torch.Tensor, _: Optimizer) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Return a context manager that yields the loss unchanged."""
        return contextlib.nullcontext(loss)

    @property
    def has_cache(self) -> bool:
        """Always False."""
        return False

    @property
    def verbose(self) -> bool:
        """Always False."""
        return False

    def _clear_cache(self) -> None:
        """Do nothing."""

    def _deactivate(self) -> None:
        """Do nothing."""


def init(enabled: bool = True, loss_scale: Any = "dynamic", *more: Any, **options: Any) -> AmpHandle | NoOpHandle:
    """Replace torch's functions by wrappers that cast their arguments, in every thread, as Apex's O1 does.

    The positional arguments are NVIDIA's, ``(enabled, loss_scale, enable_caching, verbose, allow_banned)``. If the
    third is a dtype, they are ROCm's, ``(enabled, loss_scale, patch_type, enable_caching, verbose, allow_banned)``. All
    may be given by name.

    Args:
        enabled: False returns a :class:`NoOpHandle`, replaces nothing, and switches decorated functions off.
        loss_scale: accepted and not used: ``amp.initialize`` does the scaling.
        *more: ``enable_caching`` (True, the default: keep casts of Parameters until the cache is cleared), ``verbose``
            (True: log each cast; default False), ``allow_banned`` (True: ``F.binary_cross_entropy`` runs in fp32;
            default False: it is refused), ``patch_type`` (the lower dtype; default ``torch.float16``) and
            ``user_cast_preferred`` (True: cast a registered function as registered only; default False: Apex's list
            casts it too).
        **options: the same by name, and ``cast_all_floats`` (True: cast other dtypes as Apex does: float64, and bf16
            where fp16 is the lower dtype; default False).

    Returns:
        The handle; ``handle._deactivate()`` undoes everything.

    Raises:
        RuntimeError: ``patch_type`` is neither ``torch.float16`` nor ``torch.bfloat16``.
    """
    if more and isinstance(more[0], torch.dtype):  # ROCm's third argument; the others follow in NVIDIA's order
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
