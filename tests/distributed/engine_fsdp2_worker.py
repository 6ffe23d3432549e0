"""fully_shard: what each process of test_engines.py runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import engine_cases
import torch.distributed as dist
from engine_cases import Case
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import xamp


def plain(model: Any, _: str, **options: Any) -> Any:
    return fully_shard(model, mesh=engine_cases.mesh(dist.get_world_size()), **options)


def blocks(model: Any, level: str) -> Any:
    """As users of large models do it: the parts first, all with the policy of the level; the rest in the root."""
    mesh, policy = engine_cases.mesh(dist.get_world_size()), xamp.fsdp_policy(level)
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole_weights(model: Any, level: str) -> Any:
    """Weights stay gathered between forward and backward, as small models have it."""
    return plain(model, level, reshard_after_forward=False)


def offloaded(model: Any, level: str) -> Any:
    """Shards and optimizer are on the host."""
    return plain(model, level, offload_policy=CPUOffloadPolicy(pin_memory=False))


def compiled(model: Any, level: str) -> Any:
    return blocks(engine_cases.compiled(model), level)


def checkpointed(model: Any, level: str) -> Any:
    return blocks(engine_cases.checkpointed(model), level)


def some(model: Any, _: str) -> Any:
    """One layer is sharded; the others are whole, and all ranks see the same batch, so that nobody need average."""
    fully_shard(model[2], mesh=engine_cases.mesh(dist.get_world_size()))
    return model


@contextlib.contextmanager
def postponed(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


CASES = {
    "plain": Case(plain),
    "blocks": Case(blocks),
    "whole_weights": Case(whole_weights),
    "offloaded": Case(offloaded),
    "checkpointed": Case(checkpointed),
    "some": Case(some, seen=engine_cases.alone),
    "no_sync": Case(plain, micro=2, postponed=postponed),
    "no_sync, whole_weights": Case(whole_weights, micro=2, postponed=postponed),
}

if __name__ == "__main__":
    engine_cases.work(
        CASES,
        {"dtypes": lambda: engine_cases.dtypes(plain), "averages": lambda: engine_cases.averages(plain)},
        on_two_ranks={"compiled": Case(compiled)},
    )
