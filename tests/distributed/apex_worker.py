"""What each of the processes of test_apex_ranks.py runs: parts of ``xamp.apex.parallel`` against one process.

Writes one JSON file a rank. The references see the batches of all ranks at once.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xamp.apex import amp
from xamp.apex.optimizers import FusedAdam
from xamp.apex.parallel import (
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from xamp.apex.parallel.distributed import flat_dist_call

SIZES = (5, 3)  # of the batches of the two ranks


def batches(seed: int, features: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, features, generator=generator) for size in SIZES]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def worst(found: Any, expected: Any) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def grads(module: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]


def sync_batch_norm(rank: int) -> dict[str, Any]:
    """Forward, gradients of inputs and weights, and running statistics, over unequal batches of three shapes."""
    found: dict[str, Any] = {}
    for shape in ((), (3,), (2, 2)):
        torch.manual_seed(1)
        xs = [torch.randn(size, 4, *shape) * 3 + 1 for size in SIZES]
        weights = [torch.randn_like(x) for x in xs]
        whole = torch.cat(xs).requires_grad_()
        reference = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)](4)
        nn.init.uniform_(reference.weight)
        norm = convert_syncbn_model(copy.deepcopy(reference))
        x = xs[rank].clone().requires_grad_()
        expected, out = reference(whole), norm(x)
        (expected * torch.cat(weights)).sum().backward()
        (out * weights[rank]).sum().backward()
        first = 0 if rank == 0 else SIZES[0]
        part = slice(first, first + SIZES[rank])
        assert whole.grad is not None
        assert x.grad is not None
        flat_dist_call(grads(norm), dist.all_reduce)
        sums = [grad * len(SIZES) for grad in grads(norm)]
        found[f"{len(shape)}"] = [
            worst([out], [expected[part]]),
            worst([x.grad], [whole.grad[part]]),
            worst(sums, grads(reference)),
            worst([norm.running_mean, norm.running_var], [reference.running_mean, reference.running_var]),
        ]
    return found


def groups(rank: int) -> dict[str, Any]:
    """Groups of one rank: each has its own statistics."""
    group = create_syncbn_process_group(1)
    x = batches(3)[rank]
    alone = SyncBatchNorm(4, process_group=group)(x)
    empty = SyncBatchNorm(4)(batches(4)[rank] if rank == 0 else torch.zeros(0, 4))
    expected = nn.BatchNorm1d(4)(batches(4)[0])
    try:
        create_syncbn_process_group(3)
    except AssertionError as error:
        message = str(error)
    return {
        "alone": worst([alone], [nn.BatchNorm1d(4)(x)]),
        "empty": worst([empty], [expected]) if rank == 0 else float(empty.numel()),
        "message": message,
    }


def ddp(rank: int, **options: Any) -> dict[str, Any]:
    """Gradients of three backwards against the sum of the ranks' losses in one process."""
    model, reference = convert_syncbn_model(net()), net()
    if rank == 1:
        with torch.no_grad():  # the constructor brings rank 0's values
            for param in model.parameters():
                param.add_(1.0)
    wrapped = DistributedDataParallel(model, **options)
    divisor = (
        dist.get_world_size()
        if options.get("gradient_average", True)
        else options.get("gradient_predivide_factor", 1.0)
    )
    result = []
    for seed in range(3):
        wrapped.zero_grad()
        reference.zero_grad()
        xs = batches(seed)
        wrapped(xs[rank]).square().sum().backward()
        reference(torch.cat(xs)).square().sum().backward()
        result.append(worst(grads(wrapped), [grad / divisor for grad in grads(reference)]))
    return {"worst": max(result), "keys": next(iter(wrapped.state_dict()))}


def unused(rank: int) -> dict[str, Any]:
    """``delay_allreduce`` takes parameters that get no gradient; ``disable_allreduce`` keeps gradients on the rank."""
    model = Half()
    wrapped = DistributedDataParallel(model, delay_allreduce=True)
    xs = batches(7)
    wrapped(xs[rank]).sum().backward()
    first = grads(model)[0].clone()
    expected = torch.stack([x.sum(0) for x in xs]).mean(0).expand(2, 4)
    wrapped.disable_allreduce()
    wrapped.zero_grad()
    wrapped(xs[rank]).sum().backward()
    local = grads(model)[0].clone()
    wrapped.enable_allreduce()
    wrapped(xs[rank]).sum().backward()
    return {
        "none": model.unused.weight.grad is None,
        "first": worst([first], [expected]),
        "local": worst([local], [xs[rank].sum(0).expand(2, 4)]),
        "both": worst(grads(model)[:1], [2 * expected]),
    }


def reducer(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Linear(4, 2)
    by_hand = Reducer(model)
    weight = model.weight.detach().clone()
    model(batches(5)[rank]).sum().backward()
    by_hand.reduce()
    expected = torch.stack([x.sum(0) for x in batches(5)]).mean(0).expand(2, 4)
    half, full = torch.full((3,), float(rank)).half(), torch.full((2,), float(rank))
    Reducer([half, (full,)]).reduce()
    assert model.weight.grad is not None
    return {
        "weight": [float(value) for value in weight.flatten()],
        "grad": worst([model.weight.grad], [expected]),
        "list": half.tolist() + full.tolist(),
    }


def managed(rank: int, level: str) -> dict[str, Any]:
    """``amp`` with FusedAdam, a converted norm and Apex's DDP: both ranks agree, an overflow on one skips both."""
    model = convert_syncbn_model(net())
    optimizer = FusedAdam(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    wrapped = DistributedDataParallel(model, delay_allreduce=level == "O1")
    losses, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = wrapped(batches(step % 2)[rank]).float().square().mean()
        with amp.scale_loss(loss * (float("inf") if step == 2 and rank == 1 else 1.0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
    weights = [float(p.detach().float().sum()) for p in amp.master_params(optimizer)]
    return {"first": losses[0], "last": losses[-2], "scales": scales, "weights": weights}


DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"delay_allreduce": True},
    "small messages": {"message_size": 4},
    "fp32": {"allreduce_always_fp32": True},
    "sum": {"gradient_average": False},
    "predivided": {"gradient_predivide_factor": 2.0},
    "predivided sum": {"gradient_average": False, "gradient_predivide_factor": 4.0},
    "accepted": {"retain_allreduce_buffers": True, "num_allreduce_streams": 2, "prof": True},
}


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    found = {
        "sync_batch_norm": sync_batch_norm(rank),
        "groups": groups(rank),
        "ddp": {name: ddp(rank, **options) for name, options in DDP.items()},
        "unused": unused(rank),
        "reducer": reducer(rank),
        "managed": {level: managed(rank, level) for level in ("O2", "O1")},
    }
    (Path(sys.argv[-1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
