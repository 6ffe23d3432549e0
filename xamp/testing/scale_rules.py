"""The reference of tier scaling: the rule of a dynamic loss scale, and sequences of overflows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["Rule", "overflows"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule of a dynamic loss scale, computed on the host and rounded to fp32 as on the device.

    Attributes:
        start, growth, backoff, interval, floor, ceiling: Short names for the arguments in :attr:`options`.
    """

    start: float = 64.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``initialize``."""
        return {
            "init_scale": self.start,
            "growth_factor": self.growth,
            "backoff_factor": self.backoff,
            "growth_interval": self.interval,
            "min_loss_scale": self.floor,
            "max_loss_scale": self.ceiling,
        }

    def scales(self, spoilt: Iterable[bool]) -> Iterator[float]:
        """Yield the scale after each update; an item of ``spoilt`` says whether that update found an overflow."""
        scale, clean = min(max(self.start, self.floor), self.ceiling), 0
        for overflow in spoilt:
            clean = 0 if overflow else clean + 1
            if overflow:
                scale = max(_fp32(scale * self.backoff), self.floor)
            elif clean == self.interval:
                scale, clean = min(_fp32(scale * self.growth), self.ceiling), 0
            yield scale


def overflows(count: int, share: float = 0.15, seed: int = 0) -> list[bool]:
    """Say for each of ``count`` iterations whether it overflows: a random ``share`` of them, some in a row."""
    draw = random.Random(seed)
    return [draw.random() < share for _ in range(count)]


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
