"""Checkpoints that move between the card and a CPU, at every level: masters and scale bit for bit."""

from __future__ import annotations

import pytest
import torch
from checkpoints import VARIANTS, everything, load, save, start, train
from lanes import Lane

import xamp
from xamp.testing.lane import open_lane


@pytest.fixture(scope="module")
def card() -> Lane:
    return open_lane("auto", "npu:0")


@pytest.fixture(scope="module")
def host() -> Lane:
    return open_lane("auto", "cpu")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("direction", ["card to host", "host to card"])
def test_a_run_goes_on_on_the_other_device(variant: str, direction: str, card: Lane, host: Lane) -> None:
    first, second = (card, host) if direction == "card to host" else (host, card)
    if VARIANTS[variant]["level"] not in card.can.levels:
        pytest.skip(f"{card} cannot run {variant}")
    source = start(first, variant, optimizer="Adam")
    train(source, first, range(4), overflows=[2])
    state = save(source)
    run = start(second, variant, seed=2, optimizer="Adam", init_scale=16.0)
    load(run, state)
    found, wanted = everything(run), everything(source)
    for kind in ("parameters", "masters", "buffers"):
        for mine, theirs in zip(found[kind], wanted[kind], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.cpu(), theirs.cpu()), kind
    if xamp.session(run.optimizer).policy.dynamic:
        assert run.scale == source.scale == 32.0
        assert found["xamp"]["scalers"] == wanted["xamp"]["scalers"]
    assert train(run, second, range(4, 7)) == train(source, first, range(4, 7)) == ["APPLIED"] * 3
    assert run.scale == source.scale
    for mine, theirs in zip(xamp.master_params(run.optimizer), xamp.master_params(source.optimizer), strict=True):
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach().cpu(), rtol=2e-2, atol=2e-2)
