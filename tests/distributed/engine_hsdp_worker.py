"""Shards within a node and copies between nodes: what each process of test_engines.py runs."""

from __future__ import annotations

import functools
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import Case
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

import xamp


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


def moving_scales(level: str) -> dict[str, Any]:
    """Micro-batches that are added up between the copies with the last one, or each, while the loss scale grows."""

    def trained(later: bool) -> tuple[torch.Tensor, list[float]]:
        model: Any = fsdp2_of_copies(engine_cases.net().to(engine_cases.device), level)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        told: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 8.0, "growth_interval": 1}
        xamp.initialize(model, optimizer, level, verbosity=0, **told)
        scales = []
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                x, target = (each.to(engine_cases.device) for each in engine_cases.batch(step, micro, dist.get_rank()))
                model.set_requires_all_reduce(micro == 2 or not later)
                with xamp.scale_loss(engine_cases.loss_of(model(x), target), optimizer) as scaled:
                    scaled.backward()
                scales.append(xamp.loss_scale(optimizer))
            optimizer.step()
        return torch.cat([p.flatten() for p in engine_cases.whole(model).values()]), scales

    start = torch.cat([p.detach().flatten() for p in engine_cases.net().parameters()])
    (later, scales), (each, _) = trained(True), trained(False)
    return {"off": float((later - each).abs().max() / (each - start).abs().max()), "scales": scales}


CASES = {"fsdp2": Case(fsdp2), "fsdp2 of copies": Case(fsdp2_of_copies), "fsdp1": Case(fsdp1)}

if __name__ == "__main__":
    engine_cases.work(
        CASES, {f"moving scales {level}": functools.partial(moving_scales, level) for level in ("O1", "O5")}
    )
