"""A small GPT on a chip of the series Ascend 950 learns in microscaled fp8 as at O4.

Covers: backends.npu.emulation.mx, xamp.casting.fp8_linear.
"""

from __future__ import annotations

from typing import Any

import small_gpt
import torch


def test_it_learns_as_at_o4() -> None:
    options: dict[str, Any] = {"level": "O4", "device": "npu:0"}
    settings: list[dict[str, Any]] = [{}, {"fp8": "mxfp8", "keep_bf16": ()}]
    wanted, found = (small_gpt.losses(100, **options, **fp8) for fp8 in settings)
    assert wanted[-50:].mean() < 0.6 * wanted[0]
    assert abs(found[-50:].mean() / wanted[-50:].mean() - 1) <= 0.01
    assert not torch.equal(found, wanted)
