"""Shards within a node and copies between nodes: what each process of test_engines.py runs."""

from __future__ import annotations

from typing import Any

import engine_cases
import torch.distributed as dist
from engine_cases import Case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def two_dimensions() -> DeviceMesh:
    return engine_cases.mesh(dist.get_world_size() // 2, 2, names=("across", "within"))


def copies() -> DeviceMesh:
    """As many copies as ranks, each in one piece."""
    return engine_cases.mesh(dist.get_world_size(), 1, names=("across", "within"))


def fsdp2(model: Any, _: str) -> Any:
    return fully_shard(model, mesh=two_dimensions())


def fsdp2_of_copies(model: Any, _: str) -> Any:
    return fully_shard(model, mesh=copies())


def fsdp1(model: Any, _: str) -> Any:
    hybrid = ShardingStrategy.HYBRID_SHARD
    told: dict[str, Any] = {"device_id": engine_cases.device, "device_mesh": two_dimensions(), "use_orig_params": True}
    return FullyShardedDataParallel(model, sharding_strategy=hybrid, **told)


CASES = {"fsdp2": Case(fsdp2), "fsdp2 of copies": Case(fsdp2_of_copies), "fsdp1": Case(fsdp1)}

if __name__ == "__main__":
    engine_cases.work(CASES)
