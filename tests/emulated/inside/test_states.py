"""Checkpoints that move between the card and a CPU, at every level, and between releases of torch_npu.

Covers: xamp.sessions.checkpoint, xamp.sessions.formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, everything, load, save, start, train
from ci_scripts import module_at
from lanes import Lane

import xamp
from xamp.testing.lane import open_lane

RECORDED = Path(__file__).parents[2] / "data" / "torch_npu"


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


# ---------------------------------------------------------------- files of other releases of torch_npu


def recorded() -> Any:
    """The script that made the recorded runs, as a module."""
    return module_at(RECORDED / "make_states.py")


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("file", sorted(RECORDED.glob("scaler-*.pt")), ids=lambda file: file.stem)
def test_a_run_of_another_release_goes_on_in_this_one(file: Path, dynamic: bool) -> None:
    """With torch_npu's GradScaler, and with xamp's that has read its state: as a run here that never stopped.

    Newer releases of torch_npu take the tensors of older ones only without ``weights_only``: they hold its ``Format``.
    """
    made = recorded()
    whole = made.trained(dynamic)
    theirs = made.start(dynamic)
    mine = (*made.start(dynamic)[:2], xamp.GradScaler(init_scale=2.0))
    for run in (theirs, mine):
        state = torch.load(file, weights_only=False)["dynamic" if dynamic else "static"]
        for kind, each in zip(("model", "optimizer", "scaler"), run, strict=True):
            each.load_state_dict(state[kind])
        assert run[2].get_scale() == whole[2].get_scale() == (1024.0 if dynamic else 256.0)
    for number in range(5):
        for run in (whole, theirs, mine):
            made.step(*run, overflow=dynamic and number == 2)
    for run in (theirs, mine):
        assert run[2].get_scale() == whole[2].get_scale()
        for found, wanted in zip(run[0].parameters(), whole[0].parameters(), strict=True):
            assert torch.equal(found, wanted)
