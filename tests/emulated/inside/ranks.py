"""What each of two ranks runs under torchrun, one card each: collectives over hccl, DDP, FSDP2, and skipping together.

Prints one line for each case that fails and ``rank R: N passed, M failed`` at the end.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.registry import registry

npu: Any = torch.get_device_module("npu")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
NPU = torch.device("npu", int(os.environ["LOCAL_RANK"]))
SATURATES = registry.resolve("npu", "npu").capabilities(NPU).overflow == "flag"


def full(value: float) -> torch.Tensor:
    return torch.full((4,), float(value), device=NPU)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """That of all ranks; on the CPU."""
    torch.manual_seed(10 + step)
    return torch.randn(4 * WORLD, 6), torch.randint(5, (4 * WORLD,))


def share(step: int) -> list[torch.Tensor]:
    return [part[4 * RANK : 4 * RANK + 4].to(NPU) for part in batch(step)]


def reference(clip: float | None = None) -> nn.Module:
    """Three steps of one process with the whole batch, on the CPU."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_alike(found: Any, model: nn.Module) -> None:
    for name, wanted in model.state_dict().items():
        torch.testing.assert_close(found[name].cpu(), wanted, rtol=1e-5, atol=1e-6)


def assert_ranks_agree(model: nn.Module) -> None:
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(WORLD)]
        dist.all_gather(parts, p.detach())
        assert all(torch.equal(part, p) for part in parts)


def reductions() -> None:
    assert dist.get_backend() == "hccl"
    total = sum(range(1, WORLD + 1))
    for operation, wanted in (("SUM", total), ("MAX", WORLD), ("MIN", 1), ("AVG", total / WORLD)):
        x = full(RANK + 1)
        dist.all_reduce(x, getattr(dist.ReduceOp, operation))
        assert x.tolist() == [wanted] * 4, operation
    for dtype in (torch.float16, torch.int64, torch.uint8):
        x = full(RANK + 1).to(dtype)
        dist.all_reduce(x)
        assert x[0].item() == total, dtype


def reductions_that_torch_npu_makes_of_sums() -> None:
    total = sum(range(1, WORLD + 1))
    for dtype in (torch.int32, torch.uint8):
        x, part = full(RANK + 1).to(dtype), torch.empty(4, dtype=dtype, device=NPU)
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.tolist() == [total // WORLD] * 4, dtype
        dist.reduce_scatter_tensor(part, full(RANK + 1).to(dtype).repeat(WORLD), dist.ReduceOp.AVG)
        assert part.tolist() == [total // WORLD] * 4, dtype
    doubled: Any = sys.modules["torch_npu"].distributed._make_hccl_premul_sum(2.0)
    x = full(RANK + 1)
    dist.all_reduce(x, doubled)
    assert x.tolist() == [2 * total] * 4
    for operation in (dist.ReduceOp.BAND, dist.ReduceOp.BXOR):
        with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\..* with HCCL"):
            dist.all_reduce(torch.ones(2, dtype=torch.int32, device=NPU), operation)


def tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


def gathers_and_scatters() -> None:
    ranks = list(range(1, WORLD + 1))
    parts = [torch.empty(4, device=NPU) for _ in range(WORLD)]
    dist.all_gather(parts, full(RANK + 1))
    assert [part[0].item() for part in parts] == ranks
    whole = torch.empty(4 * WORLD, device=NPU)
    dist.all_gather_into_tensor(whole, full(RANK + 1))
    assert whole[::4].tolist() == ranks
    x = torch.empty(4, device=NPU)
    dist.reduce_scatter_tensor(x, torch.cat([full(RANK + i) for i in range(WORLD)]))
    assert x[0].item() == sum(rank + RANK for rank in range(WORLD))
    x = full(RANK)
    dist.broadcast(x, 1)
    assert x[0].item() == 1
    dist.all_to_all_single(whole, torch.cat([full(10 * RANK + i) for i in range(WORLD)]))
    assert whole[::4].tolist() == [10 * i + RANK for i in range(WORLD)]


def between_two() -> None:
    x = torch.empty(4, device=NPU)
    if RANK == 0:
        dist.send(full(7), 1)
    elif RANK == 1:
        dist.recv(x, 0)
        assert x.tolist() == [7.0] * 4
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": rank} for rank in range(WORLD)]
    dist.barrier()


def ddp() -> None:
    variants: tuple[dict[str, Any], ...] = ({}, {"gradient_as_bucket_view": True}, {"static_graph": True})
    for options in variants:
        model = DistributedDataParallel(net().to(NPU), device_ids=[NPU.index], **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x, y = share(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert_alike(model.module.state_dict(), reference())


def sync_batch_norm() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    wanted = make()
    torch.manual_seed(5)
    x = torch.randn(2 * WORLD, 3, 6, 6)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.5)
    wanted(x).square().mean().backward()
    optimizer.step()
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(make()).to(NPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x[2 * RANK : 2 * RANK + 2].to(NPU)).square().mean().backward()
    optimizer.step()
    assert_alike(model.module.state_dict(), wanted)


def fsdp2() -> None:
    model = net().to(NPU)
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = share(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    sharded: Any = model
    assert_alike({name: p.full_tensor() for name, p in sharded.named_parameters()}, reference(clip=0.5))


def fsdp2_lowered() -> None:
    model = net().to(NPU)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32))
    x, y = share(0)
    loss = F.cross_entropy(model(x.half()).float(), y)
    loss.backward()
    assert torch.isfinite(loss)


def sharded_tensors() -> None:
    mesh = init_device_mesh("npu", (WORLD,))
    x = torch.arange(16.0).reshape(8, 2)
    sharded: Any = distribute_tensor(x.to(NPU), mesh, [Shard(0)])
    assert sharded.to_local().shape == (8 // WORLD, 2)
    assert (sharded @ sharded.t()).full_tensor().cpu().tolist() == (x @ x.t()).tolist()


class Overflowing(nn.Module):
    """Adds in fp16, in its forward, more than fp16 holds; what it returns is right all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.told = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        if self.told:
            large = torch.full((1,), 40000.0, dtype=torch.float16, device=x.device)
            out = out + (large + large).float().clamp(max=1.0).sum().to(out.dtype) - 1.0
        return out


def ranks_skip_together(where: str) -> None:
    """Rank 1 alone overflows, at the second of four steps."""
    backend = registry.resolve("npu", "npu")
    inner = Overflowing().to(NPU)
    optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
    xamp.initialize(inner, optimizer, "O1", init_scale=64.0, verbosity=0)
    model = DistributedDataParallel(inner)
    applied = []
    for step in range(4):
        x, y = share(step)
        optimizer.zero_grad()
        spoilt = step == 1 and RANK == 1
        inner.told = spoilt and where == "forward"
        loss = F.cross_entropy(model(x).float(), y)
        if spoilt and where == "loss":
            backend.make_overflow_(torch.zeros(1, device=NPU))
            loss = loss if SATURATES else loss * float("inf")
        with xamp.scale_loss(loss, optimizer) as scaled:
            if spoilt and where == "loss" and SATURATES:
                backend.make_overflow_(torch.zeros(1, device=NPU))
            scaled.backward()
        if SATURATES:
            assert all(bool(p.grad.isfinite().all()) for p in inner.parameters() if p.grad is not None)
        optimizer.step()
        applied.append(xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED)
    assert applied == [True, False, True, True], applied
    assert xamp.loss_scale(optimizer) == 32.0
    assert_ranks_agree(inner)
    xamp.session(inner).close()


def ranks_skip_together_after_an_overflow_in_a_backward() -> None:
    ranks_skip_together("loss")


def ranks_skip_together_after_an_overflow_in_a_forward() -> None:
    if SATURATES:  # elsewhere it is no inf that reaches a gradient
        ranks_skip_together("forward")


def torch_npus_scaler_under_ddp() -> None:
    model = DistributedDataParallel(net().to(NPU))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = sys.modules["torch_npu"].npu.amp.GradScaler(init_scale=64.0)
    for step in range(2):
        x, y = share(step)
        optimizer.zero_grad()
        with torch.autocast("npu", torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_ranks_agree(model.module)


CASES: tuple[Callable[[], None], ...] = (
    reductions,
    reductions_that_torch_npu_makes_of_sums,
    tensors_of_the_cpu_are_refused,
    gathers_and_scatters,
    between_two,
    ddp,
    sync_batch_norm,
    fsdp2,
    fsdp2_lowered,
    sharded_tensors,
    torch_npus_scaler_under_ddp,
    ranks_skip_together_after_an_overflow_in_a_backward,
    ranks_skip_together_after_an_overflow_in_a_forward,
)


def main(cases: Sequence[Callable[[], None]]) -> None:
    npu.set_device(NPU)
    dist.init_process_group("hccl")
    gc.collect()
    gc.freeze()  # as in xamp.testing.rank_bodies
    failed = 0
    for case in cases:
        try:
            with xamp.exact_fp32(NPU):  # they compare with the CPU's numbers
                case()
        except Exception:
            failed += 1
            print(f"rank {RANK}: {case.__name__} failed\n{traceback.format_exc()}", flush=True)
        dist.barrier()
    print(f"rank {RANK}: {len(cases) - failed} passed, {failed} failed", flush=True)
    sys.stderr.flush()
    os._exit(int(failed > 0))  # torch's threads may hang at exit


if __name__ == "__main__":
    main(CASES)
