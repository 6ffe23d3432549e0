"""Faults put into a call of xamp at every point: at a line of its source, at an operator, for want of memory.

After an exception the rule is: training goes on as that of a fresh session into which the states of model, optimizer
and session were loaded that are taken then. :func:`go_on` asks that. One warning tells what was lost, where something
was. :class:`Fault` counts the points of one kind that are reached in a block, and raises at the n-th::

    with Fault("line") as fault:
        call()                      # raises nothing: how many points are there?
    for n in range(fault.points):
        with Fault("line", n):
            call()                  # raises KeyboardInterrupt at point n
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.errors import StateError
from xamp.scaling.optimizer import managed_by

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

    Args:
        kind: one of :data:`KINDS`.
        n: the point.
        keeps: keep the exception, whose traceback holds every object of the call.

    Attributes:
        error: the exception, if it is kept.
        points: the points that were reached, up to the one that raised.
        seen: where they are: lines, or names of operators.
        raised: whether the fault was put in.
    """

    def __init__(self, kind: str, n: int | None = None, *, keeps: bool = False) -> None:
        self._kind = kind
        self._n = n
        self._keeps = keeps
        self.error: BaseException | None = None
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        self.error = error if self._keeps else None
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
        n
        for n in ends_of(seen)
        if "/xamp/plans/" in seen[n] or seen[n].rpartition(":")[0].endswith(("/one_pass.py", "/held.py"))
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


# ---------------------------------------------------------------- the rule


class Training:
    """A model with its optimizer, which trains. A test says how they are put under xamp, and what an iteration is."""

    model: Any
    optimizer: Any

    def window(self, micro: int) -> None:
        """Clear the gradients and run ``micro`` backwards."""
        raise NotImplementedError

    def step(self) -> None:
        """End the window."""
        self.optimizer.step()

    def fresh(self) -> Any:
        """Make another one of the same kind, before its first step."""
        raise NotImplementedError

    def states(self) -> list[Any]:
        """Return the states from which a run goes on exactly."""
        return [self.model.state_dict(), self.optimizer.state_dict(), xamp.state_dict(self.optimizer)]

    def load(self, states: list[Any]) -> None:
        """Load what :meth:`states` has returned."""
        self.model.load_state_dict(states[0])
        self.optimizer.load_state_dict(states[1])
        xamp.load_state_dict(states[2], self.optimizer)

    def is_marked(self) -> bool:
        """Return whether an exception has ended a part of xamp that writes, and nothing has repaired that yet."""
        own = managed_by(self.optimizer)
        return own is not None and own.engine.mark.is_set()


def go_on(run: Training, put_in: Fault | None = None, *, micro: int = 1, steps: int = 3) -> None:
    """Train on beside a fresh run into which the states of ``run`` were loaded, and compare both, bit for bit.

    Args:
        run: the run.
        put_in: the fault that it has met.
        micro: how many backwards the window has that the user runs again.
        steps: how many windows of one backward follow.
    """
    marked = run.is_marked()
    with warnings_of_repairs() as told:
        if put_in is not None and put_in.error is not None:  # a traceback may hold a block that is still open
            with contextlib.suppress(StateError):  # once
                run.window(micro)
        states = copy.deepcopy(run.states())
    assert len(told) == marked, told
    twin = run.fresh()
    twin.load(states)
    with warnings_of_repairs() as told:
        for each in (run, twin):
            for count in (micro, *(1 for _ in range(steps))):
                each.window(count)
                each.step()
    assert told == []
    found, wanted = (flat([*each.states(), list(each.model.parameters())]) for each in (run, twin))
    assert found == wanted, "otherwise than from the states that were taken"
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def flat(state: Any) -> Any:
    """Return ``state`` with lists of numbers, and their dtypes, in the place of tensors."""
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [flat(value) for value in state]
    return (str(state.dtype), state.tolist()) if isinstance(state, torch.Tensor) else state


@contextlib.contextmanager
def warnings_of_repairs() -> Iterator[list[str]]:
    """Collect what is logged about calls that an exception has ended."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "was ended by an exception" in record.getMessage())
    logger = logging.getLogger("xamp")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)
