"""What the plugins for Lightning's Trainer and for Fabric share."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from xamp.errors import PolicyError
from xamp.policy import Level, Request, parse_level
from xamp.sessions.clipping import master_params
from xamp.sessions.initialize import initialize

__all__ = ["Plugin"]


class Plugin:
    """What both plugins share: the level, the other settings, and the name that Lightning has for it."""

    def __init__(self, level: str = Request.level, **settings: Any) -> None:
        known = inspect.signature(initialize).parameters
        unknown = [name for name in settings if name not in known or name in ("models", "optimizers")]
        if unknown:
            raise PolicyError(
                f"{type(self).__name__}({unknown[0]}=...): no such setting. It takes the arguments of xamp.initialize, "
                "without models and optimizers."
            )
        super().__init__()
        self.level: Level | None = parse_level(level, call=type(self).__name__)
        self.settings = {"level": level, **settings}

    @property
    def precision(self) -> str:
        """The nearest of Lightning's own names, which it shows and compares."""
        level = self.level
        if level is None or level.dtype is None:
            return "32-true"
        short = "bf16" if level.dtype == "bfloat16" else "16"
        return f"{short}-true" if level.casts_parameters else f"{short}-mixed"

    def main_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        """Iterate over what the optimizer steps: this is what is clipped."""
        return master_params(optimizer)

    @property
    def casts_parameters(self) -> bool:
        """Whether the level casts parameters."""
        return self.level is not None and self.level.casts_parameters
