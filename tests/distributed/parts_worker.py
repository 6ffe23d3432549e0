"""What each process of test_ddp.py runs where DDP wraps less than a session: a part of a model, or one of two models.

``part``: DDP around the trunk of a model that is in a session already; three micro-batches, two of them without
reduction. ``two``: two models in a DDP each; the first postpones its reduction while the second steps.
``compiled``: DDP around a compiled model, in whose graph nothing is noted again.
``whole``: a whole compiled training step, with a DDP that is made after ``initialize``, against the eager one.
``before``: DDP is there before the session.
``inside``: so it is, and not given to ``initialize``, which is told of it.
``closed``: the session is closed, and a DDP that is made anew reduces.
``gone``: nothing keeps a DDP that has trained, nor its model.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging.handlers
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp


def refused(call: Any) -> bool:
    try:
        call()
    except xamp.StateError:
        return True
    return False


def backward(loss: torch.Tensor, optimizer: Any) -> None:
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def part(level: str, rank: int) -> dict[str, Any]:
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)
    model[0] = DistributedDataParallel(model[0])
    clipping_refused = []
    for step in range(3):
        with model[0].no_sync() if step < 2 else contextlib.nullcontext():
            backward(model(data(step, rank)).square().mean(), optimizer)
        if step < 2:
            clipping_refused.append(refused(lambda: xamp.clip_grad_norm_(optimizer, 1.0)))
    grads = [p.grad.flatten().tolist() for p in xamp.master_params(optimizer) if p.grad is not None]
    optimizer.step()
    return {"seen": clipping_refused, "grads": grads}


def compiled(level: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)  # masters must follow what DDP shares, between a forward and its backward
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)
    ddp = DistributedDataParallel(torch.compile(model, fullgraph=True, backend="aot_eager"))
    clipping_refused = []
    for step in range(3):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp(data(step, rank)).square().mean(), optimizer)
        clipping_refused.append(refused(lambda: xamp.clip_grad_norm_(optimizer, 1.0)))
        backward(ddp(data(step + 10, rank)).square().mean(), optimizer)
        optimizer.step()
    return {"seen": clipping_refused, "grads": [p.flatten().tolist() for p in xamp.master_params(optimizer)]}


def whole(level: str, rank: int) -> dict[str, Any]:
    def trained(is_compiled: bool) -> list[list[float]]:
        torch.manual_seed(rank)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)
        ddp = DistributedDataParallel(model)

        def step(first: torch.Tensor, second: torch.Tensor) -> None:
            optimizer.zero_grad()
            with ddp.no_sync():
                backward(ddp(first).square().mean(), optimizer)
            backward(ddp(second).square().mean(), optimizer)
            optimizer.step()

        run: Any = torch.compile(step, backend="eager") if is_compiled else step
        for number in range(3):
            run(data(number, rank), data(number + 10, rank))
        return [p.flatten().tolist() for p in xamp.master_params(optimizer)]

    eager, compiled = trained(False), trained(True)
    return {"seen": [one == other for one, other in zip(eager, compiled, strict=True)], "grads": compiled}


def before(level: str, rank: int) -> dict[str, Any]:
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    ddp: Any = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(ddp, optimizer, level, init_scale=1024.0, verbosity=0)
    start = [p.detach().clone() for p in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        backward(ddp(data(step, rank)).square().mean(), optimizer)
        optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), start, strict=True)]
    return {"seen": moved, "grads": [p.flatten().tolist() for p in model.parameters()]}


def inside(level: str, rank: int) -> dict[str, Any]:
    whole = nn.Sequential(nn.Linear(8, 4))
    ddp = DistributedDataParallel(whole)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = [refused(lambda: xamp.initialize(whole, optimizer, level, verbosity=0))]
    seen.append(refused(lambda: xamp.initialize(whole[0], optimizer, level, verbosity=0)))
    ddp(data(0, rank)).square().mean().backward()
    return {"seen": seen, "grads": [p.grad.tolist() for p in ddp.parameters() if p.grad is not None]}


def stepped(level: str, rank: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """A DDP and its optimizer after a step."""
    model: Any = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)
    ddp = DistributedDataParallel(model)
    backward(ddp(data(0, rank)).square().mean(), optimizer)
    optimizer.step()
    return ddp, optimizer


def closed(level: str, rank: int) -> dict[str, Any]:
    ddp, optimizer = stepped(level, rank)
    model = ddp.module
    said = logging.handlers.BufferingHandler(100)
    logging.getLogger("xamp").addHandler(said)
    xamp.session(model).close()
    warned = ["wrap the model again" in record.getMessage() for record in said.buffer]
    optimizer.zero_grad()
    anew = DistributedDataParallel(model)
    anew(data(1, rank)).square().mean().backward()
    casts = level in ("O2", "O3", "O5")
    return {"seen": [warned == [True] * (casts and rank == 0)], "grads": [p.grad.tolist() for p in model.parameters()]}


def gone(level: str, rank: int) -> dict[str, Any]:
    ddp, optimizer = stepped(level, rank)
    found = weakref.ref(ddp), weakref.ref(ddp.module), weakref.ref(optimizer)
    del ddp, optimizer
    gc.collect()
    return {"seen": [ref() is None for ref in found], "grads": []}


def two(level: str, rank: int) -> dict[str, Any]:
    models: Any = [nn.Linear(8, 4), nn.Linear(8, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    xamp.initialize(models, optimizers, level, init_scale=1024.0, verbosity=0)
    first, second = (DistributedDataParallel(m) for m in models)
    with first.no_sync():
        backward(first(data(0, rank)).square().mean(), optimizers[0])
    backward(second(data(1, rank)).square().mean(), optimizers[1])
    optimizers[1].step()
    clipping_refused = [refused(optimizers[0].step)]
    backward(first(data(2, rank)).square().mean(), optimizers[0])
    grads = [p.grad.flatten().tolist() for o in optimizers for p in xamp.master_params(o) if p.grad is not None]
    optimizers[0].step()
    return {"seen": clipping_refused, "grads": grads}


def main(mode: str, level: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    modes = (part, two, compiled, whole, before, inside, closed, gone)
    result = {each.__name__: each for each in modes}[mode](level, rank)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
