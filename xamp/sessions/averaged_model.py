"""Lets ``torch.optim.swa_utils.AveragedModel`` average a model whose parameters are cast.

torch averages tensor by tensor. An average made before ``initialize`` is fp32 and meets lowered parameters: an error
about dtypes, or rounded values. One made after it is a 16-bit copy, in which small steps are lost. Either way
``update_parameters`` is given the exact values here, and a copy of lowered parameters becomes fp32 at the first update.
Averages of other models are torch's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from xamp.casting.forward import forget_policy, is_under_policy
from xamp.scaling import masters, shards

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
    """Put the function described above in the place of ``AveragedModel.update_parameters``. It stays there."""
    if not hasattr(AveragedModel.update_parameters, "_xamp_serves"):
        AveragedModel.update_parameters = _serving(AveragedModel.update_parameters)  # type: ignore[method-assign,assignment]


def _serving(update: Callable[[AveragedModel, Any], None]) -> Callable[[AveragedModel, nn.Module], None]:
    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if not any(masters.is_lowered(param) for param in model.parameters()):
            return update(self, model)
        _make_fp32(self.module, model)
        return update(self, _Exact(model))

    update_parameters._xamp_serves = True  # type: ignore[attr-defined]
    return update_parameters


def _make_fp32(average: nn.Module, model: nn.Module) -> None:
    """Make a copy of lowered parameters and buffers fp32, and take it out of the policy, which is for lowered ones."""
    own = (*average.parameters(), *average.buffers())
    sources = (*model.parameters(), *model.buffers())
    for copied, source in zip(own, sources, strict=False):
        if copied.dtype in masters.LOWER and masters.is_lowered(source):
            shards.set_data(copied, copied.detach().float())
    if any(is_under_policy(module) for module in average.modules()):
        forget_policy(average)
