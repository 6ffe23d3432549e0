"""Step counters of an optimizer's state: a fused form needs them on the device, the others keep them on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["StepCounters"]


class StepCounters:
    """Moves the counters ``state["step"]`` to where fused kernels need them, and gives back the tensors it found.

    A plain form that found them on the device would wait for each at every step.
    """

    def __init__(self) -> None:
        self._given: Any = WeakIdKeyDictionary()  # by parameter, the counter that was moved

    def move(self, optimizer: Optimizer) -> None:
        """Put each counter on its parameter's device, in fp32."""
        for param, state in optimizer.state.items():
            if isinstance(state, dict) and torch.is_tensor(given := state.get("step")):
                moved = given.to(device=param.device, dtype=torch.float32)
                if moved is not given:
                    self._given[param] = given  # first, so that give_back knows it
                    state["step"] = moved

    def give_back(self, optimizer: Optimizer) -> None:
        """Put the counters back that :meth:`move` replaced, with what was counted since. Waits for the device."""
        for param, given in list(self._given.items()):
            state = optimizer.state.get(param, {})
            if torch.is_tensor(moved := state.get("step")) and moved is not given:
                state["step"] = given.copy_(moved)
        self._given.clear()
