"""Moves gradients from low-precision parameters to their masters, and sees what becomes of the model's own after that.

Mostly they move when a ``scale_loss`` is left. While micro-batches accumulate, the masters hold fp32 gradients already,
and 16-bit ones that wait for the end of the next backward would take 2 bytes a parameter more: :class:`EarlyMoves` lets
them move during it, chunk by chunk. After a move :class:`GradientSentinel` sees that somebody cleared the gradients of
the model, or wrote to them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.distributed import ranks
from xamp.errors import StateError
from xamp.ground.compiler import break_graphs
from xamp.ground.torch_features import has_operators_outside_of_captures
from xamp.plans.waiting import cleared_in_part, written
from xamp.scaling import masters

__all__ = ["EarlyMoves", "GradientSentinel", "chunk_limit", "clear_gradients", "is_worth_it", "transfer"]

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


# ---------------------------------------------------------------- during the backward of a later micro-batch

_LEAST = 2**18  # elements of all low-precision parameters, 512 KiB of gradients: of less, early moves save nothing
_FEW = 32  # so many parameters may share those; of 300 with 1,000 elements each, the hooks took more time than the rest
_SMALLER = 16  # a parameter this many times smaller than the mean (bias, norm) gets no hook, which would take 8 us

_DROPPED = "All gradients of the optimizers of this block are dropped, so run the whole iteration again."


def is_worth_it(pairs: Sequence[masters.Pair]) -> bool:
    """Return whether ``pairs`` are large, and on one device. They are whole: a shard has a process group."""
    large = sum(p.numel() for p, _ in pairs) >= _LEAST * max(1.0, len(pairs) / _FEW)
    return large and len({tensor.device for pair in pairs for tensor in pair}) == 1


class EarlyMoves:
    """The early moves of one ``scale_loss`` over one optimizer, from :meth:`start` to :meth:`stop`.

    A hook runs when a parameter has got its gradient, and moves those of the parameters before it; autograd still holds
    its own. On a CPU hooks run in the thread that called ``backward``, elsewhere in autograd's thread for the device. A
    hook in any other thread ends the moves, because a second backward may be adding to the same gradients. Hooks hold
    this object weakly.

    Args:
        pairs: low-precision parameters and their masters.
        finish: None leaves the gradients as they are.
        found_inf: the flag that ``finish`` raises; None where nothing is checked.

    Attributes:
        moved: something has moved, or was about to, so the masters no longer have the gradients of before.
    """

    def __init__(self, pairs: Sequence[masters.Pair], finish: Finish | None, found_inf: torch.Tensor | None) -> None:
        self.moved = False
        self._is_moving = False  # a move has begun and not ended; after the backward: an exception came in between
        self._found_inf = found_inf
        self._pairs = pairs
        self._finish = finish
        self._limit = chunk_limit(pairs)
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
        if self.moved and self._has_none():
            self.clear()
        if self._is_moving:
            raise StateError(
                "scale_loss: an exception came out of the backward while gradients moved into the masters, and the "
                f"body of the block went on. {_DROPPED} Let such an exception leave the block."
            )
        if self.moved and any(p.grad is None and m.grad is not None for p, m in self._waiting.items()):
            raise StateError(
                "scale_loss: the body of the block took gradients from the model after a part of them had moved into "
                f"the masters. {_DROPPED} Change gradients after the block, or clear all by optimizer.zero_grad()."
            )
        if self.moved and self._found_inf is not None and found_inf is not None:
            torch.maximum(found_inf, self._found_inf, out=found_inf)
        return self.moved

    def clear(self) -> None:
        """Forget what has moved, and its overflow: all gradients were cleared."""
        self.moved = self._is_moving = False
        self._waiting, self._size = {}, 0
        if self._found_inf is not None:
            self._found_inf.zero_()

    def _has_none(self) -> bool:
        """Return whether no master has a gradient: they were cleared, by whichever call."""
        return all(master.grad is None for _, master in self._pairs)

    def add(self, param: nn.Parameter) -> None:
        """Let ``param``, which has got its gradient, wait; move a chunk first if enough others are waiting."""
        if self._is_moving or self._ended or not self._is_ours():
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
        chunk = [pair for pair in self._waiting.items() if pair[0].grad is not None]
        if self.moved and self._has_none():
            self.clear()
        self._waiting, self._size = {}, 0
        if chunk:
            self.moved = self._is_moving = True
            transfer_chunk(chunk, self._finish)
            self._is_moving = False


def _hook_of(ref: weakref.ReferenceType[EarlyMoves]) -> Callable[[torch.Tensor], None]:
    def add(param: Any) -> None:
        if not torch.compiler.is_compiling() and (moves := ref()) is not None:
            moves.add(param)

    return add


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


# ---------------------------------------------------------------- whether the model's gradients were touched since

_SMALL = 2**16  # elements, 128 KiB in 16 bits: no larger parameter gets a second sentinel

_sentinels: Any = WeakIdKeyDictionary()  # parameter -> its sentinel, held weakly


class GradientSentinel:
    """Finds out whether somebody cleared the model's gradients while the masters held them.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the low-precision parameters only. So
    xamp leaves a gradient of zeros, the sentinel, on the smallest of them. If it is gone, all gradients were cleared,
    and the masters' are cleared too. If it was written to, somebody worked on the model's gradients instead of the
    masters', which is an error. A second one elsewhere in the model tells whether only a part was cleared. Nobody knows
    which part, so that is an error too. Compiled code does without the second.
    """

    def __init__(self, pairs: Sequence[masters.Pair]) -> None:
        self._pairs = pairs
        first = min((p for p, _ in pairs), key=torch.Tensor.numel)
        second = _elsewhere(pairs, first)
        self._params = [first] if second is None else [first, second]
        self._left: list[tuple[nn.Parameter, torch.Tensor, int]] = []  # parameter, its zeros, their version
        self._dummy = torch.zeros((), dtype=torch.float32, device=first.device)
        for param in self._params:
            _sentinels[param] = weakref.ref(self)  # weak: this object holds the parameter, the key

    def leave(self) -> None:
        """Leave the zeros on the parameters. Called when the gradients have moved to the masters."""
        if not self._left:
            left = []
            for param in self._params[:1] if torch.compiler.is_compiling() else self._params:
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
        if self._left and self._is_there(call):
            raise_if_written = _check_unwritten if torch.compiler.is_compiling() else _check
            for _, zeros, version in self._left:
                raise_if_written(self._dummy, zeros, version, call)

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
        if call and in_part and not torch.compiler.is_compiling() and not self._any_besides():
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
        if grad is None or torch.compiler.is_compiling() or zeros._version != version or not grad._is_view():
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


@break_graphs("an operator of this torch cannot say that no CUDA graph may hold it")
def _check(dummy: torch.Tensor, zeros: torch.Tensor, version: int, call: str) -> None:
    """Raise where somebody wrote into ``zeros`` since they had ``version``. ``call`` is for the message."""
    del dummy  # see _check_unwritten
    if zeros._version != version:
        raise written(call)


_SCHEMA = "(Tensor(a!) dummy, Tensor zeros, int version, str call) -> ()"
_made: list[object] = []


def _make() -> None:
    """Register :func:`_check` as an operator, at the first trace that calls it."""
    if not _made:
        made = torch.library.custom_op(
            "xamp::check_unwritten", _check, mutates_args=("dummy",), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,)
        )
        made.register_fake(lambda *_: None)
        _made.append(made)


_make._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces


def _check_unwritten(dummy: torch.Tensor, zeros: torch.Tensor, version: int, call: str) -> None:
    """Do what :func:`_check` does, in code that is being compiled.

    ``dummy`` is a tensor of no other use. The operator claims to write to it, so that no compiler leaves the call out.
    """
    if has_operators_outside_of_captures():
        _make()
        torch.ops.xamp.check_unwritten(dummy, zeros, version, call)
    else:
        _check(dummy, zeros, version, call)
