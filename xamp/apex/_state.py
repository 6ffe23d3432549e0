"""What Apex keeps for the whole process: ``amp._amp_state``, which people and Apex's own tests reach into."""

from __future__ import annotations

from typing import Any

__all__ = ["AmpState", "state"]


class AmpState:
    """The state of ``xamp.apex.amp``, of the newest ``amp.initialize`` where each call has its own.

    Attributes:
        verbosity: 0 is silent, 1 tells the options and overflows, 2 every cast.
        hard_override: settings that contradict each other are taken with a warning.
        allow_incoming_model_not_fp32: models may come with fp16 or bf16 parameters.
        handle: of the casts around functions; None before the first ``init`` or ``initialize`` at O1 or O4.
        opt_properties: the settings in force; absent before the first ``initialize``.
        loss_scalers: one for each loss; absent before the first ``initialize``.
        min_loss_scale, max_loss_scale: as they were given.
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
