"""FSDP around a model: where xamp works with it, and where it refuses before anything trains wrongly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import xamp
from xamp.errors import StateError
from xamp.policy import levels_where

MASTERS = levels_where(lambda row: row.master_weights)
OPERATORS = levels_where(lambda row: row.casts_operators)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module, how: str) -> nn.Module:
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return model
    strategy = ShardingStrategy.NO_SHARD  # what FSDP1 does with one rank
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True
    )


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((4, 8), 0.1 * (step + 1))
        with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    found = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [p.detach().float().clone() for p in found]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("level", MASTERS)
def test_sharded_before_is_refused_and_the_remedy_trains(level: str, how: str) -> None:
    model = shard(net(), how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(StateError, match=r"FSDP already shards .* Use O1 or O4: they leave parameters in fp32"):
        xamp.initialize(model, optimizer, level=level, verbosity=0)
    for remedy in OPERATORS:
        plain = net()
        inner = copy.deepcopy(plain)
        reference = torch.optim.SGD(plain.parameters(), lr=0.5)
        xamp.initialize(plain, reference, level=remedy, verbosity=0)
        train(plain, reference)
        sharded = shard(inner, how)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
        xamp.initialize(sharded, optimizer, level=remedy, verbosity=0)
        before = weights(sharded)
        train(sharded, optimizer)
        assert not same(before, weights(sharded))
        assert same(weights(plain), weights(sharded))


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("level", MASTERS)
def test_sharded_afterwards_is_refused(level: str, used: bool, how: str) -> None:
    """Whether or not it trained before: the masters of whole parameters would move, and the shards would not."""
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    if used:
        train(model, optimizer, 1)
    sharded = shard(model, how)
    with pytest.raises(StateError, match=rf"FSDP shards this model since initialize, and at level {level} .*O1 or O4"):
        train(sharded, optimizer)
