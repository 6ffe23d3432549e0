"""The witness: a gradient of zeros on a lowered parameter, by which xamp sees that somebody cleared the gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import StateError
from xamp.ground.compiler import break_graphs
from xamp.ground.torch_features import has_operators_outside_of_captures
from xamp.scaling import masters

__all__ = ["GradientWitness", "check_unwritten", "clear_gradients", "is_written", "refuse_written"]

_SMALL = 2**16
"""The most elements of a parameter that gets a second witness: one that large takes 128 KiB."""

# Each parameter that may have a witness -> the witness, held weakly.
_witnesses: Any = WeakIdKeyDictionary()


class GradientWitness:
    """Finds out whether somebody cleared the model's gradients while the masters held them.

    ``ddp.zero_grad()`` and ``for p in model.parameters(): p.grad = None`` reach the lowered parameters only. So xamp
    leaves a gradient of zeros, the witness, on the smallest lowered parameter. If the witness is gone, somebody cleared
    all gradients, so the masters' gradients are cleared too. If the witness has changed, somebody worked on the
    gradients of the lowered parameters instead of the masters', and that is an error.

    A second one, on a parameter elsewhere in the model, tells whether it was all or a part. Of a part nobody knows
    which, so that is an error too. Compiled code does without the second.
    """

    def __init__(self, pairs: Sequence[masters.Pair]) -> None:
        self._pairs = pairs
        self._param = min((p for p, _ in pairs), key=torch.Tensor.numel)
        self._left: tuple[torch.Tensor, int] | None = None
        self._second = _elsewhere(pairs, self._param)
        self._left_there: tuple[torch.Tensor, int] | None = None
        self._asked = torch.zeros((), dtype=torch.float32, device=self._param.device)
        for param in (self._param, self._second):
            if param is not None:
                _witnesses[param] = weakref.ref(self)  # weak: this object holds the parameter, the key

    def leave(self) -> None:
        """Leave the zeros on the parameters. Called when the gradients have moved to the masters."""
        if self._left is None:
            zeros = torch.zeros_like(self._param)
            self._param.grad = zeros
            if self._second is not None and not torch.compiler.is_compiling():
                there = torch.zeros_like(self._second)
                self._second.grad = there
                self._left_there = (there, there._version)
            self._left = (zeros, zeros._version)

    def holds(self, param: torch.Tensor) -> bool:
        """Return whether the gradient of ``param`` is the witness."""
        return self._left is not None and (
            param is self._param or (param is self._second and self._left_there is not None)
        )

    def forget(self) -> None:
        """Forget the zeros, after ``optimizer.zero_grad()``: what comes into the masters now is to be stepped."""
        self._left = self._left_there = None

    def renew(self) -> None:
        """Leave new zeros: ``zero_grad`` of a managed model took the old ones and has cleared its masters."""
        if self._left is not None:
            self._left = None
            self.leave()

    def check(self, call: str) -> None:
        """Drop the masters' gradients if somebody cleared the model's.

        Raises:
            StateError: somebody wrote into the model's gradients, or cleared those of a part of it.
        """
        if self._left is None:
            return
        cleared = not self._finds_zeros()
        self._refuse_part(cleared, call)
        if cleared:
            self._drop()
            return
        zeros, version = self._left
        if torch.compiler.is_compiling():
            check_unwritten(self._asked, zeros, version, call)
        elif is_written(zeros, version) or (self._left_there is not None and is_written(*self._left_there)):
            raise refuse_written(call)

    def collect(self, call: str = "") -> bool:
        """Before the next backward: take the zeros away again; return whether they were there, unchanged.

        Somebody may have written to the zeros. If they still are zeros, ``zero_()`` cleared the gradients, so the
        masters' are dropped. If not, a backward without ``scale_loss`` added to them, and its gradients stay.

        Args:
            call: what asks, for messages. Empty: it does not matter whether a part was cleared.

        Raises:
            StateError: somebody cleared the gradients of a part of the model.
        """
        if self._left is None:
            return False
        cleared = not self._finds_zeros()
        if call:
            self._refuse_part(cleared, call)
        if cleared:
            self._drop()
            return False
        zeros, version = self._left
        if zeros._version != version:
            if not bool(zeros.any()) and not self._any_besides():
                self._param.grad = None
                self._drop()
            else:
                self._take_second()
            self._left = None
            return False
        self._left = None  # first: an interrupt after the next line would look as if somebody had cleared the gradients
        self._take_second()
        self._param.grad = None
        return True

    def _any_besides(self) -> bool:
        """Return whether there are gradients besides the witnesses; one that a backward added to counts as one."""
        added = self._left_there is not None and self._has_more_in_second()
        return added or any(p.grad is not None for p, _ in self._pairs if not self.holds(p))

    def _has_more_in_second(self) -> bool:
        """Return whether somebody wrote numbers into the second zeros."""
        assert self._left_there is not None
        zeros, version = self._left_there
        return is_written(zeros, version) and bool(zeros.any())

    def _refuse_part(self, cleared: bool, call: str) -> None:
        """Raise where one witness was ``cleared`` and the other was not; a backward that came later hides that."""
        if self._left_there is None or torch.compiler.is_compiling() or self._any_besides():
            return
        assert self._second is not None
        if cleared != (self._second.grad is None):
            raise StateError(
                f"{call}: since scale_loss the gradients of a part of the model were cleared, by p.grad = None or by "
                "zero_grad() of a submodule, and at this level the fp32 masters hold the gradients. Clear those of a "
                "part inside of the with block, after backward(), and all of them with optimizer.zero_grad()."
            )

    def _take_second(self) -> None:
        """Take the second zeros away, or the copy of them that a wrapper has made; not what a backward has left."""
        if self._left_there is not None and self._second is not None:
            zeros, grad = self._left_there[0], self._second.grad
            is_copy = grad is not None and grad is not zeros and grad._is_view() and not bool(grad.any())
            if is_copy or (grad is zeros and not self._has_more_in_second()):
                self._second.grad = None
        self._left_there = None

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
        if self._any_besides() or bool(grad.any()):
            return False
        self._left = (grad, grad._version)
        return True

    def _drop(self) -> None:
        for _, master in self._pairs:
            master.grad = None
        self._take_second()
        self._left = None  # last: after an interrupt the next call sees again that the gradients were cleared


def _elsewhere(pairs: Sequence[masters.Pair], param: torch.Tensor) -> nn.Parameter | None:
    """Return the smallest parameter in the half of ``pairs`` without ``param``; None where all are large there."""
    half = len(pairs) // 2
    first, last = [p for p, _ in pairs[:half]], [p for p, _ in pairs[half:]]
    others = first if any(p is param for p in last) else last
    found = min(others, key=torch.Tensor.numel, default=None)
    return None if found is None or found.numel() > _SMALL else found


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


# ---------------------------------------------------------------- whether somebody wrote, asked in compiled code too

_SCHEMA = "(Tensor(a!) asked, Tensor tensor, int version, str call) -> ()"
_made: list[object] = []


def refuse_written(call: str) -> StateError:
    """Return the error of ``call`` where somebody wrote into the gradients of lowered parameters."""
    return StateError(
        f"{call}: there are gradients that did not come through scale_loss since the last step: a backward() "
        "ran without it, or the gradients of the model's own parameters were written to. At this level "
        "gradients are in the fp32 masters: clip and change those, with xamp.clip_grad_norm_(optimizer, "
        "max_norm) or xamp.master_params(optimizer), and run every backward() inside the with block."
    )


def is_written(tensor: torch.Tensor, version: int) -> bool:
    """Return whether somebody wrote into ``tensor`` since it had ``version``."""
    return tensor._version != version


def _make() -> None:
    """Register the operator, at the first trace that calls it."""
    if _made:
        return

    def check(asked: torch.Tensor, tensor: torch.Tensor, version: int, call: str) -> None:
        del asked  # see check_unwritten
        if is_written(tensor, version):
            raise refuse_written(call)

    made = torch.library.custom_op(
        "xamp::check_unwritten", check, mutates_args=("asked",), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,)
    )
    made.register_fake(lambda *_: None)
    _made.append(made)


_make._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler runs it while it traces


def check_unwritten(asked: torch.Tensor, tensor: torch.Tensor, version: int, call: str) -> None:
    """Raise where somebody wrote into ``tensor`` since it had ``version``; for code that is being compiled.

    Args:
        asked: any tensor that is of no other use. The operator says that it writes there, so that no compiler takes it
            for one without effect.
        tensor: the tensor.
        version: its version.
        call: for the message.

    Raises:
        StateError: somebody wrote into it.
    """
    if has_operators_outside_of_captures():
        _make()
        torch.ops.xamp.check_unwritten(asked, tensor, version, call)
    else:
        _check_outside(tensor, version, call)


@break_graphs("an operator of this torch cannot say that no CUDA graph may hold it")
def _check_outside(tensor: torch.Tensor, version: int, call: str) -> None:
    if is_written(tensor, version):
        raise refuse_written(call)
