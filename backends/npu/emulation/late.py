"""Errors that a card tells late: its kernels run after the call has returned, so a wrong index shows afterwards.

The card tells of it where the host waits: reading a number, copying to the host, ``synchronize``. The result of the
call is then whatever the memory held, and everything computed from it too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xamp.backends.npu.emulation.library import CORE
from xamp.backends.npu.emulation.torch_private import OpOverload

__all__ = ["note_wait", "told_late", "waiting"]

_OUT_OF_RANGE = re.compile(r"out of (bounds|range)|index .*(expected|smaller than)|Target -?\d+ is", re.IGNORECASE)
_INDEXED = frozenset(
    (
        *("embedding", "embedding_dense_backward", "gather", "index", "index_add", "index_copy", "index_fill"),
        *("index_put", "_index_put_impl", "index_select", "nll_loss_forward", "nll_loss2d_forward", "put", "scatter"),
        *("scatter_add", "scatter_reduce", "take"),
    )
)


def told_late(operator: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` of ``operator``, whose errors of indices are kept until the host waits for the card."""
    base = operator.name().partition("::")[2].partition(".")[0].rstrip("_")
    if base not in _INDEXED or os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1":
        return kernel

    def kept(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            if not _OUT_OF_RANGE.search(str(error)):
                raise
            _fail_later(_device(args))
        return _unset(operator, args, kwargs)

    return kept


def _unset(operator: OpOverload, args: Any, kwargs: Any) -> Any:
    """What ``operator`` returns, with unset numbers; a tensor that it writes to is left as it is."""
    schema = operator._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[position] if position < len(args) else kwargs[argument.name]
    device = torch.device("npu", _device(args))

    def on_meta(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [on_meta(each) for each in value]
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    made = operator(*on_meta(args), **{key: on_meta(value) for key, value in kwargs.items()})
    if isinstance(made, torch.Tensor):
        return torch.empty_like(made, device=device)
    return tuple(torch.empty_like(each, device=device) for each in made)


def _device(values: Any) -> int:
    return next((each.get_device() for each in values if isinstance(each, torch.Tensor) and each.get_device() >= 0), 0)


_pending: set[int] = set()


def _fail_later(device: int) -> None:
    _pending.add(device)
    _cann().xamp_emulated_fail_later(ctypes.c_int(device))


@functools.cache
def _cann() -> ctypes.CDLL:
    cann = os.environ["XAMP_EMULATED_CANN"].split(os.pathsep)[0]  # what a release asks for beyond it comes after it
    return ctypes.CDLL(str(Path(cann) / CORE))


def note_wait() -> None:
    """Note that the host has waited for the card: no event that was recorded before is pending any more."""
    _cann().xamp_emulated_waited()


def waiting(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, in which the host waits for the card: it first raises what was kept, in torch_npu's words."""

    def told(*args: Any, **kwargs: Any) -> Any:
        for device in [each for each in _pending if each == _device(args)]:
            _pending.discard(device)
            torch.get_device_module("npu").synchronize(device)
        return kernel(*args, **kwargs)

    return told
