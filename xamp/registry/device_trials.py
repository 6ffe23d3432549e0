"""How a device is tried: in the state of a new process, and once for each question.

What a trial finds out is kept for the process, so it must tell of the device, not of the moment of the first question.
So a trial runs without what the caller has set, and where the moment is what made it fail, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from xamp.registry.causes import NotNow, is_in_use
from xamp.torch_compat.torch_private.autocast import DisableAutocast
from xamp.torch_compat.torch_private.dynamo import IS_COMPILING, compiler_attributes
from xamp.torch_compat.torch_private.modes import disable_current_modes

__all__ = ["as_in_a_new_process", "device_trial", "finds_nothing"]

Answer = TypeVar("Answer")


def device_trial(
    refused: Callable[[Exception], Answer],
) -> Callable[[Callable[..., Answer]], functools._lru_cache_wrapper[Answer]]:
    """Make a function a trial: one of its arguments is the device, and it is called once for each set of arguments.

    Args:
        refused: returns the answer where the device refuses by an error.

    Returns:
        The decorator. The trial raises what says nothing of the device (:func:`finds_nothing`), and tries it again when
        somebody asks again.
    """

    def decorated(look: Callable[..., Answer]) -> functools._lru_cache_wrapper[Answer]:
        @functools.cache
        @functools.wraps(look)
        def trial(*question: Any) -> Answer:
            device = next(part for part in question if isinstance(part, torch.device))
            try:
                with as_in_a_new_process(device):
                    return look(*question)
            except Exception as error:  # a device may refuse by any type of error
                if finds_nothing(error):
                    raise
                return refused(error)

        return trial

    return decorated


def finds_nothing(error: BaseException) -> bool:
    """Whether ``error`` says nothing of what a device can do: it is busy or full, or could not be tried now."""
    return isinstance(error, NotNow) or is_in_use(error)


@contextlib.contextmanager
def as_in_a_new_process(device: torch.device) -> Iterator[None]:
    """A block without the caller's modes, default device, autocast and inference mode, in which the host may wait.

    So a first use inside of an exporter or a counter of operators tells of the device too. The default dtype is the
    process's, not the thread's, so it stays: trials name the dtype of each tensor.

    Raises:
        NotNow: a graph is being captured on the device, which a trial would end with an error; or tensors have no
            values here.
    """
    if _ask(device, "is_current_stream_capturing"):
        raise NotNow(
            f"a graph is being captured on {device}, and what the device can do was not tried before. Run at least one "
            "whole training step before the capture."
        )
    with (
        _not_compiling(),
        torch.DisableTorchFunction(),
        disable_current_modes(),
        torch.inference_mode(mode=False),
        DisableAutocast(),
        _waiting_allowed(device),
    ):
        made = type(torch.empty(0, device="cpu"))
        if made is not torch.Tensor:
            raise NotNow(
                f"tensors are made as {made.__name__} here, and what {device} can do was not tried before. Use xamp "
                "once before this block."
            )
        yield


@contextlib.contextmanager
def _not_compiling() -> Iterator[None]:
    """Let torch's optimizers step as they do outside of an exporter."""
    before = compiler_attributes[IS_COMPILING]
    setattr(torch.compiler, IS_COMPILING, False)
    try:
        yield
    finally:
        setattr(torch.compiler, IS_COMPILING, before)


@contextlib.contextmanager
def _waiting_allowed(device: torch.device) -> Iterator[None]:
    """Suspend a mode in which torch warns, or raises, where the host waits for the device: a trial waits."""
    mode = _ask(device, "get_sync_debug_mode")
    if mode in (None, 0, "default"):
        yield
        return
    set_mode = torch.get_device_module(device.type).set_sync_debug_mode
    set_mode("default")
    try:
        yield
    finally:
        set_mode(mode)


def _ask(device: torch.device, function: str) -> Any:
    """Call a function of the device's module; None where there is no such module, function or device."""
    try:
        return getattr(torch.get_device_module(device.type), function)()
    except (AttributeError, RuntimeError, AssertionError):
        return None
