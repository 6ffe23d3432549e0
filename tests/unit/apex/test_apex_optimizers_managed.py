"""Apex's optimizers in sessions: as torch's at every level, through skipped steps and checkpoints."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.apex import amp, optimizers, parallel

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "FusedAdam": (
        lambda p: optimizers.FusedAdam(p, lr=0.02, eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, weight_decay=0.1),
    ),
    "FusedSGD": (
        lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ),
    "NpuFusedSGD": (
        lambda p: optimizers.NpuFusedSGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    ),
    "NpuFusedAdam": (
        lambda p: optimizers.NpuFusedAdam(p, lr=0.02, eps=1e-3),
        lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
    ),
}
MAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: pair[0] for name, pair in PAIRS.items()},
    "capturable": lambda p: optimizers.FusedAdam(p, lr=0.02, capturable=True),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.02),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.02),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.02),
    "FusedMixedPrecisionLamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.02),
    "NpuFusedLamb": lambda p: optimizers.NpuFusedLamb(p, lr=0.02),
    "LARC": lambda p: parallel.LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}


@pytest.fixture(autouse=True)
def _no_casts_stay() -> Iterator[None]:
    yield
    handle = amp._amp_state.handle
    if handle is not None:
        handle._deactivate()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class _Api:
    """``amp`` or ``xamp``, by one set of names."""

    def __init__(self, name: str, level: str, make: Callable[[Any], Any]) -> None:
        self.model = _model()
        self.optimizer = make(self.model.parameters())
        if name == "amp":
            self.model, self.optimizer = amp.initialize(
                self.model, self.optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
            )
            self.scale_loss: Callable[..., Any] = amp.scale_loss
            self.masters: Callable[..., Any] = amp.master_params
        else:
            xamp.initialize(self.model, self.optimizer, level, loss_scale="dynamic", verbosity=0)
            self.scale_loss, self.masters = xamp.scale_loss, xamp.master_params

    def step(self, seed: int, factor: float = 1.0) -> float:
        generator = torch.Generator().manual_seed(seed % 3)
        x = torch.randn(16, 4, generator=generator)
        self.optimizer.zero_grad()
        loss = (self.model(x).float() - x.sum(1, keepdim=True)).square().mean()
        with self.scale_loss(loss * factor, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return float(loss.detach())

    def values(self) -> list[torch.Tensor]:
        found = [param.detach().clone() for param in self.model.parameters()]
        return found + [param.detach().clone() for param in self.masters(self.optimizer)]

    def state(self) -> list[torch.Tensor]:
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.clone() for value in values if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("api", ["amp", "xamp"])
def test_the_same_weights_as_torchs(api: str, name: str, level: str) -> None:
    mine, theirs = _Api(api, level, PAIRS[name][0]), _Api(api, level, PAIRS[name][1])
    for seed in range(6):
        factor = float("inf") if seed == 3 else 1.0
        assert mine.step(seed, factor) == pytest.approx(theirs.step(seed, factor), rel=2e-3)
    # At O3 the moments of Apex's are fp32 and those of torch's fp16.
    bound = 5e-2 if level == "O3" else 1e-5
    for a, b in zip(mine.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=bound, atol=bound)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("api", "name"), [("amp", name) for name in MAKERS] + [("xamp", name) for name in MAKERS][:-1])
def test_training_learns_and_an_overflow_changes_nothing(api: str, name: str, level: str) -> None:
    run = _Api(api, level, MAKERS[name])
    first = run.step(0)
    for seed in range(1, 4):
        run.step(seed)
    before, state = run.values(), run.state()
    run.step(4, float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(run.values(), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(run.state(), state, strict=True))
    for seed in range(5, 25):
        run.step(seed)
    assert run.step(0) < first


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD", "NpuFusedSGD", "capturable"])
@pytest.mark.parametrize("api", ["amp", "xamp"])
def test_a_resumed_run_is_the_run(api: str, name: str, level: str) -> None:
    whole = _Api(api, level, MAKERS[name])
    for seed in range(3):
        whole.step(seed)
    saved = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    state: Any = amp.state_dict() if api == "amp" else xamp.state_dict(whole.model)
    resumed = _Api(api, level, MAKERS[name])
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    if api == "amp":
        amp.load_state_dict(state)
    else:
        xamp.load_state_dict(state, resumed.model)
    for seed in range(3, 6):
        whole.step(seed)
        resumed.step(seed)
    assert all(torch.equal(a, b) for a, b in zip(whole.values(), resumed.values(), strict=True))


def test_the_flag_of_the_constructor_holds_in_a_session() -> None:
    for to_none in (True, False):
        run = _Api("xamp", "O1", functools.partial(optimizers.FusedAdam, set_grad_none=to_none))
        run.step(0)
        run.optimizer.zero_grad()
        assert [p.grad is None for p in run.masters(run.optimizer)] == [to_none] * 6
