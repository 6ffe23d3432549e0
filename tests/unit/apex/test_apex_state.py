"""``amp._amp_state``, ``amp.state_dict``, checkpoints of the real Apex, and its rules that no recording shows.

Covers: xamp.apex._amp_state, xamp.apex._scale_loss, xamp.apex._several, xamp.apex._loss_scaler, xamp.apex._properties.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import apex_training
import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp.apex import amp
from xamp.errors import StateError

DATA = Path(__file__).parents[2] / "data" / "apex"
RECORDED = json.loads((DATA / "checkpoints.json").read_text(encoding="utf-8"))


def start(lane: Lane, level: str = "O2", models: int = 1, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    made: list[Any] = [nn.Linear(4, 1).to(lane.device) for _ in range(models)]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.0625) for model in made]
    options.setdefault("verbosity", 0)
    amp.initialize(made, optimizers, opt_level=level, **options)
    return (made[0], optimizers[0]) if models == 1 else (made, optimizers)


def loss_of(model: Any, lane: Lane) -> torch.Tensor:
    """Small enough for fp16 at any scale that is used here."""
    found: torch.Tensor = model(torch.ones(2, 4, device=lane.device)).sum() * 2.0**-8
    return found


def bits(params: Any) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in params]


# ---------------------------------------------------------------- checkpoints of the real one


@pytest.mark.parametrize("losses", [1, 2, 3])
def test_scales_that_apex_saved_load(lane: Lane, losses: int) -> None:
    saved = RECORDED["scalers"][f"{losses} loss" + ("es" if losses > 1 else "")]
    start(lane, num_losses=losses)
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    for scaler, entry in zip(amp._amp_state.loss_scalers, saved.values(), strict=True):
        assert (scaler.loss_scale(), scaler._unskipped) == (entry["loss_scale"], entry["unskipped"])


def test_a_run_that_apex_saved_goes_on() -> None:
    """As Apex would have gone on, had it not loaded Adam's moments through fp16."""
    states = torch.load(DATA / "o2_step5.pt", weights_only=True)
    threads = torch.get_num_threads()
    found = apex_training.resume(amp, states)
    torch.set_num_threads(threads)
    wanted = RECORDED["restored, moments in fp32"]
    assert found["amp"] == wanted["amp"]
    assert found["values"].keys() == wanted["values"].keys()
    for name, line in wanted["values"].items():
        mine, theirs = ([float.fromhex(x) for x in each.split()[1:]] for each in (found["values"][name], line))
        assert mine == pytest.approx(theirs, rel=1e-2, abs=1e-2)
    here = apex_training.recorded_here(RECORDED["made_by"]["machines"])
    if here is not None:
        assert found["sha256"] == wanted["sha256"][here]


def test_a_static_scale_is_saved_with_its_count(lane: Lane) -> None:
    model, optimizer = start(lane, "O1", loss_scale=128.0)
    for _ in range(3):
        with amp.scale_loss(loss_of(model, lane), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 9}})
    with amp.scale_loss(loss_of(model, lane), optimizer) as scaled:
        assert scaled.item() == pytest.approx(4 * loss_of(model, lane).item(), rel=1e-3)
        scaled.backward()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 10}}


def test_the_optimizers_state_brings_the_scale(lane: Lane) -> None:
    """For the many scripts that save model and optimizer only; what amp saved counts more."""
    _, optimizer = start(lane)
    amp._amp_state.loss_scalers[0]._loss_scale = 512.0
    assert "xamp_loss_scales" in optimizer.state_dict()["param_groups"][0]
    model, optimizer = start(lane, num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 512.0
    with amp.scale_loss(loss_of(model, lane), optimizer, loss_id=1) as scaled:
        scaled.backward()
    saved = optimizer.state_dict()

    _, other = start(lane, num_losses=2)
    other.load_state_dict(saved)
    assert "xamp_loss_scales" not in other.param_groups[0]
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [512.0, 512.0]
    assert [s._unskipped for s in amp._amp_state.loss_scalers] == [0, 1]
    _, other = start(lane, num_losses=2)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}})
    other.load_state_dict(saved)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 8.0


# ---------------------------------------------------------------- rules


def test_two_losses_may_be_open_at_once(lane: Lane) -> None:
    """``with amp.scale_loss(a, first) as a, amp.scale_loss(b, second) as b`` with one loss scale."""
    models, optimizers = start(lane, "O1", models=2, loss_scale=64.0)
    losses = [loss_of(model, lane) for model in models]
    with contextlib.ExitStack() as both:
        for loss, optimizer in zip(losses, optimizers, strict=True):
            both.enter_context(amp.scale_loss(loss, optimizer)).backward()
    for model in models:
        torch.testing.assert_close(model.weight.grad.float(), torch.full((1, 4), 2.0**-7, device=lane.device))


def test_fp16_gradients_stay_scaled_in_the_model(lane: Lane) -> None:
    model, optimizer = start(lane, loss_scale=128.0)
    with amp.scale_loss(loss_of(model, lane), optimizer) as scaled:
        scaled.backward()
    weight: Any = next(amp.master_params(optimizer))
    assert model.weight.grad.dtype == torch.float16
    assert torch.equal(model.weight.grad.float(), weight.grad * 128.0)
    optimizer.step()
    assert weight.grad is None
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_a_plain_backward_is_no_error(lane: Lane) -> None:
    """At O1 it is stepped as it is; at O2 it never reaches the masters."""
    model, optimizer = start(lane, "O1")
    loss_of(model, lane).backward()
    before = bits(model.parameters())
    optimizer.step()
    assert not any(map(torch.equal, bits(model.parameters()), before))
    model, optimizer = start(lane, "O2")
    loss_of(model, lane).backward()
    before = bits(model.parameters())
    optimizer.step()
    assert all(map(torch.equal, bits(model.parameters()), before))


def test_a_closure_is_taken_where_apex_took_it(lane: Lane) -> None:
    model, optimizer = start(lane, "O1", loss_scale=1.0)
    assert optimizer.step(lambda: loss_of(model, lane)) is not None
    model, optimizer = start(lane, "O2")
    with pytest.raises(RuntimeError, match="Amp does not support closure use"):
        optimizer.step(lambda: loss_of(model, lane))


def train_two(lane: Lane, level: str, calls: int, spoilt: int, spoil_at: int) -> tuple[list[torch.Tensor], list[float]]:
    """Two models under one loss, given to one call of ``initialize`` or to two; the weights and scales of six steps."""
    if calls == 1:
        models, optimizers = start(lane, level, models=2)
    else:
        pairs = [start(lane, level) for _ in range(2)]
        models, optimizers = [model for model, _ in pairs], [optimizer for _, optimizer in pairs]
    models[1].load_state_dict({k: v.detach().clone() * 0.5 for k, v in models[0].state_dict().items()})
    scales = []
    for step in range(6):
        loss = loss_of(models[0], lane) + loss_of(models[1], lane)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(loss, optimizers) as scaled:
            scales.append(float((scaled / loss).detach()))
            scaled.backward()
            if step == spoil_at:
                lane.overflow_(next(p.grad for p in models[spoilt].parameters() if p.grad is not None))
        for optimizer in optimizers:
            optimizer.step()
    return [p for optimizer in optimizers for p in bits(amp.master_params(optimizer))], scales


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("spoilt", "spoil_at"), [(0, 9), (0, 2), (1, 2), (0, 0)])
def test_optimizers_of_two_calls_share_a_loss_as_those_of_one(
    lane: Lane, level: str, spoilt: int, spoil_at: int
) -> None:
    """Also where one of them overflows: both skip, and the one scale backs off once."""
    one, scales = train_two(lane, level, 1, spoilt, spoil_at)
    two, same = train_two(lane, level, 2, spoilt, spoil_at)
    assert same == scales
    assert scales[-1] == scales[0] / (2.0 if spoil_at < 6 else 1.0)
    assert all(map(torch.equal, one, two))


class Sometimes(nn.Module):
    """Its batch norm, which O2 keeps in fp32, is used in the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.norm(x).to(x.dtype) if self.uses else x)
        return found


@pytest.mark.parametrize("set_to_none", [None, True])
def test_zero_grad_with_masters_leaves_zeros(lane: Lane, set_to_none: bool | None) -> None:
    """As in Apex: momentum and decay go on where a backward leaves a parameter out; ``set_to_none=True`` ends that."""
    torch.manual_seed(0)
    model: Any = Sometimes().to(lane.device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.25)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=1.0, verbosity=0)
    weight, steps = model.norm.weight, []
    by_hand, momentum = weight.detach().clone(), torch.zeros_like(weight)
    for index in range(3):
        model.uses = index == 0
        with amp.scale_loss(model(torch.randn(8, 4, device=lane.device)).square().mean() * 0.125, optimizer) as scaled:
            scaled.backward()
        if weight.grad is not None:
            momentum = momentum * 0.5 + weight.grad + 0.25 * by_hand
            by_hand = by_hand - 0.1 * momentum
        optimizer.step()
        steps.append(weight.grad is not None)
        optimizer.zero_grad(**({} if set_to_none is None else {"set_to_none": set_to_none}))
    assert steps == ([True, True, True] if set_to_none is None else [True, False, False])
    assert torch.allclose(weight, by_hand, rtol=1e-6, atol=1e-7)


def test_the_newest_of_two_calls_gives_the_scale(lane: Lane) -> None:
    model, first = start(lane, "O2", loss_scale=4.0)
    other, second = start(lane, "O2", loss_scale=16.0)
    for optimizers in ([first, second], [second, first]):
        loss = loss_of(model, lane) + loss_of(other, lane)
        with amp.scale_loss(loss, optimizers) as scaled:
            assert float((scaled / loss).detach()) == 16.0
            scaled.backward()
        for optimizer in optimizers:
            weight = next(amp.master_params(optimizer))
            assert weight.grad is not None
            assert float(weight.grad.sum()) == 4 * 2 * 2.0**-8
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_of_two_calls_that_fails_leaves_both_usable(lane: Lane) -> None:
    model, first = start(lane)
    other, second = start(lane)
    with pytest.raises(KeyError), amp.scale_loss(loss_of(model, lane), [first, second]):
        raise KeyError
    with amp.scale_loss(loss_of(model, lane) + loss_of(other, lane), [first, second]) as scaled:
        scaled.backward()
    with pytest.raises(IndexError):
        amp.scale_loss(loss_of(model, lane), [first, second], loss_id=3)


def test_an_optimizer_that_was_not_given_is_named(lane: Lane) -> None:
    model, first = start(lane)
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(StateError, match=r"was not given to amp\.initialize"):
        amp.scale_loss(loss_of(model, lane), [first, other])


def test_a_call_that_is_refused_leaves_all_as_it_was(lane: Lane) -> None:
    _, optimizer = start(lane)
    newest = amp._amp_state.opt_properties, amp._amp_state.loss_scalers, amp._amp_state.verbosity
    model: Any = nn.Linear(4, 1).to(lane.device)
    with pytest.raises(RuntimeError, match=r"should only be passed through amp\.initialize once"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=2)
    assert (amp._amp_state.opt_properties, amp._amp_state.loss_scalers, amp._amp_state.verbosity) == newest
    assert model.weight.dtype == torch.float32


def test_closing_gives_everything_back(lane: Lane) -> None:
    before = torch.mm
    model, optimizer = start(lane, "O1")
    assert torch.mm is not before
    xamp.session(model).close()
    assert torch.mm is before
    assert type(optimizer) is torch.optim.SGD


def test_keywords_of_other_vendors(lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 1).to(lane.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0625)
    with caplog.at_level("INFO", "xamp"):
        amp.initialize(
            *(model, optimizer),
            opt_level="O2",
            verbosity=0,
            dynamic_init_scale=64.0,
            scale_growth_factor=4.0,
            scale_backoff_factor=0.25,
            scale_window=2,
            combine_grad=True,
        )
    assert "combine_grad=True) changes nothing here" in caplog.text
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with amp.scale_loss(loss_of(model, lane), optimizer) as scaled:
            scaled.backward()
            if step == 2:
                lane.backend.make_overflow_(model.weight.grad)
        optimizer.step()
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
    assert scales == [64.0, 256.0, 64.0, 64.0]


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_levels_of_rocm(lane: Lane, level: str) -> None:
    if "bfloat16" not in lane.can.dtypes:
        pytest.skip(f"{lane} has no bfloat16")
    model, optimizer = start(lane, level)
    x = torch.ones(2, 4, device=lane.device)
    assert torch.mm(x, x.T).dtype == (torch.bfloat16 if level == "O4" else torch.float32)
    with amp.scale_loss(loss_of(model, lane), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert model.weight.dtype == (torch.float32 if level == "O4" else torch.bfloat16)
    xamp.session(model).close()
