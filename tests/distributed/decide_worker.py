"""What each process of test_decide.py runs: which ranks decide together, and what ranks of other settings are told.

Each case makes process groups of its own, so that one that ends in an error leaves no other in trouble. Rank 1 alone
overflows at the second of three steps. Writes one JSON file a rank.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.distributed import ranks

LEVELS = ("O1", "O2", "O4", "O5")
LIMIT = datetime.timedelta(seconds=240)
Result = dict[str, Any]


def group(*ranks: int, seconds: float = 240.0) -> Any:
    return dist.new_group(list(ranks) or None, timeout=datetime.timedelta(seconds=seconds))


def everybody() -> Any:
    """A new group of all ranks."""
    return group(*range(dist.get_world_size()))


def halves() -> Any:
    """This rank's half of all ranks."""
    size = dist.get_world_size() // 2
    made = [group(*range(first, first + size)) for first in (0, size)]
    return made[dist.get_rank() // size]


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def start(level: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {"loss_scale": "dynamic", "init_scale": 1024.0, "verbosity": 0, **options}
    xamp.initialize(model, optimizer, level, **told)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int = 3, in_part: bool = False) -> Result:
    """Outcomes and scales of the steps, and how often ranks agreed on them.

    ``in_part``: rank 1 overflows in its part of the gradients, which no other rank sees.
    """
    outcomes, scales, calls, share = [], [], [0], ranks.share_overflow

    def counted(flags: torch.Tensor, group: Any) -> None:
        calls[0] += 1
        share(flags, group)

    ranks.share_overflow = counted
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        spoilt = step == 1 and dist.get_rank() == 1
        with xamp.scale_loss(loss * float("inf") if spoilt and not in_part else loss, optimizer) as scaled:
            scaled.backward()
            if spoilt and in_part:
                next(part for p in model.parameters() if (part := local(p.grad)).numel()).flatten()[0] = float("inf")
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    ranks.share_overflow = share
    finite = all(bool(p.isfinite().all()) for p in optimizer.param_groups[0]["params"])
    return {"outcomes": outcomes, "scales": scales, "agreed": calls[0], "finite": finite}


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


# ------------------------------------------------------------------ which ranks decide


def ddp(level: str) -> Result:
    model, optimizer = start(level)
    return train(DistributedDataParallel(model, process_group=everybody()), optimizer)


def given(level: str) -> Result:
    """The group that is given has the ranks of the DDP's: there is nothing to agree on."""
    model, optimizer = start(level, process_group=everybody())
    return train(DistributedDataParallel(model, process_group=everybody()), optimizer)


def halves_alone(level: str) -> Result:
    model, optimizer = start(level)
    return train(DistributedDataParallel(model, process_group=halves()), optimizer)


def halves_together(level: str) -> Result:
    model, optimizer = start(level, process_group=dist.group.WORLD)
    return train(DistributedDataParallel(model, process_group=halves()), optimizer)


def hook(level: str, register: Callable[[Any], object]) -> Result:
    model, optimizer = start(level)
    wrapped = DistributedDataParallel(model, process_group=everybody())
    register(wrapped)
    return train(wrapped, optimizer)


def noop(level: str) -> Result:
    return hook(level, lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook))


def own_hook(level: str) -> Result:
    """One of the user's, of which nobody knows what it does; it does nothing."""

    return hook(level, lambda ddp: ddp.register_comm_hook(None, lambda _, bucket: done(bucket.buffer())))


def done(buffer: torch.Tensor) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future


def local_steps(level: str) -> Result:
    halved = halves()

    def register(ddp: Any) -> None:
        state = local_sgd.PostLocalSGDState(ddp.process_group, halved, start_localSGD_iter=0)
        ddp.register_comm_hook(state, local_sgd.post_localSGD_hook)

    return hook(level, register)


def averaged_over_halves(level: str) -> Result:
    """A hook that averages, but over fewer ranks than DDP has."""
    halved = halves()
    return hook(level, lambda ddp: ddp.register_comm_hook(halved, default_hooks.allreduce_hook))


def compressed(level: str) -> Result:
    return hook(level, lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))


def built_in(level: str) -> Result:
    average: Any = dist.BuiltinCommHookType.ALLREDUCE  # type: ignore[attr-defined]
    return hook(level, lambda ddp: ddp._register_builtin_comm_hook(average))


def idle(level: str) -> Result:
    """The second half of the ranks never calls xamp. The others do not average, and agree among themselves."""
    half = halves()
    if dist.get_rank() >= dist.get_world_size() // 2:
        return {}
    model, optimizer = start(level)
    wrapped = DistributedDataParallel(model, process_group=half)
    wrapped.register_comm_hook(None, debugging_hooks.noop_hook)
    return train(wrapped, optimizer)


def idle_sharded(level: str) -> Result:
    """The same with shards: parameters that no DDP holds."""
    size = dist.get_world_size() // 2
    mesh = DeviceMesh("cpu", list(range(size)))  # all ranks make it
    if dist.get_rank() >= size or level in ("O2", "O5"):
        return {}
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, loss_scale="dynamic", init_scale=1024.0, verbosity=0)
    return train(model, optimizer)


def divided(level: str) -> Result:
    """Parameters that all ranks have parts of, and a given group of this rank alone: no part is stepped alone."""
    world = dist.get_world_size()
    mine = [group(rank) for rank in range(world)][dist.get_rank()]
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(8, 4), mesh=DeviceMesh("cpu", list(range(world))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 1024.0, "verbosity": 0}
    xamp.initialize(model, optimizer, level, process_group=mine, **told)
    return train(model, optimizer, in_part=True)


def idle_while_others_pass(level: str) -> Result:
    """One rank has a session of its own that neither scales nor shares, another is not enabled, others have none."""
    if dist.get_rank() == 0:
        model, optimizer = start(level, loss_scale=1.0)
        for step in range(3):
            with xamp.scale_loss(model(batch(step)).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
    elif dist.get_rank() == 1:
        model, optimizer = start(level, enabled=False)
        with xamp.scale_loss(model(batch(0)).square().mean(), optimizer) as scaled:
            scaled.backward()
    return {}


def frozen(level: str, thaws: str = "") -> Result:
    """DDP leaves out what was frozen when it was made; the optimizer has it too, and it may be thawed at some time."""
    model, optimizer = start(level)
    model.weight.requires_grad_(False)
    wrapped = DistributedDataParallel(model, process_group=everybody())
    if thaws == "later":
        train(wrapped, optimizer, steps=1)
    model.weight.requires_grad_(bool(thaws))
    return train(wrapped, optimizer, in_part=bool(thaws))  # a rank's own gradient of what is thawed


def thawed(level: str) -> Result:
    return frozen(level, "at once")


def thawed_later(level: str) -> Result:
    return frozen(level, "later")


DECIDE = (
    *(ddp, given, halves_alone, halves_together, noop, own_hook, local_steps, averaged_over_halves, compressed),
    *(built_in, idle, idle_sharded, divided, idle_while_others_pass, frozen, thawed, thawed_later),
)

# ------------------------------------------------------------------ several sessions in one group

BESIDE = {"O1": (1024.0, 1, 1), "O2": (256.0, 0, 2)}
"""By level: the first scale, and the rank and the step of an overflow."""


def beside(way: str) -> Result:
    """O1 beside O2 in the default group, with models of the same names: what each becomes, and what alone."""
    return {
        "together": trained_beside(way, *BESIDE),
        "alone": {**trained_beside(way, "O1"), **trained_beside(way, "O2")},
    }


def trained_beside(way: str, *levels: str) -> Result:
    sessions = {level: shared(way, level, BESIDE[level][0]) for level in levels}
    found: Result = {level: {"outcomes": [], "scales": []} for level in levels}
    for step in range(4):
        for level in levels if step % 2 else levels[::-1]:
            model, optimizer = sessions[level]
            optimizer.zero_grad()
            loss = model(batch(step)).square().mean()
            spoilt = (dist.get_rank(), step) == BESIDE[level][1:]
            with xamp.scale_loss(loss * float("inf") if spoilt else loss, optimizer) as scaled:
                scaled.backward()
        for level, (_, optimizer) in sessions.items():
            optimizer.step()
            found[level]["outcomes"].append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
            found[level]["scales"].append(xamp.loss_scale(optimizer))
    for level, (_, optimizer) in sessions.items():
        parts = [local(p).numpy().tobytes() for p in optimizer.param_groups[0]["params"]]
        found[level]["weights"] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found


def shared(way: str, level: str, init_scale: float) -> tuple[Any, Any]:
    """A model whose ranks decide together: in the default group, under a DDP over it, or as shards."""
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4)
    if way == "fsdp2":
        fully_shard(model, mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, loss_scale="dynamic", init_scale=init_scale, verbosity=0)
    return DistributedDataParallel(model) if way == "ddp" else model, optimizer


def crossed() -> Result:
    """Each rank begins with another of its sessions: their flags would be mixed up."""
    sessions = [start(level, process_group=everybody) for everybody in [group()] for level in BESIDE]
    model, optimizer = sessions[dist.get_rank() % 2]
    try:
        with xamp.scale_loss(model(batch(0)).square().mean(), optimizer) as scaled:
            scaled.backward()
    except xamp.PolicyError as error:
        return {"error": str(error)}
    return {"error": ""}


# ------------------------------------------------------------------ ranks that differ

DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "levels": ({"level": "O1"}, {"level": "O4"}),
    "levels of one kind": ({"level": "O0"}, {"level": "O4", "loss_scale": 1.0}),
    "init_scale": ({"init_scale": 1024.0}, {"init_scale": 65536.0}),
    "growth": ({"growth_interval": 100}, {"growth_interval": 200}),
    "enabled": ({}, {"enabled": False}),
    "kept": ({"keep_fp32": [nn.Linear]}, {}),
    "static": ({"loss_scale": 128.0}, {"loss_scale": 256.0}),
    "checks": ({"level": "O4", "loss_scale": 1.0}, {"level": "O4", "loss_scale": 1.0, "on_static_overflow": "skip"}),
}


LEFT_OUT = (("kept", "none"), ("levels of one kind", "none"), ("checks", "none"))
"""What ranks without a wrapper need not share, and ranks that wait for nobody."""


def different(name: str, wrapper: str) -> Result:
    """What each rank is told whose settings differ, and after how many scale_loss; the last rank has others."""
    mine = DIFFERENT[name][dist.get_rank() == dist.get_world_size() - 1]
    dist.barrier()  # some ranks may have waited for others in vain
    waits_in_vain = (name, wrapper) == ("enabled", "ddp")
    where = group(*range(dist.get_world_size()), seconds=3.0 if waits_in_vain else 240.0)
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4) if wrapper == "ddp before" else nn.Sequential(nn.Linear(8, 4))
    outer = DistributedDataParallel(model, process_group=where) if wrapper == "ddp before" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = {"level": "O1", "init_scale": 1024.0, "verbosity": 0, **mine}
    if wrapper == "none":
        told["process_group"] = where
    xamp.initialize(outer, optimizer, **told)
    if wrapper == "ddp":
        outer = DistributedDataParallel(model, process_group=where)
    weights = [p.detach().clone() for p in model.parameters()]
    error, step = "", 0
    for step in range(2):
        try:
            loss = outer(batch(step)).float().square().mean()
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        except (xamp.PolicyError, RuntimeError) as caught:
            error = f"{type(caught).__name__}: {caught}"
            break
    same = all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    return {"error": error, "step": step, "same": same}


def equal_after_load() -> Result:
    """A checkpoint that one rank alone has loaded makes its scale another."""
    model, optimizer = start("O1")
    if dist.get_rank() == 0:
        state = xamp.state_dict(optimizer)
        state["scalers"][0]["scale"] = 8.0
        xamp.load_state_dict(state, optimizer)
    wrapped = DistributedDataParallel(model, process_group=everybody())
    try:
        return train(wrapped, optimizer)
    except xamp.PolicyError as error:
        return {"error": str(error)}


def stages() -> Result:
    """Stages of a pipeline: other models, methods and kept modules; one has sessions of its own besides."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = nn.Linear(8, 4) if rank else nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: dict[str, Any] = {} if rank else {"keep_fp32": ["1"]}
    for _ in range(rank):
        own, its = start("O4", loss_scale=1.0)
        with xamp.scale_loss(own(batch(0)).square().mean(), its) as scaled:
            scaled.backward()
    xamp.initialize(model, optimizer, "O1", init_scale=1024.0, verbosity=0, process_group=everybody(), **kept)
    return train(model, optimizer)


def absent() -> Result:
    """Rank 1 shares the model and does not come to scale_loss; the others are told within the store's timeout."""
    where = everybody()
    model, optimizer = start("O1")
    wrapped = DistributedDataParallel(model, process_group=where)
    loss = wrapped(batch(0)).square().mean()
    if dist.get_rank() == 1:
        return {}
    dist.distributed_c10d._get_process_group_store(where).set_timeout(datetime.timedelta(seconds=1))
    try:
        with xamp.scale_loss(loss, optimizer):
            pass
    except xamp.StateError as error:
        return {"error": str(error)}
    finally:
        dist.distributed_c10d._get_process_group_store(where).set_timeout(LIMIT)
    return {}


# ------------------------------------------------------------------ a backward that raised


class Bang(Exception):
    pass


def raised(level: str, wrapper: str) -> Result:
    """The backward raises before it reduces anything, and the rank goes on: is its next step refused?"""
    if wrapper.startswith("fsdp"):
        return raised_in_fsdp(level, wrapper)
    where = everybody()
    model, optimizer = start(level, process_group=where if wrapper == "none" else None)
    outer: Any = model if wrapper == "none" else DistributedDataParallel(model, process_group=where)
    if wrapper == "no_sync":
        outer.require_backward_grad_sync = False
    before = [p.detach().clone() for p in xamp.master_params(optimizer)]
    loss = outer(batch(0)).square().mean()
    with contextlib.suppress(Bang), xamp.scale_loss(loss, optimizer):
        raise Bang
    return refused(optimizer, before)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise Bang


def raised_in_fsdp(level: str, wrapper: str) -> Result:
    """In the midst of the backward, of a micro-batch that is not reduced. ``early`` raises before the backward."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if "fsdp1" in wrapper:
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
        model._sync_gradients = False
    else:
        fully_shard(model, mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
        model.set_requires_gradient_sync(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    if "early" not in wrapper:
        (model.module if "fsdp1" in wrapper else model)[0].register_forward_hook(lambda *found: Raises.apply(found[2]))  # type: ignore[no-untyped-call]
    with contextlib.suppress(Bang), xamp.scale_loss(model(batch(0)).square().mean(), optimizer) as scaled:
        if "early" in wrapper:
            raise Bang
        scaled.backward()
    return refused(optimizer, before)


def refused(optimizer: torch.optim.Optimizer, before: list[torch.Tensor]) -> Result:
    optimizer.zero_grad()
    error = ""
    try:
        optimizer.step()
    except xamp.StateError as caught:
        error = str(caught)
    same = all(torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))
    return {"error": error, "same": same}


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=LIMIT)
    # First: later cases have sessions in the default group on some ranks alone.
    found: dict[str, Any] = {f"beside {way}": beside(way) for way in ("none", "ddp", "fsdp2")}
    for case in DECIDE:
        for level in LEVELS:
            found[f"{case.__name__} {level}"] = case(level)
    for name in DIFFERENT:
        for wrapper in ("ddp", "ddp before", "none"):
            if (name, wrapper) not in LEFT_OUT:
                found[f"different {name}, {wrapper}"] = different(name, wrapper)
    for other in (equal_after_load, stages, crossed, absent):
        found[other.__name__] = other()
        dist.barrier()
    for wrapper in ("ddp", "none", "no_sync", "fsdp1", "fsdp2", "fsdp1 early", "fsdp2 early"):
        found[f"raised {wrapper}"] = raised("O2", wrapper)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
