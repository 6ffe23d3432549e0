"""What the two ranks of test_unlike_ranks.py run: models with a part that is each rank's own, beside one in a DDP.

``ignored``: the part is in the DDP's module, and DDP was told to ignore it.
``own``: the first rank has a part that the other has not, so that the names of their models differ.
``frozen``: both have it, and the second rank does not train it.
``left over``: the first rank still has the DDP of an earlier session, as where nothing has collected garbage.
``scaler``: FSDP2 holds the part on each rank alone, and one GradScaler scales both.
Four steps; the loss of the second rank's own part, or of its batch, overflows in the third.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import xamp

OVERFLOWS = 2


class Model(nn.Module):
    def __init__(self, seed: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(seed or 0)
        self.part = None if seed is None else nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        return x if self.part is None else self.part(x)


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def made(mode: str, rank: int) -> tuple[Model, list[nn.Parameter]]:
    """The model of a rank, and what it trains."""
    model = Model(None if mode == "own" and rank else rank)
    if mode == "frozen" and rank and model.part is not None:
        model.part.requires_grad_(False)
    return model, [p for p in model.parameters() if p.requires_grad]


def wrapped(mode: str, model: Model) -> nn.Module:
    if mode == "ignored":
        ignored = [name for name, _ in model.named_parameters() if name.startswith("part")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        return DistributedDataParallel(model)
    model.shared = DistributedDataParallel(model.shared)  # type: ignore[assignment]
    return model


def weights(model: Model) -> list[list[float]]:
    state = model.state_dict()
    found = {key.replace("module.", ""): value.flatten().tolist() for key, value in state.items()}
    return [found[key] for key in sorted(found)]


def by_hand(mode: str, rank: int, skips: bool) -> list[list[float]]:
    """Weights after fp32 training without xamp, without the step that overflows where there is one."""
    model, params = made(mode, rank)
    optimizer = torch.optim.SGD(params, lr=0.1)
    net = wrapped(mode, model)
    for step in [step for step in range(4) if not (skips and step == OVERFLOWS)]:
        optimizer.zero_grad()
        net(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(model)


def by_xamp(mode: str, level: str, rank: int, skips: bool, group: Any) -> dict[str, Any]:
    model, params = made(mode, rank)
    optimizer = torch.optim.SGD(params, lr=0.1)
    xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0, process_group=group)
    net = wrapped(mode, model)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(data(step, rank)).float().square().mean()
        with xamp.scale_loss(
            loss * float("inf") if skips and step == OVERFLOWS and rank else loss, optimizer
        ) as scaled:
            scaled.backward()
        optimizer.step()
        scales.append(xamp.loss_scale(optimizer))
    return {"weights": weights(model), "scales": scales}


def by_scaler(rank: int, group: Any) -> list[float]:
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    model = Model(rank)
    assert model.part is not None
    fully_shard(model.part, mesh=DeviceMesh.from_group(alone, "cpu"))
    model.shared = DistributedDataParallel(model.shared)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = xamp.GradScaler(init_scale=1024.0)
    scaler.process_group = group
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        x = data(step, rank)
        own = model.part(x).square().mean()
        loss = model.shared(x).square().mean() + (own * float("inf") if step == OVERFLOWS and rank else own)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [*scales, float(model.shared.module.weight.sum())]  # type: ignore[union-attr,operator]


def left_over(rank: int) -> list[float]:
    def trained(model: nn.Module) -> tuple[nn.Module, list[float]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, "O1", init_scale=1024.0, verbosity=0)
        net, scales = DistributedDataParallel(model), []
        for step in range(4):
            optimizer.zero_grad()
            loss = net(data(step, rank)).float().square().mean()
            spoilt = step == OVERFLOWS and rank
            with xamp.scale_loss(loss * float("inf") if spoilt else loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            scales.append(xamp.loss_scale(optimizer))
        return net, scales

    kept = [trained(nn.Linear(8, 8))]
    if rank:
        kept.clear()
        gc.collect()
    return trained(Model(None))[1]


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for mode in ("ignored", "own", "frozen"):
        for level in ("O0", "O1", "O2", "O4", "O5"):
            for group in (None, dist.group.WORLD) if level == "O1" else (None,):
                skips = level in ("O1", "O2")
                case = {"by hand": by_hand(mode, rank, skips), **by_xamp(mode, level, rank, skips, group)}
                found[f"{mode} {level}{' WORLD' if group else ''}"] = case
    found["left over"] = left_over(rank)
    found["scaler"], found["scaler WORLD"] = by_scaler(rank, None), by_scaler(rank, dist.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py


if __name__ == "__main__":
    main(Path(sys.argv[1]))
