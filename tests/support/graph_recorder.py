"""A captured graph without a GPU: the aten calls of a step, run again on the same storages and without Python's part.

As with ``torch.cuda.graph``, a replay runs just the operators of the capture, reads their inputs where they lay then,
and writes their results there. Numbers that Python held are those of the capture. A read by the host is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GraphRecorder"]

_READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::item", "aten::equal", "aten::nonzero")


class GraphRecorder(TorchDispatchMode):
    """Records the operators of its ``with`` block; :meth:`replay` runs them again.

    Attributes:
        calls: (operator, arguments, keyword arguments, result) of each, which all stay alive.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.is_capturing = False

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record the block."""
        self.is_capturing = True
        try:
            with self:
                yield
        finally:
            self.is_capturing = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in _READS:
            raise RuntimeError(f"{name} reads the device during a capture")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, _kept(args), _kept(kwargs or {}), result))
        return result

    def names(self) -> list[str]:
        """Return the names of the operators, in order."""
        return [str(func._schema.name) for func, *_ in self.calls]

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again."""
        for func, args, kwargs, result in self.calls:
            _write_back(result, func(*args, **kwargs))


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
