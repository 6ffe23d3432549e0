"""What a script does by hand to gradients between ``scale_loss`` and the step: it clears them, or writes into them.

Covers: xamp.scaling.gradients, xamp.scaling.moves.
"""

from __future__ import annotations

from typing import Any

import onepass_reference
import pytest
import torch
from torch import nn

import xamp
from xamp.errors import StateError


def test_gradients_that_were_cleared_by_hand_do_not_come_back_when_a_group_is_added() -> None:
    norms = []
    for cleared in (True, False):
        torch.manual_seed(0)
        model: Any = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        xamp.initialize(model, optimizer, "O2", verbosity=0, init_scale=256.0)
        if cleared:
            with xamp.scale_loss(model(torch.ones(1, 2)).square().sum(), optimizer) as scaled:
                scaled.backward()
            for param in model.parameters():
                param.grad = None
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with xamp.scale_loss(model(torch.ones(1, 2)).square().sum(), optimizer) as scaled:
            scaled.backward()
        norms.append(float(xamp.clip_grad_norm_(optimizer, 1e9)))
    assert norms[0] == norms[1]


def test_the_scale_of_a_window_that_was_cleared_moves_before_gradients_are_multiplied_by_it() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=1024.0)

    def loss() -> torch.Tensor:
        result: torch.Tensor = model(torch.ones(1, 2)).square().sum()
        return result

    with xamp.scale_loss(loss() * 1e38, optimizer) as scaled:
        scaled.backward()
    optimizer.zero_grad()
    loss().backward()
    once = float(model.weight.grad.norm())
    with xamp.scale_loss(loss(), optimizer) as scaled:
        scaled.backward()
    assert xamp.loss_scale(model) == 512.0
    assert float(model.weight.grad.norm()) == pytest.approx(2 * once, rel=1e-3)


@pytest.mark.parametrize(("width", "index"), [(2, 1), (2, 3), (64, 1)])
@pytest.mark.parametrize(
    ("meddle", "said"), [("clear", "of a part of the model were cleared"), ("write", "parameters were written to")]
)
def test_what_is_done_to_one_gradient_of_the_model_is_noticed(width: int, index: int, meddle: str, said: str) -> None:
    """The model has zeros on its smallest parameter, and on one elsewhere."""
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    with xamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    param: Any = list(model.parameters())[index]
    if meddle == "clear":
        param.grad = None
    else:
        param.grad.add_(1.0)
    with pytest.raises(StateError, match=said):
        optimizer.step()


def test_gradients_that_are_put_in_after_the_model_was_cleared_are_stepped() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O2", verbosity=0, init_scale=256.0)
    with xamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    for param in model.parameters():
        param.grad = None
    assert float(xamp.clip_grad_norm_(optimizer, 1.0)) == 0.0
    held = list(xamp.master_params(optimizer))
    before = [master.detach().clone() for master in held]
    for master in held:
        master.grad = torch.ones_like(master)
    optimizer.step()
    assert all(torch.equal(a - 0.125, b) for a, b in zip(before, held, strict=True))


def test_a_step_that_finds_nothing_moves_the_scale_of_its_window() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, "O1", verbosity=0, init_scale=1024.0)
    with xamp.scale_loss(model(torch.ones(1, 2)).sum() * float("inf"), optimizer) as scaled:
        scaled.backward()
    for param in model.parameters():
        param.grad = None
    optimizer.step()
    assert xamp.loss_scale(model) == 512.0


@pytest.mark.parametrize("form", ["O1", "O2", "O2 in one pass"])
@pytest.mark.parametrize("clear", ["optimizer", "model", "by hand"])
def test_a_step_after_all_was_cleared_counts_nothing(form: str, clear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever clears: the optimizer, the model, or the script itself."""
    onepass_reference.use(monkeypatch)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    level, _, one_pass = form.partition(" ")
    xamp.initialize(model, optimizer, level, verbosity=0, fused="one-pass" if one_pass else "auto")
    for _ in range(2):
        with xamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
        before = xamp.session(model).stats
        if clear == "by hand":
            for param in model.parameters():
                param.grad = None
        else:
            (model if clear == "model" else optimizer).zero_grad()
        weights = [param.clone() for param in model.parameters()]
        optimizer.step()
        after = xamp.session(model).stats
        assert (after.applied, after.skipped) == (before.applied, before.skipped) == (0, 0)
        assert all(map(torch.equal, weights, model.parameters()))
