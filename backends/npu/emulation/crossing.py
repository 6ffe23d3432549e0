"""Passes tensors between an emulated card and the CPU.

The card's memory is host memory, so a kernel reads and writes it through a CPU tensor over the same bytes. New results
of a kernel are copied into memory that torch_npu allocates; so allocator, statistics and storages are the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic, limits, products, sparse, strided
from xamp.backends.npu.emulation.strided import CPU, dense
from xamp.backends.npu.emulation.torch_private import NOT_HERE, ExcludeDispatchKeyGuard

__all__ = ["CPU", "NOT_HERE", "Crossing", "aside", "computed", "dense", "give", "over"]


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """A context in which torch computes as on a plain CPU. It costs a microsecond more than its two parts by hand."""
    with torch.DisableTorchFunction(), ExcludeDispatchKeyGuard(NOT_HERE):
        yield


def over(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of ``tensor``, valid as long as ``tensor`` lives."""
    return strided.over(tensor) if tensor.layout is torch.strided else sparse.over(tensor)


def give(made: torch.Tensor, index: int) -> torch.Tensor:
    """Copy ``made``, a kernel's result on the CPU, to card ``index``, with the same strides."""
    return strided.give(made, index) if made.layout is torch.strided else sparse.give(made, index)


def computed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for operator ``name`` that calls ``function`` with CPU tensors and puts its results on the card.

    ``function`` may write to its arguments; its results must be new tensors.
    """
    narrow = products.narrowing(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with aside():
            crossing = Crossing(name)
            values = [crossing.over(value) for value in args]
            named = {key: crossing.over(value) for key, value in kwargs.items()}
            sources = arithmetic.Sources(values, named)
            if arithmetic.SATURATES:
                sources.finite()
            if narrow is not None:
                values = narrow(values, crossing.index)
            return _given(function(*values, **named), crossing.index, sources)

    return kernel


def _given(made: Any, index: int, sources: arithmetic.Sources) -> Any:
    if isinstance(made, torch.Tensor):
        arithmetic.settle(made, index, sources)
        return give(made, index)
    return tuple(_given(each, index, sources) for each in made) if isinstance(made, tuple) else made


class Crossing:
    """Converts the arguments of one call to CPU tensors, and records which card they came from."""

    __slots__ = ("index", "lenient", "name")

    def __init__(self, name: str, lenient: bool = False) -> None:
        """Start a call of operator ``name``; a lenient call may mix cards and CPU, as a copy does."""
        self.name = name
        self.lenient = lenient
        self.index = -1

    def over(self, value: Any) -> Any:
        """``value``, with each tensor of a card replaced by a CPU tensor over its memory.

        Raises:
            RuntimeError: tensors are on different devices. A card refuses that; CPU kernels would accept it.
        """
        if not isinstance(value, torch.Tensor):
            return [self.over(each) for each in value] if type(value) is list or type(value) is tuple else value
        index = value.get_device()
        if index < 0:
            if value.dim() and not self.lenient:
                self._mixed("cpu" if self.index >= 0 else None, value)
            return value
        if value.dim() > limits.MAX_DIMENSIONS:
            limits.refuse_dimensions(self.name)
        if index != self.index:
            if self.index < 0:
                self.index = index
            elif not self.lenient:
                self._mixed(f"npu:{index}", value)
        return strided.over(value) if value.layout is torch.strided else sparse.over(value)

    def _mixed(self, second: str | None, value: torch.Tensor) -> None:
        first = f"npu:{self.index}" if second else "npu:0"
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices,"
            f" {first} and {second or value.device}! (emulated Ascend, {self.name})"
        )
