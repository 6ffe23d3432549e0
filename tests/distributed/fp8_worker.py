"""What each process of test_fp8_ranks.py runs: DDP and FSDP2 in fp8, and one process that takes the shares in turn.

Writes one JSON file a rank: by wrapper and recipe the weights after some steps, and the settings that differ.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.registry import fp8_widths
from xamp.values.recipes import RECIPES

LR, STEPS, ROWS = 0.1, 3, 16


class Net(nn.Module):
    """Three layers, the second of which may be recomputed."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = checkpoint(self.second, x, use_reentrant=False) if self.recomputes else self.second(x)
        made: torch.Tensor = self.third(torch.tanh(x))
        return made


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def start(net: Any, recipe: str) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    xamp.initialize(net, optimizer, "fp8", fp8=recipe, keep_bf16=(), verbosity=0)
    return optimizer


def step(net: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    for each in batches:
        loss = net(each).square().mean() / len(batches)
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
    optimizer.step()


def weights(net: Any) -> list[list[float]]:
    found: list[Any] = [*net.parameters()]
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().flatten().tolist() for p in found]


def trained(net: Any, recipe: str) -> list[Any]:
    optimizer, found = start(net, recipe), []
    for number in range(STEPS):
        step(net, optimizer, [batch(number, dist.get_rank())])
        found.append(weights(net))
    return found


def alone(recipe: str) -> list[Any]:
    net = Net(recomputes=False)
    optimizer, found = start(net, recipe), []
    for number in range(STEPS):
        step(net, optimizer, [batch(number, rank) for rank in range(dist.get_world_size())])
        found.append(weights(net))
    return found


def sharded(*, recomputes: bool) -> Any:
    net: Any = Net(recomputes)
    fully_shard(net.second)
    return fully_shard(net)


def fsdp1(recipe: str) -> Any:
    """What is said of the layers of a model whose weights are flat shards."""
    net = FullyShardedDataParallel(Net(recomputes=False), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = start(net, recipe)
    step(net, optimizer, [batch(0, dist.get_rank())])
    return xamp.session(net).fp8


def unlike() -> str:
    """What is said where ranks have different recipes."""
    net = DistributedDataParallel(Net(recomputes=False))
    optimizer = start(net, [*RECIPES][dist.get_rank()])
    try:
        step(net, optimizer, [batch(0, 0)])
    except xamp.PolicyError as error:
        return str(error)
    return ""


def measured(folder: Path) -> float | None:
    """The width from which layers gain, where each rank has measured another one on its machine."""
    os.environ["XAMP_CACHE"] = str(folder / f"cache{dist.get_rank()}")
    fp8_widths.keep(torch.device("cpu"), {"tensorwise": 64 * (1 + dist.get_rank())})
    net = DistributedDataParallel(Net(recomputes=False))
    xamp.initialize(net, level="fp8", verbosity=0)
    return xamp.session(net).policy.fp8_gains_from


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    found: dict[str, Any] = {recipe: {"alone": alone(recipe)} for recipe in RECIPES}
    for recipe in RECIPES:
        found[recipe]["ddp"] = trained(DistributedDataParallel(Net(recomputes=False)), recipe)
        found[recipe]["fsdp2"] = trained(sharded(recomputes=False), recipe)
        found[recipe]["fsdp2, recomputed"] = trained(sharded(recomputes=True), recipe)
        found[recipe]["fsdp1"] = [str(layer) for layer in fsdp1(recipe)]
    found["initial"] = weights(Net(recomputes=False))
    found["unlike"] = unlike()
    found["measured"] = measured(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)
