"""Gradients that wait on the model's parameters, scaled and in the model's dtype, for the pass that steps the masters.

While they wait the masters have a class whose ``grad`` is a property. Whoever reads it, by whichever list of masters,
gets the unscaled fp32 gradient: all of them then move into the masters, which are plain Parameters again, and the step
reads them there. Pickles and copies are made of plain Parameters for the same reason.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from xamp import onepass
from xamp.errors import StateError
from xamp.ground import kernels

__all__ = [
    "Grads",
    "Seen",
    "Waiting",
    "cleared_in_part",
    "has_gradient",
    "is_plain",
    "mark_written",
    "never",
    "parameter_class",
    "written",
]

Pair = tuple[nn.Parameter, nn.Parameter]
Grads = Sequence["torch.Tensor | None"]

_slot: Any = torch.Tensor.grad
_get, _set = _slot.__get__, _slot.__set__
_version_of = operator.attrgetter("_version")


def written(call: str) -> StateError:
    """Return the error for gradients of the model that something besides a ``scale_loss`` has written to."""
    return StateError(
        f"{call}: there are gradients that did not come through scale_loss since the last step: a backward() "
        "ran without it, or the gradients of the model's own parameters were written to. At this level "
        "gradients are in the fp32 masters: clip and change those, with xamp.clip_grad_norm_(optimizer, "
        "max_norm) or xamp.master_params(optimizer), and run every backward() inside the with block."
    )


def cleared_in_part(call: str) -> StateError:
    """Return the error for gradients of which a part was cleared on the model's parameters."""
    return StateError(
        f"{call}: since scale_loss the gradients of a part of the model were cleared, by p.grad = None or by "
        "zero_grad() of a submodule, and at this level the fp32 masters hold the gradients. Clear those of a "
        "part inside of the with block, after backward(), and all of them with optimizer.zero_grad()."
    )


def _of_another_graph(call: str, made_in_graph: bool) -> StateError:
    """Return the error for gradients that wait on one side of a capture, and are asked for on the other."""
    why = "before the capture of this graph, whose replays would read them again: call optimizer.zero_grad() before it"
    if made_in_graph:
        why = (
            "in a graph, and with fused='one-pass' graphs hold their step too: capture scale_loss and optimizer.step() "
            "in one graph, one backward a step"
        )
    return StateError(
        f"{call or 'reading the gradient of a master'}: the gradients that are there were made {why}. With "
        "initialize(fused=False) and an optimizer made with fused=True graphs may hold any part of a step."
    )


def never() -> bool:
    """Return False: no graph is being captured."""
    return False


class _Waits(nn.Parameter):
    """Masters while their gradients wait."""


def is_plain(value: object) -> bool:
    """Return whether ``value`` is a Tensor or a Parameter and no subclass, as a master is while no gradient waits."""
    return type(value) in (torch.Tensor, nn.Parameter) or issubclass(type(value), _Waits)


def parameter_class(read: Callable[[], object], release: Callable[[nn.Parameter], object]) -> type[nn.Parameter]:
    """Return the class of masters whose gradients wait.

    Args:
        read: a bound method, held weakly, that moves all gradients into their masters.
        release: a bound method, held weakly, that clears the gradient that waits for one master.
    """
    weak_read: Any = weakref.WeakMethod(read)
    weak_release: Any = weakref.WeakMethod(release)

    def settle(master: nn.Parameter, *, cleared: bool = False) -> None:
        if cleared and (clear := weak_release()) is not None:
            clear(master)
        elif not cleared and (move := weak_read()) is not None:
            move()
        master.__class__ = nn.Parameter

    class Parameter(_Waits):
        @property
        def grad(self) -> torch.Tensor | None:
            settle(self)
            return self.grad

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            settle(self, cleared=value is None)
            self.grad = value

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

        def __deepcopy__(self, memo: Any) -> Any:
            settle(self)
            return self.__deepcopy__(memo)

        def __reduce_ex__(self, protocol: Any) -> Any:
            settle(self)
            return self.__reduce_ex__(protocol)

    Parameter.__module__, Parameter.__qualname__ = nn.Parameter.__module__, nn.Parameter.__qualname__
    return Parameter


class Waiting:
    """The gradients of one backward, which wait on low-precision parameters.

    Attributes:
        pairs: low-precision parameters and their masters.
        grads: by pair, the gradient that waits; None where there is none.
        inverse: 1/scale, a copy; None: they have no scale.
        clip: what ``clip_grad_norm_`` multiplies them by; None: 1.
        seen: what a plan has seen of them.
        in_graph: they were made in a capture: each replay makes them anew.
        whole: all that were checked still wait, so that the norm of the check is theirs.
        launch: the kernels of the step of these gradients; None before.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        grads: list[torch.Tensor | None],
        inverse: torch.Tensor | None,
        seen: Seen | None = None,
        capturing: Callable[[], bool] = never,
    ) -> None:
        self.pairs = pairs
        self.seen = Seen(None, (), checked=False) if seen is None else seen
        self.grads = grads
        self.inverse = inverse
        self.clip: torch.Tensor | None = None
        self.whole = True
        self.launch: Any = None
        self.in_graph = capturing()
        self._capturing = capturing
        self._versions = _versions(grads)
        self._made: dict[int, torch.Tensor] = {}  # by index, the gradients that have moved
        self._index: dict[int, int] = {}

    @property
    def began(self) -> bool:
        """Whether the step of these gradients was launched, or was about to be when an interrupt came."""
        return self.launch is not None and bool(self.launch.began)

    def hold(self, kind: type[nn.Parameter]) -> None:
        """Give the masters ``kind``, made by :func:`parameter_class`."""
        for (_, master), grad in zip(self.pairs, self.grads, strict=True):
            if grad is not None:
                master.__class__ = kind

    def let_go(self) -> None:
        """Make the masters plain Parameters again."""
        for _, master in self.pairs:
            master.__class__ = nn.Parameter

    # ---------------------------------------------------------------- what became of them since

    def settle(self, call: str) -> bool:
        """Take in what happened to the gradients on the model; return whether any is left.

        Args:
            call: what asks, for messages. Empty: somebody reads a master's gradient.

        Raises:
            StateError: somebody wrote into them; or, if ``call`` is given, cleared a part of them; or a graph has a
                part in this that it cannot replay.
        """
        if self._capturing() != self.in_graph or (self.in_graph and call == "scale_loss"):
            if all(
                param.grad is not grad
                for (param, _), grad in zip(self.pairs, self.grads, strict=True)
                if grad is not None
            ):
                return False
            raise _of_another_graph(call, self.in_graph)
        now = [param.grad for param, _ in self.pairs]
        if all(map(operator.is_, now, self.grads)) and _versions(self.grads) == self._versions and not self._made:
            return True
        held = [i for i, grad in enumerate(self.grads) if grad is not None and i not in self._made]
        others = [i for i, grad in enumerate(now) if grad is not None and grad is not self.grads[i]]
        gone = [i for i in held if now[i] is not self.grads[i]]
        if len(gone) == len(held) and not self._made:
            return False  # what others there are came later
        self._refuse_written(call, [i for i in held if now[i] is self.grads[i]], others)
        if self._are_zeroed(call):
            return False
        if gone and call:
            raise cleared_in_part(call)
        for i in gone:
            self._forget(i)
        return True

    def _refuse_written(self, call: str, held: Sequence[int], others: Sequence[int]) -> None:
        moved = [i for i in held if self.grads[i]._version != self._versions[i]]  # type: ignore[union-attr]
        if others or (moved and not self._are_zeroed(call)):
            raise written(call or "reading the gradient of a master")

    def _are_zeroed(self, call: str) -> bool:
        """Return whether all were written to and are zeros now: ``zero_()`` clears them, for the next backward."""
        pairs = [(g, v) for g, v in zip(self.grads, self._versions, strict=True) if g is not None]
        if call not in ("", "scale_loss") or any(g._version == v for g, v in pairs):
            return False
        return bool(pairs) and not any(bool(g.any()) for g, _ in pairs)

    def release(self, master: nn.Parameter) -> bool:
        """Clear the gradient that waits for ``master``; return whether another is left."""
        if not self._index:
            self._index = {id(m): i for i, (_, m) in enumerate(self.pairs)}
        if (index := self._index.get(id(master))) is not None:
            param = self.pairs[index][0]
            if self.grads[index] is not None and param.grad is self.grads[index]:
                param.grad = None
            self._forget(index)
        return any(grad is not None for grad in self.grads)

    def _forget(self, index: int) -> None:
        self.grads[index] = None
        self._versions[index] = -1
        self.whole = False

    def clear(self) -> None:
        """Clear them all on the model's parameters, but not what has come there since."""
        for (param, _), grad in zip(self.pairs, self.grads, strict=True):
            if grad is not None and param.grad is grad:
                param.grad = None

    def follow(self) -> None:
        """Take what is on the model now in the place of the gradients that were there when they began to wait."""
        pairs = zip(self.pairs, self.grads, strict=True)
        self.grads = [None if grad is None else param.grad for (param, _), grad in pairs]

    def by_master(self) -> dict[int, torch.Tensor]:
        """Return the gradients by the ids of their masters."""
        found = zip(self.pairs, self.grads, strict=True)
        return {id(master): grad for (_, master), grad in found if grad is not None}

    # ---------------------------------------------------------------- into the masters

    def move(self, limit: float) -> None:
        """Give the masters unscaled fp32 gradients, and free the others, chunk by chunk of ``limit`` elements.

        After an interrupt it runs again, and goes on where it was.
        """
        with torch.no_grad():
            for chunk in self._chunks(limit):
                self._move(chunk)

    def _chunks(self, limit: float) -> Iterator[list[int]]:
        chunk: list[int] = []
        size = 0
        for index, grad in enumerate(self.grads):
            if grad is None:
                continue
            chunk.append(index)
            size += grad.numel()
            if size >= limit:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def _move(self, chunk: Sequence[int]) -> None:
        new = [i for i in chunk if i not in self._made]
        if new:
            full = [torch.empty_like(self.pairs[i][1]) for i in new]
            kernels.copy_(full, [self.grads[i] for i in new])  # type: ignore[misc]
            for factor in (self.inverse, self.clip):
                if factor is not None:
                    kernels.multiply_(full, factor)
            self._made.update(zip(new, full, strict=True))
        for index in chunk:
            param, master = self.pairs[index]
            made, before = self._made[index], _get(master)
            if before is not made:  # autograd may have added to it, in a graph of the masters themselves
                _set(master, made if before is None else made.add_(before))
            if param.grad is self.grads[index]:
                param.grad = None
            self.grads[index] = None


class Seen:
    """What a plan has seen of gradients that wait, and whether it is still true.

    Args:
        plan: the plan, which takes all of these gradients; None: there is none.
        direct: the gradients of parameters without a master. Others read and write them on the model.
        checked: the plan has checked them, and keeps the sum of their squares.
    """

    def __init__(self, plan: onepass.Plan | None, direct: Grads, checked: bool) -> None:
        self.plan = plan
        self._direct, self._versions, self._checked = direct, _versions(direct), checked

    def suits(self, plan: onepass.Plan, direct: Grads) -> bool:
        """Return whether ``plan`` is known to take the gradients that wait and ``direct``."""
        return plan is self.plan and all(map(operator.is_, direct, self._direct))

    def norm(self, direct: Grads, inverse: torch.Tensor | None) -> torch.Tensor | None:
        """Return the L2 norm by the check, if all still wait; None where ``direct`` are not what was checked."""
        if self.plan is None or not self._checked or not self.suits(self.plan, direct):
            return None
        return self.plan.checked_norm(inverse) if _versions(direct) == self._versions else None


def mark_written(grads: Grads) -> None:
    """Tell autograd that a kernel has written into ``grads``."""
    torch.autograd.graph.increment_version([g for g in grads if g is not None and not g.is_inference()])


def has_gradient(master: torch.Tensor) -> bool:
    """Return whether ``master`` itself has a gradient, whatever waits for it."""
    return _get(master) is not None


def _versions(grads: Grads) -> list[int]:
    return [-1 if grad is None else grad._version for grad in grads]
