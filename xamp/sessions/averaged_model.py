"""Lets ``torch.optim.swa_utils.AveragedModel`` average a model whose parameters are cast.

torch averages tensor by tensor. An average made before ``initialize`` is fp32 and meets lowered parameters: an error
about dtypes, or rounded values. One made after it is a 16-bit copy, in which small steps are lost, and what is loaded.
So a copy of lowered parameters becomes fp32 as soon as it is made, with the exact values, and ``update_parameters`` is
given the exact values. Averages of other models are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from xamp.casting.forward import forget_policy, is_under_policy
from xamp.scaling import masters, ranks

__all__ = ["serve_averaged_models"]


class _Exact:
    """Stands for a managed model: the same tensors in the same order, each with its exact values."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (masters.exact(param) for param in self._model.parameters())

    def buffers(self) -> Iterator[torch.Tensor]:
        return (masters.exact(buffer) for buffer in self._model.buffers())


def serve_averaged_models() -> None:
    """Wrap the two methods of ``AveragedModel`` that take a model. They stay wrapped."""
    if not hasattr(AveragedModel.update_parameters, "_xamp_serves"):
        AveragedModel.__init__ = _making(AveragedModel.__init__)  # type: ignore[method-assign]
        AveragedModel.update_parameters = _serving(AveragedModel.update_parameters)  # type: ignore[method-assign,assignment]


def _making(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, model, *args, **kwargs)
        if any(masters.is_lowered(param) for param in model.parameters()):
            _make_fp32(self.module, model)
            for copied, source in _pairs(self.module, model):
                copied.detach().copy_(masters.exact(source))

    return __init__


def _serving(update: Callable[[AveragedModel, Any], None]) -> Callable[[AveragedModel, nn.Module], None]:
    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if not any(masters.is_lowered(param) for param in model.parameters()):
            return update(self, model)
        _make_fp32(self.module, model)  # it may come out of a file as a 16-bit copy
        return update(self, _Exact(model))

    update_parameters._xamp_serves = True  # type: ignore[attr-defined]
    return update_parameters


def _make_fp32(average: nn.Module, model: nn.Module) -> None:
    """Make a copy of lowered parameters and buffers fp32, and take it out of the policy, which is for lowered ones."""
    for copied, _ in _pairs(average, model):
        if copied.dtype in masters.LOWER:
            ranks.set_data(copied, copied.detach().float())
    if any(is_under_policy(module) for module in average.modules()):
        forget_policy(average)


def _pairs(average: nn.Module, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor of a copy whose source is lowered, and its source."""
    own = (*average.parameters(), *average.buffers())
    sources = (*model.parameters(), *model.buffers())
    return ((copied, source) for copied, source in zip(own, sources, strict=False) if masters.is_lowered(source))
