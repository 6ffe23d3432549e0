"""The process-wide state of Apex, ``amp._amp_state``. Scripts and Apex's own tests read and write it directly.

Scripts write ``from apex.amp._amp_state import _amp_state`` too, so this is a module of that name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xamp.registry.registry import require_torch

require_torch(__name__)

import torch
from torch.optim import Optimizer

from xamp.scaling.optimizer import lent_params
from xamp.torch_compat.compiler import eager_by_rule

__all__ = ["AmpState", "_amp_state", "master_params"]


class AmpState:
    """The state of ``xamp.apex.amp``. What differs between calls of ``amp.initialize`` is that of the newest call.

    Attributes:
        verbosity: 0 logs nothing, 1 the options and overflows, 2 every cast too.
        hard_override: accept settings that contradict each other, with a warning.
        allow_incoming_model_not_fp32: accept models with fp16 or bf16 parameters.
        handle: the newest handle of the casts around functions; None before the first ``init`` or ``initialize`` at O1
            or O4.
        opt_properties: the settings in force; absent before the first ``initialize``.
        loss_scalers: one for each loss; absent before the first ``initialize``.
        min_loss_scale, max_loss_scale: as the call gave them.
    """

    opt_properties: Any
    loss_scalers: list[Any]

    def __init__(self) -> None:
        self.verbosity = 1
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.handle: Any = None
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float | None = 2.0**24


_amp_state = AmpState()


@eager_by_rule
def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over the parameters that ``optimizer`` steps: at O2 and O5 the fp32 masters."""
    return lent_params(optimizer, "amp.master_params(optimizer)")
