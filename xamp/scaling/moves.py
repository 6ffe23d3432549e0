"""Moves gradients from low-precision parameters to their masters, and sees what becomes of the model's own after that.

Gradients move when a ``scale_loss`` is left. After a move :class:`GradientSentinel` sees that somebody cleared the
gradients of the model, or wrote to them.
"""

from __future__ import annotations

import enum
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from xamp.distributed import ranks
from xamp.errors import StateError
from xamp.scaling.masters import Pair
from xamp.scaling.parameters import Parameters

__all__ = ["Fate", "Finish", "GradientSentinel", "ModelGradient", "chunks", "error_for_written", "transfer"]

_GRAD = operator.attrgetter("grad")
_SMALL_CHUNK = 2**15  # elements, 128 KiB in fp32: a smaller chunk is not worth its calls

Finish = Callable[[list[torch.Tensor]], None]
"""Unscales and checks the fp32 gradients of a chunk in place."""

Owner = Callable[[], Any]
"""Returns the :class:`xamp.scaling.gradients.Gradients` of a parameter; None where its optimizer is gone."""


def error_for_written(call: str) -> StateError:
    """Return the error for gradients of the model that something besides a ``scale_loss`` has written to."""
    return StateError(
        f"{call}: there are gradients that did not come through scale_loss since the last step: a backward() "
        "ran without it, or the gradients of the model's own parameters were written to. At this level "
        "gradients are in the fp32 masters: clip and change those, with xamp.clip_grad_norm_(optimizer, "
        "max_norm) or xamp.master_params(optimizer), and run every backward() inside the with block."
    )


def transfer(params: Parameters, finish: Finish | None, *, leave: bool = False) -> bool:
    """Move each gradient of a low-precision parameter into its master's ``.grad``, and add it to what is there.

    The low-precision gradients of a chunk are freed before the next is copied: Adam then takes 18 bytes a parameter,
    against 20 if all are copied at once.

    Args:
        params: has the parameters and masters.
        finish: None leaves the gradients as they are.
        leave: the low-precision parameters keep their gradients.

    Returns:
        Whether there was any gradient.
    """
    pairs = [pair for pair in params.pairs if pair[0].grad is not None]
    for chunk in chunks(pairs):
        _transfer_chunk(chunk, params, finish, leave=leave)
    return bool(pairs)


def chunks(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """Divide ``pairs`` into chunks of a sixteenth of all their elements, but for small ones."""
    total = sum([p.numel() for p, _ in pairs])
    if total <= _SMALL_CHUNK:
        yield from [pairs] if pairs else []
        return
    limit = max(total / 16, _SMALL_CHUNK)
    start, size = 0, 0
    for end, (param, _) in enumerate(pairs, 1):
        size += param.numel()
        if size >= limit or end == len(pairs):
            yield pairs[start:end]
            start, size = end, 0


def _transfer_chunk(chunk: Sequence[Pair], params: Parameters, finish: Finish | None, *, leave: bool) -> None:
    """Move the gradients of one chunk; see :func:`transfer`. Each parameter has one."""
    low_precision = [p.grad for p, _ in chunk if p.grad is not None]
    in_parts = params.copy is ranks.copy
    if any(g.is_sparse for g in low_precision):
        full = [g.float() for g in low_precision]
    else:
        full = [torch.empty_like(m) for _, m in chunk]
        if in_parts:
            low_precision = [ranks.align(g, m) for g, (_, m) in zip(low_precision, chunk, strict=True)]
        params.copy(full, low_precision)
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


class Fate(enum.Enum):
    """The fate of the model's gradients since zeros were left among them."""

    NOTHING_LEFT = "there are no zeros on the model"
    UNTOUCHED = "the zeros are as they were"
    CLEARED = "all gradients of the model were cleared"
    CLEARED_IN_PART = "those of a part of it were"
    WRITTEN = "somebody wrote into them"


class ModelGradient(torch.Tensor):
    """The gradient of zeros that stands on a model's parameter while the master has the gradient.

    Who reads it gets a copy of the master's, as it is at that moment, in fp32: :mod:`xamp.scaling.reads`. What is
    written goes into the zeros or into that copy, whose versions tell of it. Autograd adds to the zeros too: it works
    below this class. It leads to nothing that keeps its parameter alive.
    """

    _xamp_stands: tuple[torch.Tensor, weakref.ref[nn.Parameter], Owner, int]
    """The zeros as a plain tensor or DTensor, of the same memory; the parameter; its owner; the zeros' version."""

    _xamp_read: tuple[torch.Tensor, TensorWeakRef, int] | None = None
    """The copy that who reads gets, and of which tensor and version of it; None: nobody has read."""

    def _xamp_copy_of(self, found: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``found``, one and the same for its version: a write into a view of the copy is noticed."""
        before = self._xamp_read
        if before is None or (before[0]._version == 0 and (before[1]() is not found or before[2] != found._version)):
            self._xamp_read = before = found.detach().clone(), TensorWeakRef(found), found._version
        return before[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with the gradients of masters, or, where it writes, with the zeros."""
        from xamp.scaling import reads  # few scripts read it

        return reads.run(func, args, kwargs or {})


def _shown(zeros: torch.Tensor) -> Any:
    """Return a DTensor of the same memory that shows the gradient of the master."""
    from xamp.scaling import reads

    grad: Any = zeros.detach()
    grad.__class__ = reads.class_over(type(zeros), ModelGradient)
    return grad


class _Zeros(NamedTuple):
    """A gradient of zeros on a parameter, and the version it had.

    Attributes:
        param: the parameter.
        grad: its gradient, a :class:`ModelGradient`.
        zeros: the same as a tensor that shows the zeros.
        version: its version when it was made.
    """

    param: nn.Parameter
    grad: torch.Tensor
    zeros: torch.Tensor
    version: int

    @classmethod
    def on(cls, param: nn.Parameter, zeros: torch.Tensor, owner: Owner) -> _Zeros:
        """Put zeros on ``param``, as a tensor that shows the gradient of the master."""
        grad: Any = zeros.as_subclass(ModelGradient) if type(zeros) is torch.Tensor else _shown(zeros)
        version = zeros._version
        grad._xamp_stands = zeros, weakref.ref(param), owner, version
        param.grad = grad
        return cls(param, grad, zeros, version)

    def is_written(self) -> bool:
        """Return whether somebody wrote into the zeros, or into what they showed."""
        read = vars(self.grad).get("_xamp_read")
        return self.zeros._version != self.version or (read is not None and read[0]._version != 0)

    def has_numbers(self) -> bool:
        """Return whether somebody wrote numbers into the zeros. Waits for the device where somebody wrote."""
        return self.is_written() and bool(self.zeros.any())

    def take(self) -> None:
        """Take the zeros away, or a copy that a wrapper has made of them; what a backward has left stays, as it is."""
        grad = self.param.grad
        if grad is self.grad:
            self.param.grad = self.zeros if self.has_numbers() else None
        elif grad is not None and grad._is_view() and not bool(grad.any()):
            self.param.grad = None


class GradientSentinel:
    """Finds out whether somebody cleared the model's gradients while the engine held them elsewhere.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the low-precision parameters only. So
    xamp leaves a gradient of zeros, the sentinel, on the smallest of them. If it is gone, all gradients were cleared.
    If it was written to, somebody worked on the model's gradients instead of the masters'. A second one elsewhere in
    the model tells whether only a part was cleared. Nobody knows which part, so that is an error. Who reads it reads
    the master's: :class:`ModelGradient`.
    """

    def __init__(self, pairs: Sequence[Pair], owner: Owner) -> None:
        self._pairs = pairs
        self._owner = owner
        first = min((p for p, _ in pairs), key=torch.Tensor.numel)
        second = _elsewhere(pairs, first)
        self._params = [first] if second is None else [first, second]
        self._besides = [p for p, _ in pairs if p is not first and p is not second]
        self._left: list[_Zeros] = []

    def put(self) -> None:
        """Leave the zeros on the parameters. Called when the gradients have been taken off the model."""
        self._left = [_Zeros.on(param, torch.zeros_like(param), self._owner) for param in self._params]

    def renew(self) -> None:
        """Leave new zeros where there were some: ``zero_grad`` of a managed model took them."""
        if self._left:
            self.put()

    def forget(self) -> None:
        """Forget the zeros, which somebody else takes or has taken away."""
        self._left = []

    def take(self) -> None:
        """Take the zeros away, or the copies that a wrapper has made of them; not what a backward has left."""
        left, self._left = self._left, []
        for one in left:
            one.take()

    def has_others(self) -> bool:
        """Return whether low-precision parameters have gradients besides the zeros."""
        if not all(map(operator.is_, map(_GRAD, self._besides), itertools.repeat(None))):
            return True
        return not self._left and any(p.grad is not None for p in self._params)

    def adopt_copies(self) -> None:
        """Let a copy of the zeros that a wrapper has put in their place become the sentinel.

        DDP with ``gradient_as_bucket_view`` lays its buckets out anew in the second forward, and replaces each gradient
        that there is by a copy in a bucket. Who clears gradients leaves none, or writes into the zeros.
        """
        for index, one in enumerate(self._left):
            grad = one.param.grad
            if grad is None or grad is one.grad or one.is_written() or not grad._is_view():
                continue
            # A backward() without scale_loss, after all were cleared, leaves gradients on the others too.
            if not self.has_others() and not bool(grad.any()):
                self._left[index] = _Zeros.on(one.param, grad, self._owner)

    def fate(self) -> Fate:
        """Return the fate of the model's gradients since zeros were left among them."""
        if not self._left:
            return Fate.NOTHING_LEFT
        first = self._left[0]
        there = first.param.grad is first.grad
        if any(there == (one.param.grad is None) for one in self._left[1:]) and not self._has_numbers_besides():
            return Fate.CLEARED_IN_PART  # a backward that came later would hide that
        if not there:
            return Fate.CLEARED
        return Fate.WRITTEN if any(one.is_written() for one in self._left) else Fate.UNTOUCHED

    def has_numbers(self) -> bool:
        """Return whether what somebody wrote are numbers, as of a backward, and no zeros of ``zero_()``."""
        return self._left[0].has_numbers() or self._has_numbers_besides()

    def _has_numbers_besides(self) -> bool:
        return any(one.has_numbers() for one in self._left[1:]) or self.has_others()


def _elsewhere(pairs: Sequence[Pair], param: torch.Tensor) -> nn.Parameter | None:
    """Return the smallest parameter in the half of ``pairs`` without ``param``; None where all are large there."""
    half = len(pairs) // 2
    first, last = [p for p, _ in pairs[:half]], [p for p, _ in pairs[half:]]
    others = first if any(p is param for p in last) else last
    found = min(others, key=torch.Tensor.numel, default=None)
    return None if found is None or found.numel() > _SMALL else found
