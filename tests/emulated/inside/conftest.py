"""torch_npu, the chip, and what depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import xamp
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


@pytest.fixture(autouse=True)
def _full_fp32(request: pytest.FixtureRequest) -> Iterator[None]:
    """All digits of float32, but for modules that set ``CARDS_OWN_FP32``: others compare with the CPU's numbers."""
    if getattr(request.module, "CARDS_OWN_FP32", False):
        yield
        return
    with xamp.exact_fp32(torch.device("npu", 0)):
        yield
