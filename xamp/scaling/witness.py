"""The witness: a gradient of zeros on a lowered parameter, by which xamp sees that somebody cleared the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.scaling import masters
from xamp.scaling.in_graphs import check_unwritten, is_written, refuse_written

__all__ = ["GradientWitness", "clear_gradients"]

# Each parameter that may have a witness -> the witness, held weakly.
_witnesses: Any = WeakIdKeyDictionary()


class GradientWitness:
    """Finds out whether somebody cleared the model's gradients while the masters held them.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the lowered parameters only. So xamp
    leaves a gradient of zeros, the witness, on the smallest lowered parameter. If the witness is gone, somebody cleared
    all gradients, so the masters' gradients are cleared too. If the witness has changed, somebody worked on the
    gradients of the lowered parameters instead of the masters', and that is an error.
    """

    def __init__(self, pairs: Sequence[masters.Pair]) -> None:
        self._pairs = pairs
        self._param = min((p for p, _ in pairs), key=lambda p: p.numel())
        self._left: tuple[torch.Tensor, int] | None = None
        self._asked = torch.zeros((), device=self._param.device)
        _witnesses[self._param] = weakref.ref(self)  # weak: this object holds the parameter, the key

    def leave(self) -> None:
        """Leave the zeros on the parameter. Called when the gradients have moved to the masters."""
        if self._left is None:
            zeros = torch.zeros_like(self._param)
            self._param.grad = zeros
            self._left = (zeros, zeros._version)

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is the witness."""
        return self._left is not None and param is self._param

    def forget(self) -> None:
        """Forget the zeros, after ``optimizer.zero_grad()``: what comes into the masters now is to be stepped."""
        self._left = None

    def renew(self) -> None:
        """Leave new zeros: ``zero_grad`` of a managed model took the old ones and has cleared its masters."""
        if self._left is not None:
            self._left = None
            self.leave()

    def check(self, call: str) -> None:
        """Drop the masters' gradients if somebody cleared the model's.

        Raises:
            StateError: somebody wrote into the model's gradients.
        """
        if self._left is None:
            return
        if not self._finds_zeros():
            self._drop()
            return
        zeros, version = self._left
        if torch.compiler.is_compiling():
            check_unwritten(self._asked, zeros, version, call)
        elif is_written(zeros, version):
            raise refuse_written(call)

    def collect(self) -> bool:
        """Before the next backward: take the zeros away again; return whether they were there, unchanged.

        Somebody may have written to the zeros. If they still are zeros, ``zero_()`` cleared the gradients, so the
        masters' are dropped. If not, a backward without ``scale_loss`` added to them, and its gradients stay.
        """
        if self._left is None:
            return False
        if not self._finds_zeros():
            self._drop()
            return False
        zeros, version = self._left
        if zeros._version != version:
            others = (p.grad for p, _ in self._pairs if p is not self._param)
            if not bool(zeros.any()) and all(g is None for g in others):
                self._param.grad = None
                self._drop()
            self._left = None
            return False
        self._left = None  # first: an interrupt after the next line would look as if somebody had cleared the gradients
        self._param.grad = None
        return True

    def _finds_zeros(self) -> bool:
        """Look for the zeros; a copy of them that a wrapper has put in their place becomes the witness.

        DDP with ``gradient_as_bucket_view`` lays its buckets out anew in the second forward, and replaces each gradient
        that there is by a copy in a bucket. Who clears gradients leaves none, or writes into the zeros.
        """
        assert self._left is not None
        zeros, version = self._left
        grad = self._param.grad
        if grad is zeros:
            return True
        if grad is None or torch.compiler.is_compiling() or zeros._version != version or not grad._is_view():
            return False
        # A backward() without scale_loss, after all were cleared, leaves gradients on the others too.
        if any(p.grad is not None for p, _ in self._pairs if p is not self._param) or bool(grad.any()):
            return False
        self._left = (grad, grad._version)
        return True

    def _drop(self) -> None:
        for _, master in self._pairs:
            master.grad = None
        self._left = None  # last: after an interrupt the next call sees again that the gradients were cleared


def clear_gradients(model: nn.Module) -> None:
    """Clear the gradients of the masters of ``model``'s parameters."""
    for param in model.parameters() if masters.any_lowered() else ():
        master = masters.master_of(param)
        if master is not None:
            master.grad = None
        found = _witnesses.get(param)
        witness = None if found is None else found()
        if witness is not None:
            witness.renew()
