"""Moves gradients from low-precision parameters to their masters, and sees what becomes of the model's own after that.

They move when a ``scale_loss`` is left, chunk by chunk. After a move :class:`GradientSentinel` sees that somebody
cleared the gradients of the model, or wrote to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.plans.waiting import cleared_in_part, written
from xamp.scaling import masters

__all__ = ["GradientSentinel", "chunk_limit", "clear_gradients", "transfer"]

_SMALL_CHUNK = 2**15  # elements, 128 KiB in fp32: a smaller chunk is not worth its calls

Finish = Callable[[list[torch.Tensor]], None]
"""Unscales and checks the fp32 gradients of a chunk in place."""


def transfer(pairs: Sequence[masters.Pair], finish: Finish | None, *, leave: bool = False) -> bool:
    """Move each gradient of a low-precision parameter into its master's ``.grad``, and add it to what is there.

    The low-precision gradients of a chunk are freed before the next is copied: Adam then takes 18 bytes a parameter,
    against 20 if all are copied at once.

    Args:
        pairs: parameters and masters.
        finish: None leaves the gradients as they are.
        leave: the low-precision parameters keep their gradients.

    Returns:
        Whether there was any gradient.
    """
    pairs = [pair for pair in pairs if pair[0].grad is not None]
    limit, start, size = chunk_limit(pairs), 0, 0
    for end, (param, _) in enumerate(pairs, 1):
        size += param.numel()
        if size >= limit or end == len(pairs):
            transfer_chunk(pairs[start:end], finish, leave=leave)
            start, size = end, 0
    return bool(pairs)


def chunk_limit(pairs: Sequence[masters.Pair]) -> float:
    """Return how many elements make a chunk of ``pairs``: a sixteenth of all, but for small ones."""
    return max(sum(p.numel() for p, _ in pairs) / 16, _SMALL_CHUNK)


def transfer_chunk(chunk: Sequence[masters.Pair], finish: Finish | None, *, leave: bool = False) -> None:
    """Move the gradients of one chunk; see :func:`transfer`. Each parameter has one."""
    low_precision = [p.grad for p, _ in chunk]
    in_parts = masters.copy is ranks.copy
    if any(g is not None and g.is_sparse for g in low_precision):
        full = [g.float() for g in low_precision if g is not None]
    else:
        full = [torch.empty_like(m) for _, m in chunk]
        if in_parts:
            low_precision = [ranks.align(g, m) for g, (_, m) in zip(low_precision, chunk, strict=True)]
        masters.copy(full, low_precision)
    for param, _ in () if leave else chunk:
        param.grad = None
    if finish is not None:
        finish([*map(ranks.local, full)] if in_parts else full)
    for (_, master), grad in zip(chunk, full, strict=True):
        if master.grad is None:
            master.grad = grad
        else:
            master.grad = master.grad + grad if grad.is_sparse else master.grad.add_(grad)


# ---------------------------------------------------------------- whether the model's gradients were touched since

_SMALL = 2**16  # elements, 128 KiB in 16 bits: no larger parameter gets a second sentinel

_sentinels: Any = WeakIdKeyDictionary()  # parameter -> its sentinel, held weakly


class GradientSentinel:
    """Finds out whether somebody cleared the model's gradients while the masters held them.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the low-precision parameters only. So
    xamp leaves a gradient of zeros, the sentinel, on the smallest of them. If it is gone, all gradients were cleared,
    and the masters' are cleared too. If it was written to, somebody worked on the model's gradients instead of the
    masters', which is an error. A second one elsewhere in the model tells whether only a part was cleared. Nobody knows
    which part, so that is an error too.
    """

    def __init__(self, pairs: Sequence[masters.Pair]) -> None:
        self._pairs = pairs
        first = min((p for p, _ in pairs), key=torch.Tensor.numel)
        second = _elsewhere(pairs, first)
        self._params = [first] if second is None else [first, second]
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []  # parameter, its zeros, their version
        for param in self._params:
            _sentinels[param] = weakref.ref(self)  # weak: this object holds the parameter, the key

    def leave(self) -> None:
        """Leave the zeros on the parameters. Called when the gradients have moved to the masters."""
        if not self._left:
            left = []
            for param in self._params:
                param.grad = zeros = torch.zeros_like(param)
                left.append((param, zeros, zeros._version))
            self._left = left

    def forget(self) -> None:
        """Forget the zeros, after ``optimizer.zero_grad()`` took them."""
        self._left = []

    def renew(self) -> None:
        """Leave new zeros: ``zero_grad`` of a managed model took the old ones and has cleared its masters."""
        if self._left:
            self._left = []
            self.leave()

    def others(self) -> bool:
        """Return whether low-precision parameters have gradients besides the zeros."""
        return any(p.grad is not None and not any(p is one for one, *_ in self._left) for p, _ in self._pairs)

    def check(self, call: str) -> None:
        """Drop the masters' gradients if somebody cleared the model's.

        Raises:
            StateError: somebody wrote into the model's gradients, or cleared those of a part of it.
        """
        if self._left and self._is_there(call) and any(z._version != version for _, z, version in self._left):
            raise written(call)

    def collect(self, call: str = "") -> bool:
        """Before the next backward: take the zeros away again; return whether they were there, unchanged.

        Zeros that were written to and still are zeros were cleared by ``zero_()``, so the masters' gradients are
        dropped. Else a backward without ``scale_loss`` added to them, and its gradients stay.

        Args:
            call: what asks, for messages. Empty: it does not matter whether a part was cleared.

        Raises:
            StateError: somebody cleared the gradients of a part of the model.
        """
        if not self._left or not self._is_there(call):
            return False
        left, (param, zeros, version) = self._left, self._left[0]
        if zeros._version == version:
            self._left = []  # first: an interrupt after the next line would look as if somebody had cleared gradients
            _take_second(left)
            param.grad = None
            return True
        if bool(zeros.any()) or self._any_besides():
            _take_second(left)
            self._left = []
        else:
            param.grad = None
            self._drop()
        return False

    def _is_there(self, call: str) -> bool:
        """Return whether the first zeros are there; if not, all gradients were cleared, and the masters' are dropped.

        A backward that came later hides that only a part was cleared.
        """
        there = self._finds_zeros()
        in_part = any(there == (param.grad is None) for param, *_ in self._left[1:])
        if call and in_part and not self._any_besides():
            raise cleared_in_part(call)
        if not there:
            self._drop()
        return there

    def _any_besides(self) -> bool:
        """Return whether there are gradients besides the zeros; numbers that a backward added to the second count."""
        return any(_has_more(zeros, version) for _, zeros, version in self._left[1:]) or self.others()

    def _finds_zeros(self) -> bool:
        """Look for the first zeros; a copy of them that a wrapper has put in their place becomes the sentinel.

        DDP with ``gradient_as_bucket_view`` lays its buckets out anew in the second forward, and replaces each gradient
        that there is by a copy in a bucket. Who clears gradients leaves none, or writes into the zeros.
        """
        param, zeros, version = self._left[0]
        grad = param.grad
        if grad is zeros:
            return True
        if grad is None or zeros._version != version or not grad._is_view():
            return False
        # A backward() without scale_loss, after all were cleared, leaves gradients on the others too.
        if self._any_besides() or bool(grad.any()):
            return False
        self._left = [(param, grad, grad._version), *self._left[1:]]
        return True

    def _drop(self) -> None:
        for _, master in self._pairs:
            master.grad = None
        _take_second(self._left)
        self._left = []  # last: after an interrupt the next call sees again that the gradients were cleared


def _has_more(zeros: torch.Tensor, version: int) -> bool:
    """Return whether somebody wrote numbers into ``zeros``."""
    return zeros._version != version and bool(zeros.any())


def _take_second(left: Sequence[tuple[nn.Parameter, torch.Tensor, int]]) -> None:
    """Take the second zeros away, or the copy of them that a wrapper has made; not what a backward has left."""
    for param, zeros, version in left[1:]:
        grad = param.grad
        is_copy = grad is not None and grad is not zeros and grad._is_view() and not bool(grad.any())
        if is_copy or (grad is zeros and not _has_more(zeros, version)):
            param.grad = None


def _elsewhere(pairs: Sequence[masters.Pair], param: torch.Tensor) -> nn.Parameter | None:
    """Return the smallest parameter in the half of ``pairs`` without ``param``; None where all are large there."""
    half = len(pairs) // 2
    first, last = [p for p, _ in pairs[:half]], [p for p, _ in pairs[half:]]
    others = first if any(p is param for p in last) else last
    found = min(others, key=torch.Tensor.numel, default=None)
    return None if found is None or found.numel() > _SMALL else found


def clear_gradients(model: nn.Module) -> None:
    """Clear the gradients of the masters of ``model``'s parameters."""
    for param in model.parameters() if masters.any_low_precision() else ():
        master = masters.master_of(param)
        if master is not None:
            master.grad = None
        found = _sentinels.get(param)
        sentinel = None if found is None else found()
        if sentinel is not None:
            sentinel.renew()
