"""What the processes of test_resumed.py run: sharded training, saved and loaded by torch.distributed.checkpoint.

``save`` writes a checkpoint after three steps. ``load`` starts with other weights, on another number of ranks perhaps,
and reads it; ``load whole`` reads it into models without shards, ``load other`` into another engine at another level.
All tell how they stand there, gathered from all ranks, and after two steps more.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import docs_blocks
import engine_cases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import xamp

HOW = ("fsdp2", "tensor", "whole")
OTHER = {"fsdp2": "tensor", "tensor": "whole", "whole": "fsdp2", "O2": "O5", "O5": "O1"}
"""Where "load other" loads what an engine saved at a level."""


def shard(model: Any, how: str) -> Any:
    mesh = engine_cases.mesh(dist.get_world_size())
    if how == "fsdp2":
        return fully_shard(model, mesh=mesh)
    if how == "tensor":
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, target = engine_cases.batch(step, 0, 0)
        loss = engine_cases.loss_of(model(x), target)
        with xamp.scale_loss(loss * float("inf") if step == 1 else loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def standing(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights as the model's state has them, the moments of what is stepped, and the scale; whole."""
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    full = [m.full_tensor() if hasattr(m, "full_tensor") else m for m in moments]
    weights = engine_cases.whole(model).values()
    return {
        "weights": [p.flatten().tolist() for p in weights],
        "moments": [m.flatten().tolist() for m in full],
        "scale": xamp.loss_scale(optimizer),
        "fp32": all(m.dtype == torch.float32 for m in full),
    }


def from_one_rank(model: Any, how: str, level: str) -> list[list[float]]:
    """Weights of another model that the first rank's whole copy of this one's was loaded into."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other = shard(engine_cases.net(), how)
    xamp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.01), level, verbosity=0)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
    return [p.flatten().tolist() for p in engine_cases.whole(other).values()]


def run(mode: str, how: str, level: str, folder: Path) -> dict[str, Any]:
    """Train at a level, from what ``how`` saved at this level or on."""
    checkpoint = str(folder / f"{how} {level}")
    if mode == "load other":
        how, level = OTHER[how], OTHER[level]
    model = shard(engine_cases.net(), "whole" if mode == "load whole" else how)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    xamp.initialize(model, optimizer, level, loss_scale="dynamic", init_scale=1024.0, growth_interval=2, verbosity=0)
    names = {"model": model, "optimizer": optimizer, "folder": checkpoint, "xamp": xamp}
    if mode == "save":
        train(model, optimizer, range(3))
        docs_blocks.run("checkpoints.md", names, "get_state_dict", "save(sharded")
    else:
        with torch.no_grad():
            for param in xamp.master_params(optimizer):
                param.mul_(0.5)
        if mode == "load":
            docs_blocks.run("checkpoints.md", names, "get_state_dict", "load(sharded")
        else:  # its state may have places for masters, which the file lacks
            docs_blocks.run("checkpoints.md", names, "get_state_dict")
            names["parts"], names["dcp"] = names["sharded"], torch.distributed.checkpoint
            docs_blocks.run("checkpoints.md", names, "dcp.load(others")
            parts = {"model_state_dict": names["of_model"], "optim_state_dict": names["of_optimizer"]}
            set_state_dict(model, optimizer, **parts)
    found: dict[str, Any] = {"there": standing(model, optimizer)}
    if mode == "save":
        found["from one rank"] = from_one_rank(model, how, level)
    train(model, optimizer, range(3, 5))
    return {**found, "end": standing(model, optimizer)}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    said = {f"{how} {level}": run(sys.argv[1], how, level, Path(sys.argv[2])) for how in HOW for level in ("O2", "O5")}
    if dist.get_rank() == 0:
        (Path(sys.argv[2]) / f"{sys.argv[1]}.json").write_text(json.dumps(said))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
