"""Tier levels, first part: how each level changes a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.policy import LEVELS
from xamp.testing.exact import assert_same, picture
from xamp.testing.lane import Lane
from xamp.testing.nets import ran_in
from xamp.testing.tier import Tier, at_levels, every_level

__all__ = ["Levels", "Net", "batch", "start", "train"]


class Net(nn.Module):
    """A linear layer, a batch norm, another linear layer. Records the dtype of each layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, inner: Callable[[torch.Tensor], Any] | None = None) -> torch.Tensor:
        """(batch, 4) -> (batch, 3). Calls ``inner`` with the first layer's output."""
        hidden = self.first(x)
        normed = self.norm(hidden)
        if inner is not None:
            inner(hidden)
        out: torch.Tensor = self.last(normed)
        # One assignment, because several threads may run this.
        self.seen = {"into": x.dtype, "first": hidden.dtype, "norm": normed.dtype, "last": out.dtype}
        return out


class Seal(type):
    """A metaclass whose classes cannot have subclasses."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if any(isinstance(base, Seal) for base in bases):
            raise TypeError(f"{name} is sealed")
        return super().__new__(cls, name, bases, namespace)


class Sealed(nn.Linear, metaclass=Seal):
    """A layer that xamp cannot put under a policy; this shows only when xamp tries."""


class Levels(Tier):
    """How each level changes a model."""

    tier = "levels"

    @every_level
    def test_effective(self, lane: Lane, level: str) -> None:
        """Parameters, masters, operators and outputs have the level's dtypes, and the loss scale is the level's."""
        model, optimizer = start(lane, level)
        row, full = LEVELS[level], torch.float32
        lower = full if row.dtype is None else getattr(torch, row.dtype)
        out = model(batch(lane))
        assert out.dtype == full
        policy = xamp.session(model).policy
        assert (policy.level, policy.dtype) == (level, lower)
        stored = lower if row.casts_parameters else full
        norm = full if row.keep_batchnorm_fp32 else stored
        found = {name: parameter.dtype for name, parameter in model.named_parameters()}
        assert found == {name: norm if name.startswith("norm") else stored for name in found}
        assert {p.dtype for p in xamp.master_params(optimizer)} == {full if row.master_weights else stored}
        assert model.seen["first"] == model.seen["last"] == lower
        assert model.norm.running_mean.dtype == norm
        assert xamp.loss_scale(optimizer) == (2.0**16 if row.loss_scale == "dynamic" else row.loss_scale)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @at_levels(lambda row: row.dtype is not None)
    def test_dtype_asked_for(self, lane: Lane, level: str, dtype: str) -> None:
        """``dtype=`` runs any level in either lower dtype; a dtype that the device does not declare is refused."""
        lane.need(level)
        model, lower = Net().to(lane.device), getattr(torch, dtype)
        before = picture(model)
        if not lane.declares(dtype):
            with pytest.raises(UnsupportedPolicy, match=dtype):
                xamp.initialize(model, level=level, dtype=lower, verbosity=0)
            assert_same(picture(model), before)
            return
        xamp.initialize(model, level=level, dtype=lower, verbosity=0)
        assert model(batch(lane)).dtype == torch.float32
        assert model.seen["first"] == model.seen["last"] == lower
        assert model.first.weight.dtype == (lower if LEVELS[level].casts_parameters else torch.float32)

    @pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
    @every_level
    def test_script_module(self, lane: Lane, level: str) -> None:
        """Levels that keep parameters in fp32 run and train a ScriptModule; the others refuse it, unchanged."""
        lane.need(level)
        width = 64 + list(LEVELS).index(level)  # torch's compiled code for a class keeps the first dtype that it sees
        twin = nn.Linear(4, width).to(lane.device)
        try:
            model: Any = torch.jit.script(copy.deepcopy(twin))
        except (RuntimeError, NotImplementedError) as error:
            lane.lacks(f"torch.jit.script ({type(error).__name__})")
        before, optimizer = copy.deepcopy(model.state_dict()), SGD(model.parameters(), lr=0.125)
        if LEVELS[level].casts_parameters:
            with pytest.raises(UnsupportedPolicy, match="ScriptModule"):
                xamp.initialize(model, optimizer, level=level, verbosity=0)
            assert_same(model.state_dict(), before)
            return
        xamp.initialize(model, optimizer, level=level, verbosity=0)
        xamp.initialize(twin, level=level, verbosity=0)
        for _ in range(4):  # torch.jit profiles the first calls and runs optimized code in the others
            found = model(batch(lane)).detach()
            assert ran_in(found) == getattr(torch, LEVELS[level].dtype or "float32")
            torch.testing.assert_close(found, twin(batch(lane)).detach(), rtol=0.02, atol=0.02)
            train(model, optimizer, lane)
            twin.load_state_dict(model.state_dict())
        assert not torch.equal(model.weight, before["weight"])

    @every_level
    def test_float64_stays(self, lane: Lane, level: str) -> None:
        """float64 parameters, buffers and inputs are not cast, and compute in float64."""
        lane.need(level)
        try:
            layer = nn.Linear(4, 4).to(lane.device, torch.float64)
            x = torch.rand(2, 4, dtype=torch.float64).to(lane.device)
            wanted = layer(x)
        except (RuntimeError, TypeError) as error:
            lane.lacks(f"float64 ({type(error).__name__})")
        model = nn.Sequential(layer)
        xamp.initialize(model, level=level, verbosity=0)
        assert layer.weight.dtype == torch.float64
        found = model(x)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, wanted)

    @every_level
    def test_keep_fp32(self, lane: Lane, level: str) -> None:
        """A module in ``keep_fp32`` has fp32 parameters and computes in fp32, to the bit."""
        lane.need(level)
        layer = nn.Linear(8, 8).to(lane.device)
        twin, model = copy.deepcopy(layer), nn.Sequential(nn.Linear(4, 8).to(lane.device), layer)
        seen: list[tuple[torch.Tensor, ...]] = []
        layer.register_forward_hook(lambda _, args, out: seen.append((args[0].detach(), out.detach())))
        xamp.initialize(model, level=level, keep_fp32=["1"], verbosity=0)
        assert {p.dtype for p in layer.parameters()} == {torch.float32}
        model(batch(lane))
        ((given, made),) = seen
        assert torch.equal(made.float(), twin(given.float()).to(made.dtype).float())

    @every_level
    def test_all_or_nothing(self, lane: Lane, level: str) -> None:
        """If ``initialize`` raises half-way, it leaves models and optimizer as they were."""
        lane.need(level)
        model, sealed = Net().to(lane.device), Sealed(4, 3).to(lane.device)
        optimizer = SGD([*model.parameters(), *sealed.parameters()], lr=0.125)
        before = picture(model, optimizer), type(model), type(optimizer)
        with pytest.raises(PolicyError, match="Sealed"):
            xamp.initialize([model, sealed], optimizer, level=level, verbosity=0)
        assert_same(picture(model, optimizer), before[0])
        assert (type(model), type(optimizer)) == before[1:]
        model(batch(lane))
        assert set(model.seen.values()) == {torch.float32}


def start(lane: Lane, level: str) -> tuple[Any, Any]:
    """A :class:`Net` at ``level``, and SGD over it."""
    lane.need(level)
    model = Net().to(lane.device)
    optimizer = SGD(model.parameters(), lr=0.125)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    return model, optimizer


def batch(lane: Lane) -> torch.Tensor:
    """The input, (8, 4); the same each time."""
    return torch.rand(8, 4, generator=torch.Generator().manual_seed(2)).to(lane.device)


def train(model: Any, optimizer: Any, lane: Lane) -> None:
    """Take one training step."""
    optimizer.zero_grad()
    with xamp.scale_loss(model(batch(lane)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
