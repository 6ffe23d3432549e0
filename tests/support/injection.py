"""Faults put into a call of xamp at every point: at a line of its source, at an operator, for want of memory.

:class:`Fault` counts the points of one kind that are reached in a block, and raises at the n-th::

    with Fault("line") as fault:
        call()                      # raises nothing: how many points are there?
    for n in range(fault.points):
        with Fault("line", n):
            call()                  # raises KeyboardInterrupt at point n
"""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xamp

KINDS = ("line", "operator", "memory")
"""``"line"``: KeyboardInterrupt at a line of xamp's own source. ``"operator"``: an error in place of one aten call.
``"memory"``: from some point on, no operator can allocate."""

_ROOTS = tuple(
    str(path) for path in (Path(xamp.__file__).parent, Path(xamp.__file__).resolve().parents[1] / "backends")
)
_ON_DEVICE = ("/xamp/onepass/kernels.py",)
"""Triton's interpreter runs their lines, where nothing interrupts a kernel that a card runs."""
_OTHERS = (
    *("torch/optim/", "torch/autograd/"),  # what torch leaves half done there, it leaves without xamp too
    "triton/runtime/",  # the interpreter copies what a kernel is given, where a card reads it in place
)


class Fault:
    """Raises at the n-th point of a kind that the block reaches; None counts them only.

    Attributes:
        points: the points that were reached, up to the one that raised.
        seen: where they are: lines, or names of operators.
        raised: whether the fault was put in.
    """

    def __init__(self, kind: str, n: int | None = None) -> None:
        self._kind = kind
        self._n = n
        self.points = 0
        self.seen: list[str] = []
        self.raised = False
        self._mode: Any = _Operators(self)
        self._lines: dict[int, int] = {}  # the line that each frame is at

    def __enter__(self) -> Fault:
        if self._kind == "line":
            self._tracer = sys.gettrace()
            sys.settrace(self._trace)
        else:
            self._mode.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._kind == "line":
            sys.settrace(self._tracer)
        else:
            self._mode.__exit__(None, None, None)
        return self.raised and kind is not None and issubclass(kind, (KeyboardInterrupt, torch.OutOfMemoryError))

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(_ROOTS) or file.endswith(_ON_DEVICE):
            return None
        before = self._lines.pop(id(frame), 0)
        if event != "return":
            self._lines[id(frame)] = frame.f_lineno
        if event == "line" and not _leaves_a_block(frame, before):
            self.reach(f"{file}:{frame.f_lineno}")
        return self._trace

    def reach(self, where: str) -> None:
        point, self.points = self.points, self.points + 1
        if self._n is None:
            self.seen.append(where)
        if self._n is None or point < self._n or (self.raised and self._kind != "memory"):
            return
        self.raised = True
        raise KeyboardInterrupt if self._kind == "line" else torch.OutOfMemoryError("put in by a test")

    def sees(self, operator: Any) -> bool:
        """Whether an operator is a point, which no operator of :data:`_OTHERS` is; for memory one that allocates."""
        if self._kind == "memory" and (operator._schema.is_mutable or operator.is_view):
            return False
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if any(part in frame.f_code.co_filename for part in _OTHERS):
                return False
            frame = frame.f_back
        return True


def ends_of(seen: list[str]) -> list[int]:
    """The first and the last time that each line was reached."""
    last = {where: n for n, where in enumerate(seen)}
    first = {where: len(seen) - 1 - n for n, where in enumerate(reversed(seen))}
    return sorted({*first.values(), *last.values()})


def in_one_pass(seen: list[str]) -> list[int]:
    """The first and the last time that each line was reached of the modules that step in one pass."""
    return [
        n for n in ends_of(seen) if "/xamp/plans/" in seen[n] or seen[n].rpartition(":")[0].endswith("/one_pass.py")
    ]


def _leaves_a_block(frame: types.FrameType, before: int) -> bool:
    """Whether the frame is back at a ``with`` that it leaves. No signal comes between the block and its ``__exit__``.

    An exception put in there would leave locks held for ever, for all other threads.
    """
    file = frame.f_code.co_filename
    return before > frame.f_lineno and linecache.getline(file, frame.f_lineno).lstrip().startswith("with ")


class _Operators(TorchDispatchMode):
    def __init__(self, fault: Fault) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fault = fault

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._fault.sees(func):
            self._fault.reach(str(func))
        return func(*args, **(kwargs or {}))
