"""The suite asks no more of a device than that declares: a chip with a flag, and those that can do little, pass it.

Covers: xamp.testing.lane, xamp.testing.probe, xamp.contract.
"""

from __future__ import annotations

import pytest
import torch
from mutants import registered

from xamp.backends.cpu import CpuBackend
from xamp.contract import Capabilities
from xamp.testing import TIERS
from xamp.testing.lane import open_lane
from xamp.testing.run import run


class Fp32Only(CpuBackend):
    """Has no lower dtype, and computes in one process."""

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(("O0",), (), process_group="")


class Bf16Only(CpuBackend):
    """Has no fp16."""

    def capabilities(self, device: torch.device | None = None) -> Capabilities:
        return Capabilities(("O0", "O4", "O5"), ("bfloat16",), ("bfloat16",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "without"),
    [
        # these make no overflow, or hardly any
        pytest.param(
            "saturating_chip:SaturatingBackend", {"operators", "numerics", "compiled"}, marks=pytest.mark.thorough
        ),
        pytest.param("test_other_devices:Fp32Only", set()),
        pytest.param("test_other_devices:Bf16Only", {"compiled"}, marks=pytest.mark.thorough),
    ],
)
def test_nothing_fails(target: str, without: set[str]) -> None:
    with registered(target)():
        results = run([open_lane("mutant")], [f"{tier}.*" for tier in TIERS if tier not in without])
    assert {result.clause: result.reason for result in results if result.outcome in ("failed", "skipped")} == {}
    assert "passed" in {result.outcome for result in results if result.clause.startswith("optimizers.")}
    assert "not declared" in {result.outcome for result in results}
