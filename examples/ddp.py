"""Data-parallel training: ``torchrun --nproc-per-node 2 examples/ddp.py``; without torchrun it is one rank."""

from __future__ import annotations

import os

import torch
import torch.distributed
from options import read_options
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import xamp


def main(words: list[str] | None = None) -> float:
    """Train, print the loss on rank 0, and return it."""
    options = read_options(__doc__, 200, words)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if xamp.device_type() != "cpu":
        xamp.accel.set_device(local)
    if "RANK" in os.environ:
        torch.distributed.init_process_group(xamp.distributed_backend())
    else:
        store = HashStore()
        torch.distributed.init_process_group(xamp.distributed_backend(), store=store, rank=0, world_size=1)
    rank, device = torch.distributed.get_rank(), xamp.device()
    model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    wrapped = DistributedDataParallel(model)  # after initialize: right at every level
    torch.manual_seed(rank)  # each rank has data of its own
    for _ in range(options.steps):
        x = torch.rand(64, 2, device=device) * 2 - 1
        optimizer.zero_grad()
        loss = mse_loss(wrapped(x), x.prod(1, keepdim=True))
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
    if rank == 0:
        print(f"{torch.distributed.get_world_size()} ranks, loss {loss.item():.4f}, {xamp.session(model).last_step}")
    torch.distributed.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
