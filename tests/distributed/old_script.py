"""A script as people wrote them for two GPUs in 2019, which knows nothing of xamp; run by test_run_ranks.py.

At the end each rank compares its gradient with that of plain batch norm over the batches of all ranks.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--world", default=-1, type=int)
parser.add_argument("folder")
args = parser.parse_args()

torch.cuda.set_device(args.local_rank)
size = torch.cuda.device_count() if args.world == 0 else int(os.environ["WORLD_SIZE"])
dist.init_process_group(backend="nccl", init_method=args.dist_url, world_size=size, rank=args.local_rank)

torch.manual_seed(0)
plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)).double()
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1)).double()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(args.local_rank)
parallel = nn.parallel.DistributedDataParallel(model, device_ids=[args.local_rank], output_device=args.local_rank)
batches = torch.randn(2, 5, 2, 2, 2, dtype=torch.double)
for _ in range(2):
    parallel.zero_grad()
    parallel(batches[args.local_rank].cuda(non_blocking=True)).square().mean().backward()
    plain.zero_grad()
    plain(batches.flatten(0, 1)).square().mean().backward()
pairs = list(zip(parallel.module.parameters(), plain.parameters(), strict=True))
buffers = list(zip(parallel.module.buffers(), plain.buffers(), strict=True))
parallel.eval()
found = {
    "rank": dist.get_rank(),
    "world": dist.get_world_size(),
    "backend": dist.get_backend(),
    "gradients": max(
        float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None
    ),
    "buffers": max(float((a - b).abs().max()) for a, b in buffers),
    "evaluates": list(parallel(batches[0]).shape),
}
with open(f"{args.folder}/{args.local_rank}.json", "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
