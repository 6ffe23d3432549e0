"""``xamp.accel.pin_memory``: torch's own where there is an accelerator, and the tensor itself on a CPU.

Covers: xamp.accel.defaults.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import xamp
from xamp.accel import defaults


def test_on_a_cpu_the_tensor_itself_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    x = torch.ones(2)
    assert xamp.accel.pin_memory(x) is x


def test_on_an_accelerator_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned:
        def pin_memory(self) -> str:
            return "pinned"

    class Used:
        device_type = "cuda"

    given: Any = Pinned()
    monkeypatch.setattr(defaults, "in_use", Used)
    assert defaults.pin_memory(given) == "pinned"
