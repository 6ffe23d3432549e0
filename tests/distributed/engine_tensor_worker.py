"""Tensor parallelism with DTensor parameters: what each process of test_engines.py runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import LR, MOMENTUM, Case
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def some(model: Any, _: str) -> Any:
    """Two layers are divided; the others are plain tensors, whole on each rank."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, engine_cases.mesh(dist.get_world_size()), plan)


def all_of_them(model: Any, _: str) -> Any:
    """The others are DTensors too, whole on each rank."""
    mesh = engine_cases.mesh(dist.get_world_size())
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=False)})
    for part in (model[3], model[4]):
        distribute_module(part, mesh)
    model[4].register_forward_hook(lambda module, inputs, output: output.to_local())
    return model


def two_meshes(model: Any, _: str) -> Any:
    """Each of the two divided layers lies on a mesh of its own."""
    first, second = (engine_cases.mesh(dist.get_world_size(), names=(name,)) for name in ("one", "other"))
    parallelize_module(model[0], first, ColwiseParallel())
    parallelize_module(model[2], second, RowwiseParallel())
    return model


def with_fsdp2(model: Any, _: str) -> Any:
    """A mesh of two dimensions: parameters are divided along both."""
    found = engine_cases.mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=found["data"])


def with_fsdp1(model: Any, _: str) -> Any:
    """The same under FSDP1, which keeps no DTensor. The last two layers are whole on the ranks of a tensor."""
    found = engine_cases.mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    told: dict[str, Any] = {"device_id": engine_cases.device, "device_mesh": found["data"], "use_orig_params": True}
    return FullyShardedDataParallel(model, **told)


def one_by_one(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Some parameters are DTensors, others are not: torch's operators on lists refuse such."""
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, foreach=False)


CASES = {
    "some": Case(some, seen=engine_cases.alone, optimizer=one_by_one),
    "all": Case(all_of_them, seen=engine_cases.alone),
    "two meshes": Case(two_meshes, seen=engine_cases.alone, optimizer=one_by_one),
    "with fsdp2": Case(with_fsdp2, seen=lambda rank: rank // 2),
}
if int(os.environ.get("WORLD_SIZE", "1")) > 2:  # torch's FSDP1 does not take DTensors where it has one copy
    CASES["with fsdp1"] = Case(with_fsdp1, seen=lambda rank: rank // 2)

if __name__ == "__main__":
    engine_cases.work(CASES)
