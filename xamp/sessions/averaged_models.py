"""torch's ``AveragedModel`` of a model whose parameters are in low precision.

It averages tensor by tensor. Made before ``initialize``, it is fp32 and meets low-precision parameters: an error about
dtypes, or rounded values. Made after it, it is a 16-bit copy, in which small steps are lost. So a copy of low-precision
parameters becomes fp32 with the exact values as soon as it is made, and ``update_parameters`` is given exact ones too.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from xamp.casting.forward import forget_policy, is_under_policy
from xamp.distributed import ranks
from xamp.scaling import masters

__all__ = ["serve_averaged_models"]


def serve_averaged_models() -> None:
    """Wrap the two methods of ``AveragedModel`` that take a model. They stay wrapped."""
    init, update = AveragedModel.__init__, AveragedModel.update_parameters
    if hasattr(update, "_xamp_serves"):
        return

    @functools.wraps(init)
    def __init__(self: AveragedModel, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, model, *args, **kwargs)
        for copied, source in _make_fp32(self.module, model):
            copied.detach().copy_(masters.exact(source))

    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        source: Any = model
        if _make_fp32(self.module, model):  # the average may have come out of a file as a 16-bit copy
            # All that torch asks of a model: the same tensors in the same order, each with its exact values.
            source = SimpleNamespace(
                parameters=lambda: map(masters.exact, model.parameters()),
                buffers=lambda: map(masters.exact, model.buffers()),
            )
        update(self, source)

    update_parameters._xamp_serves = True  # type: ignore[attr-defined]
    AveragedModel.__init__ = __init__  # type: ignore[method-assign]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]


def _make_fp32(average: nn.Module, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make a copy of low-precision tensors fp32 and take it out of the policy; return each of these with its source.

    Nothing happens where no parameter of ``model`` is in low precision.
    """
    if not any(map(masters.is_low_precision, model.parameters())):
        return []
    own = (*average.parameters(), *average.buffers())
    sources = (*model.parameters(), *model.buffers())
    pairs = [(copied, source) for copied, source in zip(own, sources, strict=False) if masters.is_low_precision(source)]
    for copied, _ in pairs:
        if copied.dtype in masters.LOWER:
            ranks.set_data(copied, copied.detach().float())
    if any(map(is_under_policy, average.modules())):
        forget_policy(average)
    return pairs
