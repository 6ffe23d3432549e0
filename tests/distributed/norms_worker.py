"""What each process of test_norms.py runs: gradients that are sharded in every way and clipped, against one process.

The reference is the same model, whole, in fp64, that sees the batches of all ranks. Each case tells how far norm and
clipped step are from it. Writes one JSON file a rank.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import xamp

LR, MAX_NORM, LIMIT = 0.1, 0.05, 0.02


def make() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7), nn.LayerNorm(7), nn.Linear(7, 5)  # 7 and 5: uneven shards
    return nn.Sequential(*layers)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def zero(model: nn.Module) -> nn.Module:
    """Its optimizer, which :func:`backward` makes, has a part of the states."""
    return ddp(model)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_original_parameters(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_and_whole(model: Any) -> nn.Module:
    """The first layer is sharded, the second copied by FSDP1, the rest by DDP."""
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model[0] = FullyShardedDataParallel(model[0], **options)
    model[2] = FullyShardedDataParallel(model[2], sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    model[3], model[4] = DistributedDataParallel(model[3]), DistributedDataParallel(model[4])
    return model  # type: ignore[no-any-return]


def fsdp1_hybrid(model: nn.Module) -> nn.Module:
    found = mesh(dist.get_world_size() // 2, 2, names=("across", "within"))
    return FullyShardedDataParallel(
        *(model,),
        device_id=torch.device("cpu"),
        device_mesh=found,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )


def fsdp2(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=mesh(dist.get_world_size()))
    return model


def fsdp2_and_whole(model: Any) -> nn.Module:
    """Two layers are sharded, and the others are in DDPs."""
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh(dist.get_world_size()))
    model[3], model[4] = DistributedDataParallel(model[3]), DistributedDataParallel(model[4])
    return model  # type: ignore[no-any-return]


def fsdp2_hybrid(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=mesh(dist.get_world_size() // 2, 2, names=("across", "within")))
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """All ranks see the same batch; the last layer is whole on each of them."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh(dist.get_world_size()), plan)


def sequence_parallel(model: nn.Module) -> nn.Module:
    """Each rank has some rows of what the norm sees, so its gradient of the norm's weight is one summand of all."""
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0),
        "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh(dist.get_world_size()), plan)


def tensor_parallel_and_fsdp2(model: Any) -> nn.Module:
    """A mesh of two dimensions: two layers are divided along both."""
    found = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=found["data"])
    return model  # type: ignore[no-any-return]


def tensor_parallel_and_fsdp1(model: Any) -> nn.Module:
    found = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    told: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(model, device_mesh=found["data"], **told)


def flattened_refusal() -> str:
    """What clipping says where one flat parameter holds divided ones and whole ones."""
    model: Any = make()
    found = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), device_mesh=found["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    with xamp.scale_loss(model(batch(0)).square().mean(), optimizer) as scaled:
        scaled.backward()
    try:
        xamp.clip_grad_norm_(optimizer, MAX_NORM)
    except xamp.StateError as error:
        return str(error)
    return "clipped"


Case = Callable[[Any], nn.Module]
CASES: tuple[Case, ...] = (
    *(ddp, zero, fsdp1, fsdp1_original_parameters, fsdp1_and_whole, fsdp1_hybrid),
    *(fsdp2, fsdp2_and_whole, fsdp2_hybrid, tensor_parallel, sequence_parallel),
    tensor_parallel_and_fsdp2,
    tensor_parallel_and_fsdp1,
)


def seen_by(case: Case, rank: int) -> int:
    """The number of the batch that a rank sees: ranks that share the work on a batch see the same."""
    if case in (tensor_parallel, sequence_parallel):
        return 0
    return rank // 2 if case in (tensor_parallel_and_fsdp2, tensor_parallel_and_fsdp1) else rank


def gradients(case: Case) -> Any:
    """A whole model in fp64, with the gradients of the batches of all ranks."""
    model = make().double()
    batches = [batch(seen_by(case, rank)).double() for rank in range(dist.get_world_size())]
    torch.stack([model(x).square().mean() for x in batches]).mean().backward()
    return model


def whole(model: nn.Module) -> list[torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def backward(case: Case, level: str) -> tuple[Any, Any]:
    """The model and its optimizer, with unscaled gradients."""
    model: Any = case(make())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=LR)
    if case is zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=LR)
    xamp.initialize(model, optimizer, level, loss_scale=1024.0, verbosity=0)
    with xamp.scale_loss(model(batch(seen_by(case, dist.get_rank()))).square().mean(), optimizer) as scaled:
        scaled.backward()
    return model, optimizer


def steps_off(model: Any, wanted: list[torch.Tensor]) -> float:
    """How far the weights are from what they should be, as a share of the largest move of one."""
    moved = max(float((a.detach() - b).abs().max()) for a, b in zip(make().parameters(), wanted, strict=True))
    return max(float((a - b).abs().max()) for a, b in zip(whole(model), wanted, strict=True)) / moved


def clip_norm(case: Case, level: str, norm_type: float) -> dict[str, Any]:
    model, optimizer = backward(case, level)
    session: Any = xamp.session(optimizer)
    unclipped = session.metrics()["grad_norm"]
    norm = float(xamp.clip_grad_norm_(optimizer, MAX_NORM, norm_type))
    optimizer.step()
    params = list(gradients(case).parameters())
    wanted = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in params]), norm_type))
    return {
        "norm": abs(norm - wanted) / wanted,
        "weights": steps_off(model, [(p - LR * p.grad * min(1.0, MAX_NORM / wanted)).detach() for p in params]),
        "value": norm,
        "logged": session.metrics()["grad_norm"] == norm,
        "unclipped": None if math.isnan(unclipped) else abs(unclipped - wanted) / wanted,
    }


def clip_value(case: Case, level: str) -> float:
    """How far a step is off where each element of the whole gradient is clipped."""
    model, optimizer = backward(case, level)
    xamp.clip_grad_value_(optimizer, LIMIT)
    optimizer.step()
    params = list(gradients(case).parameters())
    assert 0 < sum(int((p.grad.abs() > LIMIT).sum()) for p in params) < sum(p.numel() for p in params)
    return steps_off(model, [(p - LR * p.grad.clamp(-LIMIT, LIMIT)).detach() for p in params])


def one_without_gradient() -> float:
    """A rank that holds no element of any gradient takes part all the same."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    sharded: Any = copy.deepcopy(model)
    fully_shard(sharded, mesh=mesh(dist.get_world_size()))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=LR)
    xamp.initialize(sharded, optimizer, "O0", loss_scale=8.0, verbosity=0)
    with xamp.scale_loss(sharded(torch.full((1, 1), 3.0)).sum(), optimizer) as scaled:
        scaled.backward()
    return float(xamp.clip_grad_norm_(optimizer, 1.0, math.inf))


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    norms: dict[str, Any] = {}
    values: dict[str, float] = {}
    cases = CASES if dist.get_world_size() > 2 else CASES[:-1]  # torch's FSDP1 takes no DTensors in one copy
    for place, case in enumerate(cases):
        # In turn: each case at both levels.
        last, level = (("O0", 1.0), "O1") if place % 2 else (("O1", 2.0), "O0")
        for norm_level, norm_type in (("O0", 2.0), ("O0", math.inf), last):
            norms[f"{case.__name__} {norm_level} {norm_type}"] = clip_norm(case, norm_level, norm_type)
        values[f"{case.__name__} {level}"] = clip_value(case, level)
    found = {"norms": norms, "values": values, "no element": one_without_gradient()}
    found["flattened"] = flattened_refusal() if dist.get_world_size() > 2 else ""
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
