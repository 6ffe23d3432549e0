"""The process-wide state of Apex, ``amp._amp_state``. Scripts and Apex's own tests read and write it directly."""

from __future__ import annotations

from typing import Any

__all__ = ["AmpState", "state"]


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


state = AmpState()
