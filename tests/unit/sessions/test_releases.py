"""What each tested release of torch wrote is read on the one that runs, and training goes on as it did there.

Bit for bit where the kernels of the two releases agree: where the same training from its start gives the same bits.

Covers: xamp.sessions.checkpoint, xamp.sessions.formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ci_scripts import module_at

import xamp
from xamp.registry.find_torch import MINIMUM_TORCH, NEWEST_TESTED, as_text, numbers

FOLDER = Path(__file__).parents[2] / "data" / "releases"
FILES = sorted(FOLDER.glob("*.pt"), key=lambda path: numbers(path.stem) or ())
BOUND = 2.0**-7
"""Of what a weight differs where kernels differ, in the largest weight: a unit in the last place of bf16."""


@pytest.fixture(scope="module")
def make() -> Any:
    return module_at(FOLDER / "make.py")


@pytest.fixture(scope="module")
def own(make: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """What this release would write."""
    return {row: make.row(*row) for row in make.ROWS}


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other)


def test_the_oldest_and_the_newest_are_among_them() -> None:
    assert FILES[0].stem == as_text(MINIMUM_TORCH)
    assert FILES[-1].stem.startswith(f"{as_text(NEWEST_TESTED)}.")
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("optimizer", ["fused Adam", "SGD"])
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_checkpoint_goes_on_as_its_writer_did(
    path: Path, level: str, optimizer: str, make: Any, own: dict[tuple[str, str], dict[str, Any]]
) -> None:
    wrote = torch.load(path, weights_only=True)[f"{level} {optimizer}"]
    kernels_agree = same(own[level, optimizer]["state"], wrote["state"]) and same(
        own[level, optimizer]["end"], wrote["end"]
    )
    model, made = make.started(level, optimizer)
    make.train(model, made, 0, 1)  # another state than the one that is loaded
    model.load_state_dict(wrote["state"]["model"])
    made.load_state_dict(wrote["state"]["optimizer"])
    xamp.load_state_dict(wrote["state"]["xamp"], made)
    assert same(xamp.state_dict(made), wrote["state"]["xamp"])
    end = make.train(model, made, make.MIDDLE, make.END)
    assert end["scale"] == wrote["end"]["scale"]
    if kernels_agree:
        assert same(end, wrote["end"])
    assert distance(end["weights"], wrote["end"]["weights"]) <= BOUND
    assert not same(end["weights"], wrote["state"]["model"]), "five steps change them"
