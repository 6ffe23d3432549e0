"""``state_dict`` and ``load_state_dict`` of a model at each level, and tied weights.

Covers: xamp.sessions.lowering, xamp.scaling.weights, xamp.scaling.masters.
"""

from __future__ import annotations

import copy

import pytest
import torch
from lanes import Lane
from managed_models import LEVELS, Net, batch, net, sgd, start, train
from torch import nn

import xamp
from xamp.errors import StateError

MASTERS = ("O2", "O5")


def trained(level: str, lane: Lane, steps: int = 3) -> tuple[Net, torch.optim.Optimizer]:
    """After steps that moved masters by less than their parameters can show."""
    model = net(lane)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level=level, loss_scale=8.0, verbosity=0)
    train(model, optimizer, batch(lane), steps)
    return model, optimizer


def masters_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, xamp.master_params(optimizer), strict=True))


@pytest.mark.parametrize("level", MASTERS)
def test_a_state_dict_holds_the_exact_masters(level: str, lane: Lane) -> None:
    model, optimizer = trained(level, lane)
    state = model.state_dict()
    masters = masters_by_name(model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(state[name], masters[name])
        assert torch.equal(param, masters[name].to(param.dtype))
    assert not torch.equal(state["inner.weight"], model.inner.weight.float()), "nothing that only fp32 can hold"
    assert not state["inner.weight"].requires_grad
    assert model.state_dict(keep_vars=True)["inner.weight"] is masters["inner.weight"]
    assert torch.equal(model.inner.state_dict()["weight"], masters["inner.weight"])
    assert torch.equal(model.state_dict(prefix="m.")["m.inner.weight"], masters["inner.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_loading_writes_parameters_and_masters_and_the_next_step_starts_there(level: str, lane: Lane) -> None:
    source, _ = trained("O0", lane, steps=1)
    state = copy.deepcopy(source.state_dict())
    model, optimizer = trained(level, lane)
    lower = {name: param.dtype for name, param in model.named_parameters()}
    model.load_state_dict(state)
    masters = masters_by_name(model, optimizer)
    for name, param in model.named_parameters():
        assert param.dtype == lower[name]
        assert torch.equal(param, state[name].to(param.dtype))
        assert torch.equal(masters[name], state[name].to(masters[name].dtype))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, batch(lane))
    for name, param in model.named_parameters():
        assert torch.equal(param, state[name].to(param.dtype)), "a step put the old masters back"


@pytest.mark.parametrize("level", MASTERS)
def test_a_half_state_of_the_same_weights_leaves_the_masters_exact(level: str, lane: Lane) -> None:
    model, optimizer = trained(level, lane)
    exact = {name: master.detach().clone() for name, master in masters_by_name(model, optimizer).items()}
    halves = {name: param.detach().clone() for name, param in model.named_parameters()}
    halves["inner.weight"][0, 0] = 3.0
    model.load_state_dict({**model.state_dict(), **halves})
    after = masters_by_name(model, optimizer)
    changed = after["inner.weight"].detach() != exact["inner.weight"]
    assert changed.nonzero().tolist() == [[0, 0]]
    assert after["inner.weight"][0, 0] == model.inner.weight[0, 0] == 3.0
    assert all(torch.equal(after[name], exact[name]) for name in exact if name != "inner.weight")


@pytest.mark.parametrize("level", MASTERS)
def test_a_submodule_loads_by_itself(level: str, lane: Lane) -> None:
    model, optimizer = trained(level, lane)
    weights = {"weight": torch.full((8, 4), 1.0 + 2.0**-12), "bias": torch.zeros(8)}
    model.inner.load_state_dict(weights)
    assert torch.equal(masters_by_name(model, optimizer)["inner.weight"].cpu(), weights["weight"])
    assert torch.equal(model.inner.weight.cpu(), weights["weight"].to(model.inner.weight.dtype))


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_assigning_a_state_is_refused_and_changes_nothing(level: str, lane: Lane) -> None:
    model, _ = trained(level, lane)
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    with pytest.raises(StateError, match=r"load_state_dict\(assign=True\) would replace.*Load without assign=True"):
        model.load_state_dict(net(lane).state_dict(), assign=True)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("level", MASTERS)
def test_a_deepcopys_state_is_its_own(level: str, lane: Lane) -> None:
    model, _ = trained(level, lane)
    before = copy.deepcopy(model.state_dict())
    twin = copy.deepcopy(model)
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    assert all(float(value.float().abs().sum()) == 0 for value in twin.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert twin.inner.weight.dtype in (torch.float16, torch.bfloat16)
    for value in twin.state_dict().values():
        value.copy_(torch.ones_like(value))  # as averages of weights are kept: into the copy's own tensors
    assert bool((twin.inner.weight == 1).all())


@pytest.mark.parametrize("level", MASTERS)
def test_a_state_on_another_device_type_loads(level: str, lane: Lane) -> None:
    model, optimizer = trained(level, lane)
    model.load_state_dict({name: torch.ones_like(value, device="cpu") for name, value in model.state_dict().items()})
    assert all(bool((master == 1).all()) for master in xamp.master_params(optimizer))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.decoder(self.encoder(x))
        return made


@pytest.mark.parametrize("level", LEVELS)
def test_tied_weights_stay_tied_and_are_stepped_once(level: str, lane: Lane) -> None:
    torch.manual_seed(0)
    model = Tied().to(lane.device)
    expected = copy.deepcopy(model)
    plain = sgd(expected)
    expected(batch(lane)).square().mean().backward()
    plain.step()
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    assert model.encoder.weight is model.decoder.weight
    train(model, optimizer, batch(lane))
    assert model.encoder.weight is model.decoder.weight
    state = model.state_dict()
    assert torch.equal(state["encoder.weight"], state["decoder.weight"])
    torch.testing.assert_close(state["encoder.weight"], expected.encoder.weight.detach(), atol=3e-3, rtol=2e-2)
    assert len(list(xamp.master_params(optimizer))) == 1


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_tied_weights_of_which_one_is_kept_fp32_stay_fp32(level: str, lane: Lane) -> None:
    model = start(Tied().to(lane.device), level, lane, keep_fp32=["decoder"])
    assert model.encoder.weight is model.decoder.weight
    assert model.encoder.weight.dtype == torch.float32
    assert model(batch(lane)).dtype == torch.float32


class RefusesHooks(nn.Linear):
    def register_state_dict_post_hook(self, hook: object) -> None:
        raise RuntimeError("no hooks here")


def test_a_module_that_refuses_a_hook_ends_initialize_and_leaves_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), RefusesHooks(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with pytest.raises(RuntimeError, match="no hooks here"):
        xamp.initialize(model, optimizer, "O2", verbosity=0)
    for module in model.modules():
        assert not module._state_dict_hooks
        assert not module._load_state_dict_pre_hooks
    assert all(param.dtype is torch.float32 for param in model.parameters())
