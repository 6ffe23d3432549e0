"""Sample calls of the rows of the table of operators.

The calls show what a device does and test what the table promises. Each calls the overload itself, so that the autocast
entry of that overload gets the call. Training never uses them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from xamp.casting.ops.parts import operator
from xamp.op_dtypes.calls import CALLS, Make, Maker

__all__ = ["Call", "Sample", "samples"]


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @functools.cached_property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The floating tensors among the arguments and in lists among them, in order."""
        tensors = []
        for value in (*self.args, *self.kwargs.values()):
            tensors += [t for t in (value if isinstance(value, list) else [value]) if isinstance(t, torch.Tensor)]
        return tuple(t for t in tensors if t.is_floating_point())


@dataclasses.dataclass(frozen=True)
class Sample:
    """One way to call an overload.

    Attributes:
        overload: Its name in the table.
        make: Makes the arguments, from a :class:`Maker`.
        names_dtype: Whether the call passes a ``dtype`` for its result: the first one given.
    """

    overload: str
    make: Make
    names_dtype: bool = False

    def __str__(self) -> str:
        return f"{self.overload}, dtype named" if self.names_dtype else self.overload

    def call(self, device: torch.device | str, *given: torch.dtype, grad: bool = True, values: bool = True) -> Call:
        """Return the arguments on ``device``, with floating tensors of the dtypes ``given``, in turn.

        A tensor requires a gradient where the operator is differentiable in it, unless ``grad`` is False. Without
        ``values`` the tensors are empty, as fake ones are.
        """
        return Call(self.make(Maker(device, given, grad, values)), {"dtype": given[0]} if self.names_dtype else {})


def samples(overload: str) -> tuple[Sample, ...]:
    """Return the sample calls of ``overload``, a name in the table.

    An overload with a ``dtype`` argument is called both without it and with it.
    """
    plain = tuple(Sample(overload, make) for make in CALLS[overload])
    if all(argument.name != "dtype" for argument in operator(overload)._schema.arguments):
        return plain
    return (*plain, *(dataclasses.replace(sample, names_dtype=True) for sample in plain))
