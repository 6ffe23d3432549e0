"""Moves gradients from lowered parameters into their masters while backward runs, where micro-batches accumulate.

The masters then hold the fp32 gradients of earlier micro-batches, 4 bytes a parameter. If the 16-bit gradients of the
next one stayed where they are until ``scale_loss`` is left, these would be 2 bytes more. So a hook collects parameters
as they get their gradients, and moves them chunk by chunk, just as :func:`xamp.scaling.masters.transfer` does at the
end. What the hook leaves out moves at the end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xamp.errors import StateError
from xamp.scaling import masters

__all__ = ["EarlyMoves", "is_worth_it"]

_LEAST = 2**18
"""Elements of all lowered parameters, 512 KiB of gradients, below which early moves save nothing to speak of."""

_FEW = 32
"""So many parameters may share those. Of 300 with 1,000 elements each, the hooks took more time than the rest."""

_SMALLER = 16
"""A parameter this many times smaller than the mean gets no hook, which would take 8 us: biases, norms."""

_DROPPED = "All gradients of the optimizers of this block are dropped, so run the whole iteration again."


def is_worth_it(pairs: Sequence[masters.Pair]) -> bool:
    """Return whether ``pairs`` are large, and on one device. They are whole: a shard has a process group."""
    least = _LEAST * max(1.0, len(pairs) / _FEW)
    if sum(p.numel() for p, _ in pairs) < least:
        return False
    return len({tensor.device for pair in pairs for tensor in pair}) == 1


class EarlyMoves:
    """The early moves of one ``scale_loss`` over one optimizer, from :meth:`start` to :meth:`stop`.

    The hooks know this object weakly. On a CPU they run in the thread that called ``backward``, elsewhere in the one
    that autograd has for the device. A hook in another thread ends the moves of this block: nothing may move while
    another backward adds. The parameter whose hook runs waits for a later one: autograd still holds its gradient.

    Args:
        pairs: lowered parameters and their masters.
        finish: unscales and checks the fp32 gradients of a chunk in place; None leaves them as they are.
        found_inf: the flag that ``finish`` raises; None where nothing is checked.

    Attributes:
        moved: something has moved, or was about to: the gradients in the masters are no more those of before.
        is_moving: a move has begun and not ended; after the backward this says that an exception came in between.
    """

    def __init__(
        self,
        pairs: Sequence[masters.Pair],
        finish: Callable[[list[torch.Tensor]], None] | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        self.found_inf = found_inf
        self.moved = False
        self.is_moving = False
        self._pairs = pairs
        self._finish = finish
        self._limit = masters.chunk_limit(pairs)
        self._waiting: dict[nn.Parameter, nn.Parameter] = {}  # those that have a gradient -> their masters
        self._size = 0  # elements of what is waiting
        least = sum(p.numel() for p, _ in pairs) / len(pairs) / _SMALLER
        self._master_of = {p: m for p, m in pairs if p.requires_grad and p.numel() >= least}
        self._thread = threading.get_ident() if pairs[0][0].is_cpu else None
        self._ended = False
        self._stream = _current_stream(pairs[0][0].device)
        self._hook = _hook_of(weakref.ref(self))

    def start(self) -> None:
        """Register the hooks, but for parameters that have others: these are to find the gradient where it was."""
        for param in self._master_of:
            if not _hooks_on(param):
                param.register_post_accumulate_grad_hook(self._hook)

    def stop(self) -> None:
        """Remove the hooks; a parameter that had none is as if it never had one. This may run again."""
        for param in self._master_of:
            hooks = _hooks_on(param)
            for key in [key for key, hook in hooks.items() if hook is self._hook]:
                del hooks[key]
            if not hooks:
                param._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def end(self, found_inf: torch.Tensor | None) -> bool:
        """End the moves after the backward, and raise ``found_inf`` where they overflowed; return whether any moved.

        Raises:
            StateError: a part of the gradients is in the masters, and the rest is lost.
        """
        self.stop()
        if self.moved and self.has_none():
            self.clear()
        if self.is_moving:
            raise StateError(
                "scale_loss: an exception came out of the backward while gradients moved into the masters, and the "
                f"body of the block went on. {_DROPPED} Let such an exception leave the block."
            )
        if self.has_lost():
            raise StateError(
                "scale_loss: the body of the block took gradients from the model after a part of them had moved into "
                f"the masters. {_DROPPED} Change gradients after the block, or clear all by optimizer.zero_grad()."
            )
        if self.moved and self.found_inf is not None and found_inf is not None:
            torch.maximum(found_inf, self.found_inf, out=found_inf)
        return self.moved

    def clear(self) -> None:
        """Forget what has moved, and its overflow: all gradients were cleared."""
        self.moved = self.is_moving = False
        self._waiting, self._size = {}, 0
        self._lower_flag()

    def _lower_flag(self) -> None:
        if self.found_inf is not None:
            self.found_inf.zero_()

    def has_none(self) -> bool:
        """Return whether no master has a gradient: they were cleared, by whichever call."""
        return all(master.grad is None for _, master in self._pairs)

    def has_lost(self) -> bool:
        """Return whether gradients of the last backward were taken from the model, after others of it had moved."""
        return self.moved and any(p.grad is None and m.grad is not None for p, m in self._waiting.items())

    def note(self, param: nn.Parameter) -> None:
        """Take in that ``param`` has got its gradient; move a chunk if enough others are waiting."""
        if self.is_moving or self._ended or not self._is_ours():
            return
        if self._size >= self._limit:
            self._move()
        if param not in self._waiting and _is_ordinary(param):
            self._waiting[param] = self._master_of[param]
            self._size += param.numel()

    def _is_ours(self) -> bool:
        """Return whether this is the thread, and the device's queue, in which gradients may move."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if self._thread != thread:
            self._ended = True  # never taken back: both threads may be here at once
        return not self._ended and _current_stream(self._pairs[0][0].device) == self._stream

    def _move(self) -> None:
        if self.moved and self.has_none():
            self._lower_flag()
        chunk = [pair for pair in self._waiting.items() if pair[0].grad is not None]
        self._waiting, self._size = {}, 0
        if chunk:
            self.moved = self.is_moving = True
            masters.transfer_chunk(chunk, self._finish)
            self.is_moving = False


def _hook_of(ref: weakref.ReferenceType[EarlyMoves]) -> Callable[[torch.Tensor], None]:
    def note(param: Any) -> None:
        if not torch.compiler.is_compiling() and (moves := ref()) is not None:
            moves.note(param)

    return note


def _hooks_on(param: torch.Tensor) -> dict[Any, Any]:
    return param._post_accumulate_grad_hooks or {}


def _is_ordinary(param: torch.Tensor) -> bool:
    """Return whether the gradient may move: a dense one without a graph, that no other hook is to see."""
    grad = param.grad
    return grad is not None and not grad.is_sparse and not grad.requires_grad and len(_hooks_on(param)) == 1


def _current_stream(device: torch.device) -> object:
    """Return the current stream of ``device``; None where its kind has no streams."""
    current: Callable[..., object] | None = getattr(getattr(torch, device.type, None), "current_stream", None)
    return None if current is None else current(device)
