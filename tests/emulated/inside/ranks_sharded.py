"""As ``ranks``: the collectives that torch's wrappers and optimizers use beside the plain ones, FSDP1, ZeRO, Join."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from ranks import NPU, RANK, WORLD, assert_alike, assert_ranks_agree, batch, full, main, net, reference, share
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.registry import registry

RANKS = list(range(1, WORLD + 1))
TOTAL = sum(RANKS)
_dist: Any = dist


def to_one_and_from_one() -> None:
    x = torch.empty(4, device=NPU)
    dist.scatter(x, [full(10 + i) for i in range(WORLD)] if RANK == 0 else None)
    assert x.tolist() == [10.0 + RANK] * 4
    parts = [torch.empty(4, device=NPU) for _ in range(WORLD)] if RANK == 0 else None
    dist.gather(full(RANK + 1), parts)
    assert parts is None or [part[0].item() for part in parts] == RANKS
    x = full(RANK + 1)
    dist.reduce(x, 0)
    assert RANK or x[0].item() == TOTAL


def lists_of_tensors() -> None:
    out = torch.empty(4, device=NPU)
    dist.reduce_scatter(out, [full(RANK + i) for i in range(WORLD)])
    assert out[0].item() == sum(rank + RANK for rank in range(WORLD))
    parts = [torch.empty(4, device=NPU) for _ in range(WORLD)]
    dist.all_to_all(parts, [full(10 * RANK + i) for i in range(WORLD)])
    assert [part[0].item() for part in parts] == [10 * i + RANK for i in range(WORLD)]
    uneven = torch.empty(TOTAL, device=NPU)
    mine = torch.full((WORLD * (RANK + 1),), float(RANK), device=NPU)
    dist.all_to_all_single(uneven, mine, RANKS, [RANK + 1] * WORLD)
    assert uneven.tolist() == [float(rank) for rank in range(WORLD) for _ in range(rank + 1)]


def lists_of_different_sizes() -> None:
    """Each rank has a shape of its own; gloo alone refuses that."""
    shapes = [(rank + 1, 2) for rank in range(WORLD)]
    parts = [torch.zeros(shape, device=NPU) for shape in shapes]
    dist.all_gather(parts, torch.full(shapes[RANK], RANK + 1.0, device=NPU))
    assert [part.tolist() for part in parts] == [[[rank + 1.0] * 2] * (rank + 1) for rank in range(WORLD)]
    like = [torch.zeros(2, 3, device=NPU) for _ in range(WORLD)]  # one rank's input has another shape
    dist.all_gather(like, torch.full((2, 3) if RANK else (6,), RANK + 1.0, device=NPU))
    assert [part.flatten().tolist() for part in like] == [[rank + 1.0] * 6 for rank in range(WORLD)]
    for operation, wanted in ((dist.ReduceOp.SUM, float(TOTAL)), (dist.ReduceOp.MAX, float(WORLD))):
        out = torch.empty(shapes[RANK], device=NPU)
        dist.reduce_scatter(out, [torch.full(shape, RANK + 1.0, device=NPU) for shape in shapes], operation)
        assert out.flatten().tolist() == [wanted] * (2 * (RANK + 1))
    out = torch.empty(shapes[RANK], device=NPU)
    dist.reduce_scatter(out, [torch.full(shape, RANK + 1.0, device=NPU) for shape in shapes], dist.ReduceOp.AVG)
    assert out.flatten().tolist() == [TOTAL / WORLD] * (2 * (RANK + 1))
    for length, numbers in ((4, 4 - 1), (WORLD + 1, 4), (1, 4)):  # numbers too few or too many for all ranks
        given = torch.arange(float(length * numbers), device=NPU) + RANK
        out = torch.full((4,), -1.0, device=NPU)
        dist.reduce_scatter(out, list(given.chunk(length)))
        numbered = [WORLD * i + sum(range(WORLD)) if i < length * numbers else 0.0 for i in range(4 * WORLD)]
        assert out.tolist() == numbered[4 * RANK : 4 * (RANK + 1)]
    sent = [torch.full((RANK + 1, 3), 10.0 * RANK + target, device=NPU) for target in range(WORLD)]
    got = [torch.empty(source + 1, 3, device=NPU) for source in range(WORLD)]
    dist.all_to_all(got, sent)
    assert [x.tolist() for x in got] == [[[10.0 * source + RANK] * 3] * (source + 1) for source in range(WORLD)]


def coalesced() -> None:
    """How DDP's buffers and FSDP2's gathers go."""
    tensors = [full(RANK + 1), full(2 * RANK)]
    with _dist._coalescing_manager(device=NPU):
        for x in tensors:
            dist.all_reduce(x)
    assert [x[0].item() for x in tensors] == [TOTAL, 2 * (TOTAL - WORLD)]
    wholes = [torch.empty(4 * WORLD, device=NPU) for _ in range(2)]
    with _dist._coalescing_manager(device=NPU, async_ops=True) as manager:
        for i, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, full(RANK + 1 + i))
    manager.wait()
    assert [whole[::4].tolist() for whole in wholes] == [RANKS, [rank + 1 for rank in RANKS]]
    outs = [torch.empty(4, device=NPU) for _ in range(2)]
    with _dist._coalescing_manager(device=NPU):
        for i, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, torch.cat([full(RANK + 1 + i)] * WORLD))
    assert [out[0].item() for out in outs] == [TOTAL, TOTAL + WORLD]
    _dist._broadcast_coalesced(dist.group.WORLD, tensors := [full(RANK), full(RANK + 5)], 1 << 20, 1)
    assert [x[0].item() for x in tensors] == [1.0, 6.0]


def objects() -> None:
    said: list[Any] = ["a", {"b": 1}] if RANK == 0 else [None, None]
    dist.broadcast_object_list(said, 0)
    assert said == ["a", {"b": 1}]
    got: list[Any] = [None]
    dist.scatter_object_list(got, list(range(WORLD)) if RANK == 0 else None)
    assert got == [RANK]
    all_of_them: list[Any] | None = [None] * WORLD if RANK == 0 else None
    dist.gather_object(RANK, all_of_them)
    assert all_of_them in (None, list(range(WORLD)))


def work_that_is_waited_for() -> None:
    x = full(RANK + 1)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    assert x[0].item() == TOTAL
    assert functional.all_reduce(full(RANK + 1), "sum", list(range(WORLD)))[0].item() == TOTAL
    peer = (RANK + 1) % WORLD
    got = torch.empty(4, device=NPU)
    sends = [dist.P2POp(dist.isend, full(RANK), peer), dist.P2POp(dist.irecv, got, (RANK - 1) % WORLD)]
    for each in dist.batch_isend_irecv(sends):
        each.wait()
    assert got[0].item() == (RANK - 1) % WORLD


def to_oneself_in_a_batch() -> None:
    """As ``all_to_all`` made of sends and receives does; gloo has no way from a rank to itself."""
    sent = [full(10 * RANK + rank) for rank in range(WORLD)]
    got = [torch.empty(4, device=NPU) for _ in range(WORLD)]
    works = [dist.P2POp(dist.irecv, x, rank) for rank, x in enumerate(got)]
    works += [dist.P2POp(dist.isend, x, rank) for rank, x in enumerate(sent)]
    for each in dist.batch_isend_irecv(works):
        each.wait()
    assert [x[0].item() for x in got] == [10 * rank + RANK for rank in range(WORLD)]
    with pytest.raises(RuntimeError, match=r"must receive in the same batch .*sent: \[\(4, .*\], received: \[\]"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, full(1), RANK)])
    with pytest.raises(RuntimeError, match=r"must receive in the same batch .*sent: \[\], received: \[\(4, "):
        dist.irecv(full(1), RANK)


def private_formats_with_offsets_are_refused() -> None:
    torch_npu = sys.modules["torch_npu"]
    torch_npu.npu.config.allow_internal_format = True
    try:
        x = torch_npu.npu_format_cast(torch.ones(64, 16, device=NPU), 29)[32:]
    finally:
        torch_npu.npu.config.allow_internal_format = False
    group = dist.new_group()  # a batch whose body raises leaves torch's record of its group open
    peer = (RANK + 1) % WORLD
    backend: Any = group._get_backend(NPU)
    refused: tuple[Callable[[], object], ...] = (
        lambda: dist.send(x, peer),
        lambda: dist.recv(x, peer),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer, group)]),
        lambda: dist.all_reduce(x),
        lambda: backend.all_gather_into_tensor_uneven(torch.empty(64, 16, device=NPU), x),
    )
    for call in refused:
        with pytest.raises(RuntimeError, match="internal format, it's storage_offset must be 0"):
            call()


def what_torch_npu_refuses_before_hccl() -> None:
    across = torch.ones(2, 3, device=NPU).t()
    images = torch.ones(1, 3, 3, 2, device=NPU).permute(0, 3, 1, 2)
    dist.all_reduce(images)
    assert images[0, 0, 0, 0].item() == WORLD
    refused: tuple[Callable[[], object], ...] = (
        lambda: dist.all_reduce(across),
        lambda: dist.broadcast(across, 0),
        lambda: dist.reduce(across, 0),
        lambda: dist.send(across, (RANK + 1) % WORLD),
        lambda: dist.all_gather([torch.ones(3, 2, device=NPU)] * WORLD, across),
        lambda: dist.reduce_scatter(across, [torch.ones(3, 2, device=NPU)] * WORLD),
        lambda: dist.all_to_all([torch.ones(3, 2, device=NPU)] * WORLD, [across] * WORLD),
        lambda: dist.all_to_all_single(torch.ones(2 * WORLD, 3, device=NPU), torch.ones(3, 2 * WORLD, device=NPU).t()),
    )
    for call in refused:
        with pytest.raises(RuntimeError, match="Tensors must be contiguous"):
            call()
    gaps = torch.ones(8, device=NPU)[::2]
    for call in (
        lambda: dist.all_gather([gaps] * WORLD, full(1)),
        lambda: dist.reduce_scatter(full(1), [gaps] * WORLD),
    ):
        with pytest.raises(RuntimeError, match="Tensors must be non-overlapping and dense"):
            call()
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(NPU)
    with pytest.raises(RuntimeError, match="Tensors must be contiguous"):
        backend.all_gather_into_tensor_uneven(torch.ones(4 * WORLD, device=NPU), gaps)
    for parts in ([full(1)] * WORLD, [full(1), *[torch.ones(2, device=NPU)] * (WORLD - 1)]):
        with pytest.raises(RuntimeError, match="operands to scatter/gather must have the same size"):
            dist.all_gather(parts, torch.ones(5, device=NPU))
    with pytest.raises(RuntimeError, match="operands to scatter/gather must have the same size"):
        dist.reduce_scatter(torch.ones(5, device=NPU), [torch.ones(2 + i, device=NPU) for i in range(WORLD)])
    with pytest.raises(RuntimeError, match="must match number of collective participants"):
        dist.all_gather([full(1)] * (WORLD + 1), full(1))
    with pytest.raises(RuntimeError, match="Tensors must be on same NPU device"):
        dist.all_gather([torch.ones(4, device=f"npu:{i}") for i in range(WORLD)], full(1))
    other = torch.ones(4, device=f"npu:{(RANK + 1) % WORLD}")
    with pytest.raises(RuntimeError, match="tensors to reduce_scatter must all reside on the same device"):
        dist.reduce_scatter(full(1), [other] * WORLD)
    with pytest.raises(RuntimeError, match="tensors to scatter/gather must all reside on the same device"):
        dist.all_gather([full(1)] * WORLD, other)


def what_torch_npu_adds_to_a_group() -> None:
    backend: Any = dist.new_group()._get_backend(NPU)
    torch_npu: Any = sys.modules["torch_npu"]
    hccl: Any = torch_npu._C._distributed_c10d.ProcessGroupHCCL
    assert isinstance(backend, hccl)
    backend._set_hccl_comm_name("mine")
    assert backend.get_hccl_comm_name(RANK, init_comm=False) == ""
    assert backend.get_hccl_comm_name(RANK) == "mine"
    for name, told in (
        ("", "length of the name"),
        ("other", "called 'mine' already"),
        ("x" * 128, "length of the name"),
    ):
        with pytest.raises(RuntimeError, match=told):
            backend._set_hccl_comm_name(name)
    sizes = RANKS
    mine, whole = torch.full((RANK + 1, 2), float(RANK), device=NPU), torch.empty(TOTAL, 2, device=NPU)
    torch_npu.distributed.all_gather_into_tensor_uneven(whole, mine.requires_grad_(), sizes)
    wanted = [float(rank) for rank in range(WORLD) for _ in range(rank + 1)]
    assert whole[:, 1].tolist() == wanted
    for splits, told in (([TOTAL], "splits not equal"), ([], "does not divide equally")):
        with pytest.raises(RuntimeError, match=told):
            torch_npu.distributed.all_gather_into_tensor_uneven(whole, mine, splits)
    with pytest.raises(RuntimeError, match="same type"):
        torch_npu.distributed.all_gather_into_tensor_uneven(whole, mine.half(), sizes)
    torch_npu.distributed.reduce_scatter_tensor_uneven(mine, whole + RANK, sizes, dist.ReduceOp.AVG)
    assert mine.flatten().tolist() == [RANK + (WORLD - 1) / 2] * (2 * (RANK + 1))
    counts = [[1 + 2 * source + target for target in range(WORLD)] for source in range(WORLD)]
    sent = torch.cat([torch.full((n,), 10.0 * RANK + target) for target, n in enumerate(counts[RANK])]).to(NPU)
    got = torch.empty(sum(row[RANK] for row in counts), device=NPU)
    torch_npu.distributed.all_to_all_vc(got, sent, counts)
    assert got.tolist() == [10.0 * source + RANK for source, row in enumerate(counts) for _ in range(row[RANK])]


def sends_and_receives_in_a_group() -> None:
    """Each rank sends before it receives, and waits for both: what waits for a group waits for nothing."""
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(NPU)
    got = torch.empty(4, device=NPU)
    backend._group_start()
    dist.send(full(RANK), (RANK + 1) % WORLD)
    dist.recv(got, (RANK - 1) % WORLD)
    backend._group_end()
    assert got[0].item() == (RANK - 1) % WORLD
    with pytest.raises(RuntimeError, match="does not support recv"):
        dist.recv(got)


def options_of_hccl_are_checked_at_the_first_collective() -> None:
    make: Any = sys.modules["torch_npu"]._C._distributed_c10d.ProcessGroupHCCL.Options
    for config, told in (
        ({"group_name": 1}, "Value type of group_name should be string"),
        ({"hccl_sdma_qos": "1"}, "Value type of hccl_sdma_qos should be int"),
        ({"hccl_exec_timeout": 2**31}, r"exceeds INT32_MAX\(2147483647\)"),
        ({"hccl_algo": "a" * 1700}, "hccl_algo 'aaaa"),
    ):
        options = make()
        options.hccl_config = config
        group = dist.new_group(backend="hccl", pg_options=options)
        with pytest.raises(RuntimeError, match=told):
            dist.all_reduce(full(1), group=group)
    options.hccl_config = {
        "hccl_algo": "level0 : NA;level1:ring",
        "hccl_buffer_size": 200,
        "hccl_exec_timeout": -1,
        "group_name": "",
    }
    groups = [dist.new_group(backend="hccl", pg_options=options) for _ in range(2)]
    options.hccl_config = {}
    names = set()
    for group in groups:
        dist.all_reduce(x := full(1), group=group)
        assert x[0].item() == WORLD
        backend: Any = group._get_backend(NPU)
        assert backend.options.hccl_config["hccl_buffer_size"] == 200
        names.add(backend.get_hccl_comm_name(RANK))
    assert len(names) == 2


def groups_of_some() -> None:
    alone = [dist.new_group([rank]) for rank in range(WORLD)][RANK]
    x = full(RANK + 1)
    dist.all_reduce(x, group=alone)
    assert x[0].item() == RANK + 1
    dist.barrier()


def fsdp1(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> None:
    whole: Any = net().to(NPU)
    whole[0] = FullyShardedDataParallel(whole[0], device_id=NPU, sharding_strategy=strategy, **options)
    model = FullyShardedDataParallel(whole, device_id=NPU, sharding_strategy=strategy, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        x, y = share(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        found = {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}
    assert_alike(found, reference(clip=0.5))


def fsdp1_with_original_parameters() -> None:
    fsdp1(use_orig_params=True)


def fsdp1_that_shards_gradients_only() -> None:
    fsdp1(ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, sync_module_states=True)


def fsdp1_lowered() -> None:
    lowered = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(net().to(NPU), device_id=NPU, mixed_precision=lowered)
    x, y = share(0)
    loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.numel())


def fsdp1_at_o1() -> None:
    """An overflow on one rank alone skips on both: each has a shard of the gradients only."""
    inner = net().to(NPU)
    model = FullyShardedDataParallel(inner, device_id=NPU, use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    xamp.initialize(model, optimizer, "O1", init_scale=64.0, verbosity=0)
    applied = []
    for step in range(3):
        x, y = share(step)
        optimizer.zero_grad()
        with xamp.scale_loss(F.cross_entropy(model(x).float(), y), optimizer) as scaled:
            scaled.backward()
            if step == 1 and RANK == 1:
                grad = next(p.grad for p in model.parameters() if p.grad is not None)
                registry.resolve("npu", "npu").make_overflow_(grad)
        optimizer.step()
        applied.append(xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED)
    assert applied == [True, False, True]
    assert xamp.loss_scale(optimizer) == 32.0


def zero() -> None:
    model = DistributedDataParallel(net().to(NPU), device_ids=[NPU.index])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    wanted = net()
    plain = torch.optim.Adam(wanted.parameters(), lr=0.01)
    for step in range(3):
        x, y = share(step)
        whole, target = batch(step)
        for one, run in ((optimizer, F.cross_entropy(model(x), y)), (plain, F.cross_entropy(wanted(whole), target))):
            one.zero_grad()
            run.backward()
            one.step()
    assert_alike(model.module.state_dict(), wanted)
    optimizer.consolidate_state_dict(0)
    assert RANK or len(optimizer.state_dict()["state"]) == 4


def join_with_uneven_inputs() -> None:
    model = DistributedDataParallel(net().to(NPU), device_ids=[NPU.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + RANK):
            x, y = share(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_ranks_agree(model.module)


def ddp_with_a_hook_that_lowers() -> None:
    model = DistributedDataParallel(net().to(NPU), device_ids=[NPU.index])
    model.register_comm_hook(None, fp16_compress_hook)
    before = copy.deepcopy(model.module.state_dict())
    x, y = share(0)
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert any(not torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert_ranks_agree(model.module)


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x)
        return made


def ddp_that_accumulates_and_leaves_parameters_unused() -> None:
    inner = WithUnused().to(NPU)
    model = DistributedDataParallel(inner, device_ids=[NPU.index], find_unused_parameters=True)
    wanted = net()
    for step in range(2):
        x, y = share(step)
        with model.no_sync() if step == 0 else contextlib.nullcontext():
            F.cross_entropy(model(x), y).backward()
        whole, target = batch(step)
        F.cross_entropy(wanted(whole), target).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    assert_alike(inner.body.state_dict(), wanted)


CASES: tuple[Callable[[], None], ...] = (
    to_one_and_from_one,
    lists_of_tensors,
    lists_of_different_sizes,
    coalesced,
    objects,
    work_that_is_waited_for,
    to_oneself_in_a_batch,
    private_formats_with_offsets_are_refused,
    what_torch_npu_refuses_before_hccl,
    what_torch_npu_adds_to_a_group,
    sends_and_receives_in_a_group,
    options_of_hccl_are_checked_at_the_first_collective,
    groups_of_some,
    fsdp1,
    fsdp1_with_original_parameters,
    fsdp1_that_shards_gradients_only,
    fsdp1_lowered,
    fsdp1_at_o1,
    zero,
    join_with_uneven_inputs,
    ddp_with_a_hook_that_lowers,
    ddp_that_accumulates_and_leaves_parameters_unused,
)


if __name__ == "__main__":
    main(CASES)
