"""The collectives of one training step, counted in a real run: what each process of test_collectives.py runs.

Each rank trains a few blocks with DDP and FSDP2 at several levels, and once in fp32 without xamp. A dispatch mode sees
each collective that reaches a process group, with its tensors. To renew the counts which the tables of
docs/scaling.md show::

    cd tests/distributed
    for n in 2 4; do torchrun --nproc-per-node $n collectives_worker.py collectives.json; done
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import xamp

ENGINES = ("DDP", "FSDP2")
LEVELS = ("fp32, no xamp", "O1", "O2", "O4", "O5")
PLAIN = LEVELS[0]
WARM_UP = 3
WIDTH, DEPTH = 64, 4


class Collectives(TorchDispatchMode):
    """Counts the calls of collectives and their bytes, and the calls of all other operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # what it does with its local parts comes here too
        name = kind_of(func)
        if name is None:
            self.operators += 1
        else:
            self.calls[name] += 1
            self.bytes[name] += largest(args)
        return func(*args, **(kwargs or {}))


KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}
QUIET = ("barrier", "monitored_barrier")


def kind_of(func: Any) -> str | None:
    """The collective that an operator is; None: it is none."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2]
    if name.startswith(("wait", "_wrap")) or name.strip("_") in QUIET:
        return None
    return next(
        (kind for start, kind in KINDS.items() if name.replace("all_", "all").strip("_").startswith(start)), name
    )


def largest(values: Any) -> int:
    """Bytes of what one rank has after the call, or before it, whichever is more: the whole that moves."""
    sides: list[int] = []
    for value in values:
        tensors = list(tensors_in(value))
        if tensors:
            sides.append(sum(t.numel() * t.element_size() for t in tensors))
    return max(sides, default=0)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def net() -> nn.Module:
    """Blocks of the same size, so that what does not grow with the parameters is seen."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH))
    return nn.Sequential(*blocks)


class Training:
    """One engine at one level."""

    def __init__(self, engine: str, level: str) -> None:
        device = xamp.device()
        model = net().to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.plain = level == PLAIN
        if engine == "FSDP2":
            self._shard(model, level)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if not self.plain:
            model, optimizer = xamp.initialize(model, optimizer, level=level, verbosity=0)
        self.model: nn.Module = DistributedDataParallel(model) if engine == "DDP" else model
        self.optimizer = optimizer
        self.x = torch.randn(4, WIDTH, device=device)

    def _shard(self, model: nn.Module, level: str) -> None:
        mesh = init_device_mesh(xamp.device_type(), (dist.get_world_size(),))
        policy = MixedPrecisionPolicy() if self.plain else xamp.fsdp_policy(level)
        for block in model.children():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean()
        if self.plain:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        else:
            with xamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            xamp.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()


def counted(engine: str, level: str) -> dict[str, Any]:
    """What a step calls, after the first ones: DDP lays out its buckets then, and ranks compare their settings."""
    training = Training(engine, level)
    for _ in range(WARM_UP):
        training.step()
    with Collectives() as seen:
        training.step()
    collectives = {name: {"calls": seen.calls[name], "bytes": seen.bytes[name]} for name in sorted(seen.calls)}
    return {"parameters": training.parameters, "collectives": collectives, "operators": seen.operators}


def run() -> dict[str, Any]:
    return {engine: {level: counted(engine, level) for level in LEVELS} for engine in ENGINES}


def main() -> None:
    """As one rank. Rank 0 adds what it found to the file that the first argument names, under the number of ranks."""
    os.environ["XAMP_DEVICE"] = "cpu"
    dist.init_process_group(xamp.distributed_backend(), timeout=datetime.timedelta(seconds=600))
    found = run()
    if dist.get_rank() == 0:
        file = Path(sys.argv[1])
        others = json.loads(file.read_text()) if file.exists() else {}
        whole = {**others, str(dist.get_world_size()): found}
        file.write_text(json.dumps(dict(sorted(whole.items())), indent=1) + "\n")
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main()
