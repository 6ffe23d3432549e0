"""The models of one session, held weakly, and the names of their parameters for messages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from xamp.scaling.masters import Pair

__all__ = ["Models"]


class Models:
    """The models of one session.

    Args:
        models: the models, without their wrappers.
        pairs: returns all low-precision parameters and their masters.

    Attributes:
        refs: the models, weakly, in the order of the call of ``initialize``.
    """

    def __init__(self, models: Sequence[nn.Module], pairs: Callable[[], Iterable[Pair]]) -> None:
        self.refs = [weakref.ref(model) for model in models]
        self._pairs = pairs

    def alive(self) -> dict[int, nn.Module]:
        """Return the models that are still alive, by index in the call of ``initialize``."""
        return {i: model for i, ref in enumerate(self.refs) if (model := ref()) is not None}

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Return the qualified names of parameters for messages. A master has the name of its parameter."""
        names: dict[int, str] = {}
        for index, model in self.alive().items():
            prefix = f"models[{index}]." if len(self.refs) > 1 else ""
            for name, param in model.named_parameters():
                names[id(param)] = prefix + name
        names.update({id(m): names[id(p)] for p, m in self._pairs() if id(p) in names})
        return [names.get(id(p), f"a parameter of shape {tuple(p.shape)} outside the models") for p in params]
