"""Apex's optimizers in sessions: as torch's at every level, through skipped steps and checkpoints.

Covers: xamp.apex.optimizers, xamp.apex._engine.
"""

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
    torch.testing.assert_close(
        [v.float() for v in mine.values()], [v.float() for v in theirs.values()], rtol=bound, atol=bound
    )


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


class _Trained:
    """A training at O2 of Apex with FusedSGD, with or without gradients of the masters."""

    def __init__(self, materialize: bool, loss_scale: Any = 2.0**10, **options: Any) -> None:
        self.model: Any = _model()
        made = optimizers.FusedSGD(
            self.model.parameters(), lr=0.05, materialize_master_grads=materialize, **{"momentum": 0.9, **options}
        )
        self.optimizer: Any
        self.model, self.optimizer = amp.initialize(
            self.model, made, opt_level="O2", loss_scale=loss_scale, verbosity=0
        )
        self.seed = 0

    def backward(self, factor: float = 1.0) -> None:
        self.seed += 1
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(self.seed))
        with amp.scale_loss(self.model(x).float().square().mean() * factor, self.optimizer) as scaled:
            scaled.backward()

    @property
    def stepped(self) -> list[Any]:
        """What the optimizer steps. ``amp.master_params`` would make gradients of it."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @property
    def on_model(self) -> list[torch.Tensor]:
        """The gradients of the low-precision parameters, unscaled."""
        return [p.grad.float() / 2.0**10 for p in self.model.parameters() if p.dtype == torch.float16]

    def masters(self) -> list[torch.Tensor]:
        return [master.detach().clone() for master in self.stepped]

    def momenta(self) -> list[torch.Tensor]:
        states = [self.optimizer.state[master] for master in self.stepped]
        return [state["momentum_buffer"] for state in states if state]


Body = Callable[[_Trained, int], object]


def _clip(run: _Trained, _: int) -> None:
    run.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(run.optimizer), 0.05)


def _two(run: _Trained, _: int) -> None:
    run.backward()
    run.backward(0.5)


def _freeze(run: _Trained, number: int) -> None:
    run.backward()
    if number == 2:  # the one without gradients of masters steps by the model's
        run.stepped[0].grad = next(run.model.parameters()).grad = None


BODIES: dict[str, Body] = {
    "one backward": lambda run, _: run.backward(),
    "an overflow": lambda run, number: run.backward(float("inf") if number == 1 else 1.0),
    "clipped": _clip,
    "two backwards": _two,
    "one cleared": _freeze,
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "options",
    [{}, {"loss_scale": "dynamic"}, {"momentum": 0.0, "weight_decay": 0.1}, {"nesterov": True, "weight_decay": 0.1}],
    ids=str,
)
def test_sgd_without_gradients_of_masters_takes_the_same_steps(body: str, options: dict[str, Any]) -> None:
    """Bit for bit, for a product by a power of two in fp32 is exact, whoever takes it."""
    if body == "an overflow" and "loss_scale" not in options:
        options = {**options, "loss_scale": "dynamic"}  # a static scale is not checked
    runs = [_Trained(materialize, **options) for materialize in (True, False)]
    first = runs[0].masters()
    for number in range(5):
        for run in runs:
            run.optimizer.zero_grad()
            BODIES[body](run, number)
            run.optimizer.step()
        for mine, theirs in zip(*(run.masters() for run in runs), strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(first[0], runs[0].masters()[0])
    for mine, theirs in zip(runs[0].momenta(), runs[1].momenta(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(mine, theirs)


def test_masters_have_no_gradient_and_the_model_keeps_its_scaled_ones() -> None:
    run = _Trained(False)
    run.backward()
    lows: list[Any] = [p for p in run.model.parameters() if p.dtype == torch.float16]
    grads, expected, before = [p.grad for p in lows], run.on_model, run.masters()
    own = [n for n, p in enumerate(run.model.parameters()) if p.dtype == torch.float16]
    assert all(grad.dtype == torch.float16 for grad in grads)
    assert [run.stepped[n].grad for n in own] == [None] * len(own) == [None] * 4
    run.optimizer.step()
    assert all(low.grad is grad for low, grad in zip(lows, grads, strict=True))
    assert [run.stepped[n].grad for n in own] == [None] * 4
    for number, grad in zip(own, expected, strict=True):
        torch.testing.assert_close(run.masters()[number], before[number] - 0.05 * grad, rtol=0, atol=1e-7)
    assert "lent" not in vars(run.optimizer)


def test_what_a_script_does_to_the_models_gradients_counts_as_in_apex() -> None:
    run = _Trained(False)
    run.backward()
    low, other = (param for param in run.model.parameters() if param.dim() == 2)
    before = run.masters()
    low.grad.mul_(0.5)
    other.grad = None
    half = low.grad.float() / 2.0**10
    run.optimizer.step()
    after = run.masters()
    moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    weights = [i for i, master in enumerate(before) if master.dim() == 2]
    assert [moved[i] for i in weights] == [True, False]
    torch.testing.assert_close(after[weights[0]], before[weights[0]] - 0.05 * half, rtol=0, atol=1e-7)


def test_master_params_makes_the_gradients_of_masters_at_the_call() -> None:
    """Unscaled, of what the script has made of the model's; these stay, and count no more."""
    run, other = _Trained(False), _Trained(True)
    for each in (run, other):
        each.backward()
    masters = amp.master_params(run.optimizer)
    own = [n for n, p in enumerate(run.model.parameters()) if p.dtype == torch.float16]
    expected = run.on_model
    for number, grad in zip(own, expected, strict=True):
        assert torch.equal(run.stepped[number].grad, grad)
    assert all(
        found is master and type(found) is nn.Parameter for found, master in zip(masters, run.stepped, strict=True)
    )
    for each in (run, other):
        each.optimizer.step()
    assert all(map(torch.equal, run.masters(), other.masters()))


def test_who_asks_for_gradients_finds_those_on_the_model() -> None:
    run = _Trained(False, loss_scale="dynamic")
    gradients = run.optimizer._xamp.state.gradients
    run.backward()
    assert gradients.count_missing() == 0
    assert not gradients.were_cleared()
    assert not gradients.all_zero()
    run.optimizer.zero_grad()
    run.backward(float("inf"))
    assert {id(p) for p in gradients.not_finite()} == set(map(id, run.stepped))
    run.model.zero_grad()
    assert gradients.count_missing() == 6
