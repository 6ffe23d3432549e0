"""How to take back what a call has changed: one list, for a call that fails and for a session that is closed.

Whoever changes something appends first how to undo it. A step of the list must do nothing where its change was not
made or is taken back already, so it can run a second time after an interrupt came in the middle of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

__all__ = ["Undo"]


class Undo:
    """The steps that undo the changes of a call, newest last.

    Attributes:
        steps: the functions that undo one change each. ``steps.append`` is Python's own, which no interrupt divides.
        preparing: functions that allocate what the steps need and change nothing; see :meth:`prepare`.
        before: values from before the changes, which only a call that fails needs. Empty once the call is done.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.preparing: list[Callable[[], object]] = []
        self.before: dict[Any, Any] = {"": "the call is not done"}

    def weakly(self, undo: Callable[..., object], *objects: object) -> None:
        """Append a step that calls ``undo(*objects)``. It does not keep them alive: where one is gone, it does nothing.

        The list of a session may live as long as what it changed, which must be freed when the user lets it go.
        """
        self.steps.append(functools.partial(_call_alive, undo, [weakref.ref(each) for each in objects]))

    def keep(self, objects: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        """Append a step that gives ``objects`` the attributes that they have now, and ``tensors`` their values."""
        attributes = [(each, dict(vars(each))) for each in objects]
        values = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self.steps.append(functools.partial(_put_back, attributes, values))

    def prepare(self) -> None:
        """Allocate the memory that the steps need. If memory runs out here, nothing has been undone."""
        for allocate in self.preparing:
            allocate()

    def unwind(self) -> None:
        """Run all steps, newest first, each a second time if it raised.

        An exception, KeyboardInterrupt included, is raised at the end. Steps that raised twice stay in the list, and
        the next call tries them again.
        """
        first: BaseException | None = None
        failed: list[Callable[[], object]] = []
        tried: Callable[[], object] | None = None
        while self.steps:
            try:
                while self.steps:
                    self.steps[-1]()
                    self.steps.pop()
            except BaseException as error:
                first = first or error
                if self.steps and self.steps[-1] is tried:
                    failed.append(self.steps.pop())
                tried = self.steps[-1] if self.steps else None
        self.steps[:] = reversed(failed)
        if first is not None:
            raise first


def _put_back(
    attributes: Iterable[tuple[object, dict[str, Any]]], values: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    for each, before in attributes:
        vars(each).update(before)
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)


def _call_alive(undo: Callable[..., object], objects: Sequence[weakref.ReferenceType[Any]]) -> None:
    found = [ref() for ref in objects]
    if all(each is not None for each in found):
        undo(*found)
