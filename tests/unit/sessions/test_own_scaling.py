"""Optimizers that unscale and skip by themselves get what torch's GradScaler gives them, from the first step on.

Covers: xamp.sessions.grad_scaler, xamp.registry.fused_classes, xamp.scaling.torch_step.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import xamp
from xamp.registry.fused_classes import honours_found_inf, is_torchs, takes_grad_scaler


class Own(torch.optim.Optimizer):
    """torch's protocol, on a class of the user's own."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, {"lr": lr})
        self._step_supports_amp_scaling = True
        self.seen: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        has = hasattr(self, "grad_scale"), hasattr(self, "found_inf")
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        numbers = [None if value is None else float(value) for value in (scale, found)]
        self.seen.append((*has, *numbers))
        for group in self.param_groups:
            for param in group["params"]:
                if not found and param.grad is not None:
                    param -= group["lr"] * param.grad / (1 if scale is None else scale)


class Fused(torch.optim.SGD):
    """A class derived from torch's, whose step looks at what it was given."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5, momentum=0.5, fused=True)
        self.seen: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        has = hasattr(self, "grad_scale"), hasattr(self, "found_inf")
        self.seen.append((*has, float(getattr(self, "found_inf", -1.0))))
        return super().step()


class Older(torch.optim.Optimizer):
    """torch's older protocol: the step takes the scaler."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self._step_supports_amp_scaling = True
        self.seen: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:  # type: ignore[override]
        self.seen.append(None if grad_scaler is None else (type(grad_scaler).__name__, grad_scaler.get_scale()))
        if grad_scaler is not None:
            grad_scaler.unscale_(self)
            found = grad_scaler._found_inf_per_device(self)
            if any(flag.item() for flag in found.values()):
                return "skipped"
        for param in self.param_groups[0]["params"]:
            param -= 0.5 * param.grad
        return "stepped"


def run(scaler: Any, kind: Any, spoilt: list[bool], *, unscales: bool = False) -> tuple[Any, ...]:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, results = kind([weight]), []
    for bad in spoilt:
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if bad:
            assert weight.grad is not None
            weight.grad[0] = float("inf")
        if unscales:
            scaler.unscale_(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of the older protocol
            results.append(scaler.step(optimizer))
        assert not hasattr(optimizer, "found_inf")
        if isinstance(scaler, xamp.GradScaler):
            assert scaler.last_step.name == ("SKIPPED" if bad else "APPLIED")
        scaler.update()
    return weight.tolist(), optimizer.seen, results, scaler.get_scale()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("spoilt", [[False], [True], [False, True, False], [True, False, True]])
@pytest.mark.parametrize("kind", [Own, Older])
def test_a_scaler_gives_what_torchs_gives(kind: Any, spoilt: list[bool], unscales: bool) -> None:
    if kind is Older and unscales:
        pytest.skip("it unscales itself, and both scalers refuse a second time")
    options: Any = {"init_scale": 8.0, "growth_interval": 2}
    ours, theirs = xamp.GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    assert run(ours, kind, spoilt, unscales=unscales) == run(theirs, kind, spoilt, unscales=unscales)
    assert (ours.stats.applied, ours.stats.skipped) == (spoilt.count(False), spoilt.count(True))


def test_a_class_derived_from_torchs_sees_them_in_its_first_step_too() -> None:
    """The host decides on that step, for torch's kernel makes momentum of uninitialised memory where it skips."""
    _, seen, _, _ = run(xamp.GradScaler(init_scale=8.0), Fused, [False, False, True])
    assert seen == [(True, True, 0.0), (True, True, 0.0), (True, True, 1.0)]


def test_a_grad_scale_of_the_users_own_counts() -> None:
    for scaler in (xamp.GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer: Any = Own([weight])
        optimizer.grad_scale = torch.tensor(2.0)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        assert optimizer.seen == [(True, True, 16.0, 0.0)]


@pytest.mark.parametrize("spoilt", [[False, False], [True, False], [False, True]])
def test_a_managed_optimizer_has_them_from_the_first_step_on(spoilt: list[bool]) -> None:
    net: Any = torch.nn.Linear(2, 1, bias=False)
    optimizer: Any = Own(net.parameters())
    xamp.initialize(net, optimizer, level="O1", init_scale=8.0, verbosity=0)
    for bad in spoilt:
        before = net.weight.detach().clone()
        optimizer.zero_grad()
        with xamp.scale_loss(net(torch.ones(1, 2)).sum(), optimizer) as scaled:
            scaled.backward()
            if bad:
                net.weight.grad[0, 0] = float("inf")
        optimizer.step()
        assert torch.equal(net.weight, before) is bad
    assert optimizer.seen == [(True, True, None, float(bad)) for bad in spoilt]


def test_which_optimizers_these_are() -> None:
    weight = [torch.nn.Parameter(torch.ones(1))]
    made = [Own(weight), Older(weight), Fused(weight), torch.optim.SGD(weight)]
    assert [honours_found_inf(one) for one in made] == [True, False, True, False]
    assert [takes_grad_scaler(one) for one in made] == [False, True, False, False]
    assert [is_torchs(type(one)) for one in made] == [False, False, True, True]
