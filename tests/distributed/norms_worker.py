"""What each process of test_norms.py runs: the norm of gradients that are sharded in every way, against one process.

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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import xamp

LR, MAX_NORM = 0.1, 0.05


def make() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3), nn.Linear(3, 5))  # 3 and 5: uneven shards


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_original_parameters(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_and_whole(model: Any) -> nn.Module:
    """The first layer is sharded, the second copied by FSDP1, the third by DDP."""
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model[0] = FullyShardedDataParallel(model[0], **options)
    model[2] = FullyShardedDataParallel(model[2], sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    model[3] = DistributedDataParallel(model[3])
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
    """Two layers are sharded, and the last one is in a DDP."""
    for part in (model[0], model[2]):
        fully_shard(part, mesh=mesh(dist.get_world_size()))
    model[3] = DistributedDataParallel(model[3])
    return model  # type: ignore[no-any-return]


def fsdp2_hybrid(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=mesh(dist.get_world_size() // 2, 2, names=("across", "within")))
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """All ranks see the same batch; the last layer is whole on each of them."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, mesh(dist.get_world_size()), plan)


def tensor_parallel_and_fsdp2(model: Any) -> nn.Module:
    """A mesh of two dimensions: each layer but the last is divided along both."""
    found = mesh(dist.get_world_size() // 2, 2, names=("data", "tensor"))
    parallelize_module(model, found["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=found["data"])
    return model  # type: ignore[no-any-return]


Case = Callable[[Any], nn.Module]
CASES: tuple[Case, ...] = (
    *(ddp, fsdp1, fsdp1_original_parameters, fsdp1_and_whole, fsdp1_hybrid),
    *(fsdp2, fsdp2_and_whole, fsdp2_hybrid, tensor_parallel, tensor_parallel_and_fsdp2),
)


def seen_by(case: Case, rank: int) -> int:
    """The number of the batch that a rank sees: ranks that share the work on a batch see the same."""
    if case is tensor_parallel:
        return 0
    return rank // 2 if case is tensor_parallel_and_fsdp2 else rank


def reference(case: Case, norm_type: float) -> tuple[float, list[torch.Tensor]]:
    """The norm of the whole gradient, and the weights after a clipped step."""
    model = make().double()
    batches = [batch(seen_by(case, rank)).double() for rank in range(dist.get_world_size())]
    torch.stack([model(x).square().mean() for x in batches]).mean().backward()
    norm = float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]), norm_type))
    with torch.no_grad():
        return norm, [p - LR * p.grad * min(1.0, MAX_NORM / norm) for p in model.parameters()]


def whole(model: nn.Module) -> list[torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()]


def train(case: Case, level: str, norm_type: float) -> dict[str, Any]:
    zero = case is ddp and level == "O1"
    model: Any = case(make())
    params = model.parameters()
    made = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=LR) if zero else torch.optim.SGD(params, lr=LR)
    optimizer: Any = made
    xamp.initialize(model, optimizer, level, loss_scale=1024.0, verbosity=0)
    with xamp.scale_loss(model(batch(seen_by(case, dist.get_rank()))).square().mean(), optimizer) as scaled:
        scaled.backward()
    unclipped = xamp.session(optimizer).metrics()["grad_norm"]
    norm = float(xamp.clip_grad_norm_(optimizer, MAX_NORM, norm_type))
    optimizer.step()
    wanted, weights = reference(case, norm_type)
    off = max(float((a - b).abs().max()) for a, b in zip(whole(model), weights, strict=True))
    moved = max(float((a - b).abs().max()) for a, b in zip(make().state_dict().values(), weights, strict=True))
    logged = xamp.session(optimizer).metrics()["grad_norm"]
    return {
        "norm": abs(norm - wanted) / wanted,
        "weights": off / moved,
        "value": norm,
        "logged": logged == norm,
        "unclipped": None if math.isnan(unclipped) else abs(unclipped - wanted) / wanted,
    }


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
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found: dict[str, Any] = {}
    for case in CASES:
        for level, norm_type in (("O0", 2.0), ("O0", math.inf), ("O0", 1.0), ("O1", 2.0)):
            found[f"{case.__name__} {level} {norm_type}"] = train(case, level, norm_type)
    found["no element"] = one_without_gradient()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
