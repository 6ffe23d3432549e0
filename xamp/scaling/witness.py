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
        zeros, version = self._left
        if self._param.grad is not zeros:
            self._drop()
        elif torch.compiler.is_compiling():
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
        zeros, version = self._left
        if self._param.grad is not zeros:
            self._drop()
            return False
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
