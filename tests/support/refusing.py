"""A device that lacks an operator in some dtypes: a block in which torch refuses it, as a device without the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xamp.registry import device_trials

trials: Any = device_trials

__all__ = ["Refusing"]


class Refusing(TorchDispatchMode):
    """``operator``, by its name in torch, raises for tensors of ``dtypes``, before it changes anything.

    It stands for the device, so it is there in trials too, which run outside of the caller's modes.
    """

    def __init__(self, operator: str, *dtypes: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator, self.dtypes = f"aten::{operator}", dtypes
        self.refused = 0

    def __enter__(self) -> Any:
        self._plain = plain = trials.disable_current_modes

        @contextlib.contextmanager
        def but_this() -> Iterator[None]:
            with plain():
                TorchDispatchMode.__enter__(self)
                try:
                    yield
                finally:
                    TorchDispatchMode.__exit__(self, None, None, None)

        trials.disable_current_modes = but_this
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        trials.disable_current_modes = self._plain
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == self.operator:
            found = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            for dtype in self.dtypes:
                if dtype in found:
                    self.refused += 1
                    raise NotImplementedError(f'"{self.operator}" not implemented for {dtype}')
        return func(*args, **(kwargs or {}))
