"""The rows of the table that this torch has, and sample calls of them.

The calls show what a device does and test what the table promises. Each calls the overload itself, so that the autocast
entry of that overload gets the call. Training never uses them.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from xamp.casting.ops.calls import CALLS, Make, Maker
from xamp.casting.ops.table import RULES, Rule
from xamp.ground.torch_private.dispatch import OpOverload, has_kernel

__all__ = ["HERE", "Call", "Sample", "exists", "operator", "samples"]


def exists(overload: str) -> bool:
    """Whether this torch has ``overload``; ``"mm"`` stands for the default one."""
    return has_kernel(f"aten::{overload}")


HERE: Mapping[str, Rule] = types.MappingProxyType({name: rule for name, rule in RULES.items() if exists(name)})
"""The rows of the table whose overloads this torch has: an older one lacks operators that a newer one brought."""


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


def operator(overload: str) -> OpOverload[..., Any]:
    """Return the operator overload of that name: ``torch.ops.aten.softmax.int`` for ``"softmax.int"``."""
    packet, _, name = overload.partition(".")
    return getattr(getattr(torch.ops.aten, packet), name or "default")  # type: ignore[no-any-return]


def samples(overload: str) -> tuple[Sample, ...]:
    """Return the sample calls of ``overload``, a name in the table.

    An overload with a ``dtype`` argument is called both without it and with it.
    """
    plain = tuple(Sample(overload, make) for make in CALLS[overload])
    if all(argument.name != "dtype" for argument in operator(overload)._schema.arguments):
        return plain
    return (*plain, *(dataclasses.replace(sample, names_dtype=True) for sample in plain))
