"""A captured graph without a GPU: the aten calls of a step, run again on the same storages and without Python's part.

As with ``torch.cuda.graph``, a replay runs just the operators of the capture, reads their inputs where they lay then,
and writes their results there. Numbers that Python held are those of the capture. A read by the host is refused.
Kernels of Triton are recorded too, where it interprets them. What the host writes into its own tables is no part of a
graph.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from xamp.onepass import PointerRing

__all__ = ["GraphRecorder"]

_KERNELS = ("xamp.onepass.kernels",)

_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero")


class GraphRecorder(TorchDispatchMode):
    """Records the operators of its ``with`` block; :meth:`replay` runs them again.

    Attributes:
        calls: (operator, arguments, keyword arguments, result) of each, which all stay alive; a launch has no result.
        launches: the names of Triton's kernels, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.launches: list[str] = []
        self.is_capturing = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[GraphRecorder]:
        """Record the block."""
        self.is_capturing = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(mock.patch.object(PointerRing, "_write", _by_host(PointerRing._write)))
                for module in filter(None, map(sys.modules.get, _KERNELS)):
                    for name, kernel in vars(module).items():
                        if type(kernel).__name__ == "InterpretedFunction":
                            stack.enter_context(mock.patch.object(module, name, _Kernel(name, kernel, self)))
                yield stack.enter_context(self)
        finally:
            self.is_capturing = False

    def launch(self, name: str, kernel: Callable[..., Any], args: Any, constants: Any) -> None:
        """Run a kernel and record it."""
        with _disable_current_modes():
            kernel(*args, **constants)
        self.launches.append(name)
        self.calls.append((kernel, _kept(args), _kept(constants), None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _READS:
            raise RuntimeError(f"{name} reads the device during a capture")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, _kept(args), _kept(kwargs or {}), result))
        return result

    def names(self) -> list[str]:
        """Return the names of the operators, in order."""
        return [str(func._schema.name) for func, *_ in self.calls if hasattr(func, "_schema")]

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again."""
        for func, args, kwargs, result in self.calls:
            _write_back(result, func(*args, **kwargs))


class _Kernel:
    """A kernel of Triton in a capture."""

    def __init__(self, name: str, kernel: Any, recorder: GraphRecorder) -> None:
        self.name, self._kernel, self._recorder = name, kernel, recorder

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        run = self._kernel[grid]
        return lambda *args, **constants: self._recorder.launch(self.name, run, args, constants)

    def __call__(self, *args: Any, **constants: Any) -> Any:
        """Be called by another kernel, as a part of it."""
        return self._kernel(*args, **constants)


def _by_host(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` as something that a graph does not see."""

    def call(*args: Any) -> None:
        with _disable_current_modes():
            function(*args)

    return call


def _kept(tree: Any) -> Any:
    """Return the tree with lists of its own, for the caller may change its lists later. Storages are shared."""

    def detached(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map(detached, tree)


def _write_back(result: Any, again: Any) -> None:
    """Write the new results where those of the capture lie. Views and changes in place are there already."""
    for old, new in zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True):
        if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
