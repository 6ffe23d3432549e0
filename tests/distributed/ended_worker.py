"""What each process of test_ended.py runs: training under DDP, in which rank 1 ends at the third step."""

from __future__ import annotations

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp


def end(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("a bad batch")


def train(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", init_scale=1024.0, verbosity=0)
    ddp = DistributedDataParallel(model)
    for step in range(1000):
        optimizer.zero_grad()
        with xamp.scale_loss(ddp(torch.ones(4, 6)).square().mean(), optimizer) as scaled:
            if step == 2 and dist.get_rank() == 1:
                end(how)
            scaled.backward()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    try:
        train(sys.argv[1])
    except RuntimeError as error:
        print(f"rank {dist.get_rank()} was told: {error}", file=sys.stderr, flush=True)
        raise
