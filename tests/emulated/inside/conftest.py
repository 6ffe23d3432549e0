"""torch_npu, the chip, and what depends on it."""

from __future__ import annotations

import pytest
import torch

from xamp.backends.npu.chips import Chip, find
from xamp.contract import Backend
from xamp.registry import registry


@pytest.fixture
def chip() -> Chip:
    found = find(torch.get_device_module("npu").get_device_name())
    assert found is not None
    return found


@pytest.fixture
def backend() -> Backend:
    return registry.resolve("npu", "npu")
