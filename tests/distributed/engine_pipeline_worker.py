"""Stages of a pipeline, each with a session of its own: what each process of test_engines.py runs.

Every stage enters scale_loss with a one, which comes back as the loss scale; the last stage multiplies its losses by
it. ``process_group`` says that all stages decide together, so that the scale is one number.
"""

from __future__ import annotations

import functools
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import LR, MAX_NORM, MOMENTUM, SPOILT, STEPS
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import xamp

PARTS = {2: ((0, 2), (2, 5)), 4: ((0, 1), (1, 3), (3, 4), (4, 5))}
WIDTHS = (8, 12, 12, 8, 8, 5)  # before each layer, and after the last


def stage_of(rank: int, world: int) -> tuple[Any, int, int]:
    first, end = PARTS[world][rank]
    layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(engine_cases.net())})
    return nn.Sequential(*(layers[str(number)] for number in range(first, end))), first, end


def train(level: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model, first, end = stage_of(rank, world)
    model, device = model.to(engine_cases.device), engine_cases.device
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    told: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 1024.0, "process_group": dist.group.WORLD}
    xamp.initialize(model, optimizer, level, verbosity=0, **told)
    factor: list[torch.Tensor] = []
    into = torch.empty(2, WIDTHS[first], requires_grad=rank > 0, device=device)
    out = torch.empty(2, WIDTHS[end], requires_grad=True, device=device)
    stage = PipelineStage(model, rank, world, device, input_args=(into,), output_args=(out,))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: engine_cases.loss_of(output, target) * factor[-1])
    outcomes, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = (each.to(device) for each in engine_cases.batch(step, 0, 0))
        with xamp.scale_loss(torch.ones((), device=device), optimizer) as scale:
            factor.append(scale)
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target) if rank == world - 1 else schedule.step()
            if step == SPOILT and rank == 1:
                engine_cases.spoil(model)
        clip(optimizer)
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    found = {
        f"{int(name.split('.')[0]) + first}.{name.split('.')[1]}": p.cpu() for name, p in model.state_dict().items()
    }
    compared = engine_cases.compared(found, engine_cases.reference([0], 1), optimizer)
    return {"outcomes": outcomes, "scales": scales, **compared}


def clip(optimizer: Any) -> None:
    """Clip by the norm over all stages, which no stage knows by itself."""
    grads = [p.grad for p in xamp.master_params(optimizer) if p.grad is not None]
    total = (
        torch.stack([grad.square().sum() for grad in grads]).sum()
        if grads
        else torch.zeros((), device=engine_cases.device)
    )
    dist.all_reduce(total)
    for grad in grads:
        grad.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))


if __name__ == "__main__":
    engine_cases.work({}, {f"gpipe {level}": functools.partial(train, level) for level in engine_cases.LEVELS})
