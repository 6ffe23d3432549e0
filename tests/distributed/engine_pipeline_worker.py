"""Stages of a pipeline, each with a session of its own: what each process of test_engines.py runs.

Every stage enters scale_loss with a one, which comes back as the loss scale; the last stage multiplies its losses by
it. ``process_group`` says that all stages decide together, so that the scale is one number.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import LR, MAX_NORM, MOMENTUM, SPOILT, STEPS
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import xamp

PARTS = {2: ((0, 2), (2, 5)), 4: ((0, 1), (1, 3), (3, 4), (4, 5))}
"""By the number of stages: the first layer of each, and the one behind its last."""
WIDTHS = (8, 12, 12, 8, 8, 5)  # before each layer, and after the last


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule, and which stages a rank has under it.

    Attributes:
        schedule: the class.
        stages: given rank and number of ranks of a pipeline, the numbers of its stages: of a loop, or of a V, or one.
        copied: given a stage and the mesh of its copies, returns what runs it. There are two stages; with four ranks
            there are two pipelines, with batches of their own.
        late: ``copied`` is called after ``initialize``.
    """

    schedule: Any
    stages: Callable[[int, int], tuple[int, ...]] = lambda rank, _: (rank,)
    copied: Callable[[Any, DeviceMesh], Any] | None = None
    late: bool = False


def in_ddp(model: Any, copies: DeviceMesh) -> Any:
    return DistributedDataParallel(model, process_group=copies.get_group(), find_unused_parameters=True)


def in_fsdp2(model: Any, copies: DeviceMesh) -> Any:
    return fully_shard(model, mesh=copies)


ONE = {
    "gpipe": Plan(ScheduleGPipe),
    "1f1b": Plan(Schedule1F1B),
    "gpipe in ddp": Plan(ScheduleGPipe, copied=in_ddp, late=True),
    "1f1b in ddp": Plan(Schedule1F1B, copied=in_ddp, late=True),
    "1f1b in fsdp2": Plan(Schedule1F1B, copied=in_fsdp2),
}
TWO = {
    "interleaved": Plan(ScheduleInterleaved1F1B, lambda rank, world: (rank, rank + world)),
    "zero_bubble": Plan(ScheduleInterleavedZeroBubble, lambda rank, world: (rank, rank + world)),
    "zero_bubble_v": Plan(ScheduleZBVZeroBubble, lambda rank, world: (rank, 2 * world - 1 - rank)),
}
"""With two stages on each rank. The net has layers for four stages, so for two ranks."""


class Stage:
    """One stage on this rank: its part of the net, and what the schedule wants."""

    def __init__(self, number: int, count: int) -> None:
        self.number, self.count, self.device = number, count, engine_cases.device
        self.first, self.end = PARTS[count][number]
        self.model: Any = nn.Sequential(*list(engine_cases.net())[self.first : self.end]).to(self.device)

    def scheduled(self, group: Any) -> PipelineStage:
        into = torch.empty(1, WIDTHS[self.first], requires_grad=self.number > 0, device=self.device)
        out = torch.empty(1, WIDTHS[self.end], requires_grad=True, device=self.device)
        args: dict[str, Any] = {"input_args": (into,), "output_args": (out,), "group": group}
        return PipelineStage(self.model, self.number, self.count, self.device, **args)

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of the whole net."""
        named = ((name.partition("."), p) for name, p in engine_cases.whole(self.model).items())
        return {f"{int(place) + self.first}.{name}": p for (place, _, name), p in named}


def train(level: str, plan: Plan = ONE["gpipe"]) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    length = world if plan.copied is None else 2
    mesh = engine_cases.mesh(length, world // length, names=("stages", "copies"))
    numbers = plan.stages(mesh.get_local_rank("stages"), length)
    count = len(numbers) * length
    stages = [Stage(number, count) for number in numbers]
    copy = functools.partial(copied, stages, mesh["copies"], plan)
    if not plan.late:
        copy()
    models = [stage.model for stage in stages]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=LR, momentum=MOMENTUM)
    told: dict[str, Any] = {"loss_scale": "dynamic", "init_scale": 1024.0, "process_group": dist.group.WORLD}
    xamp.initialize(models if len(models) > 1 else models[0], optimizer, level, verbosity=0, **told)
    if plan.late:
        copy()
    factor: list[torch.Tensor] = []
    scheduled = [stage.scheduled(mesh.get_group("stages")) for stage in stages]
    schedule = plan.schedule(
        scheduled if len(models) > 1 else scheduled[0],
        4,  # micro-batches, of one row each
        loss_fn=lambda output, target: engine_cases.loss_of(output, target) * factor[-1],
    )
    outcomes, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, target = (
            each.to(engine_cases.device) for each in engine_cases.batch(step, 0, mesh.get_local_rank("copies"))
        )
        with xamp.scale_loss(torch.ones((), device=engine_cases.device), optimizer) as scale:
            factor.append(scale)
            schedule.step(*((x,) if 0 in numbers else ()), **({"target": target} if count - 1 in numbers else {}))
            if step == SPOILT and rank == 1:
                engine_cases.spoil(models[0])
        clip(optimizer, mesh, of_parts=plan.copied is in_fsdp2)
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    found = {name: value for stage in stages for name, value in stage.weights().items()}
    compared = engine_cases.compared(found, engine_cases.reference(tuple(range(mesh.size(1))), 1), optimizer)
    return {"outcomes": outcomes, "scales": scales, **compared}


def copied(stages: list[Stage], copies: DeviceMesh, plan: Plan) -> None:
    if plan.copied is not None:
        for stage in stages:
            stage.model = plan.copied(stage.model, copies)


def clip(optimizer: Any, mesh: DeviceMesh, *, of_parts: bool) -> None:
    """Clip by the norm over all stages, which no stage knows by itself."""
    found: list[Any] = [p.grad for p in xamp.master_params(optimizer) if p.grad is not None]
    grads = [getattr(grad, "_local_tensor", grad) for grad in found]
    total = (
        torch.stack([grad.square().sum() for grad in grads]).sum()
        if grads
        else torch.zeros((), device=engine_cases.device)
    )
    dist.all_reduce(total, group=None if of_parts else mesh.get_group("stages"))
    for grad in grads:
        grad.mul_((MAX_NORM / (total.sqrt() + 1e-6)).clamp(max=1.0))


if __name__ == "__main__":
    plans = TWO if sys.argv[1] == "two" else ONE
    engine_cases.work(
        {},
        {
            f"{name} {level}": functools.partial(train, level, plan)
            for name, plan in plans.items()
            for level in engine_cases.LEVELS
        },
    )
