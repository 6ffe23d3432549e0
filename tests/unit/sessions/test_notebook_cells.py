"""What docs/guides/notebooks.md says of cells that run again alone.

Covers: xamp.sessions.initialize, xamp.sessions.session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from docs_pages import DOCS
from stepping import Dot, outcome, run_backward

import xamp

LEVELS = ("O1", "O2", "O4", "O5")


def made() -> tuple[Dot, torch.optim.Optimizer]:
    model = Dot()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def initialized(model: Dot, optimizer: Any, level: str) -> None:
    xamp.initialize(model, optimizer, level=level, init_scale=64.0, verbosity=0)


def train(model: Dot, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    run_backward(model(torch.ones(7)), optimizer)
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_part_of_the_cell_that_ran_alone_is_told(level: str, caplog: pytest.LogCaptureFixture) -> None:
    page = (DOCS / "guides" / "notebooks.md").read_text(encoding="utf-8")
    model, optimizer = made()
    initialized(model, optimizer, level)
    train(model, optimizer)
    another = torch.optim.AdamW(model.parameters(), lr=1e-3)
    told: list[tuple[Callable[[], None], str]] = [
        (lambda: initialized(model, optimizer, level), "was given to initialize before"),
        (lambda: train(model, another), "was not given to xamp.initialize"),
        (lambda: initialized(model, another, level), "was given to initialize before"),
    ]
    for call, said in told:
        assert said in page
        with pytest.raises(xamp.StateError, match=said):
            call()
    with caplog.at_level(logging.WARNING, "xamp"):
        train(made()[0], optimizer)
    assert "finds no gradient" in page
    assert "finds no gradient" in caplog.text


@pytest.mark.parametrize("level", LEVELS)
def test_the_whole_cell_runs_again(level: str) -> None:
    kept = []
    for _ in range(3):
        model, optimizer = made()
        initialized(model, optimizer, level)
        train(model, optimizer)
        kept.append((model, optimizer))  # as the notebook's Out does
        assert outcome(optimizer) == "APPLIED"
    with pytest.raises(xamp.StateError, match="sessions are live"):
        xamp.state_dict()
    assert xamp.state_dict(kept[-1][0])["format"] == "xamp"
