"""DistributedDataParallel: what each process of test_engines.py runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import Case
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel


def ddp(model: Any, _: str, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def bucket_view(model: Any, level: str) -> Any:
    return ddp(model, level, gradient_as_bucket_view=True)


def static_graph(model: Any, level: str) -> Any:
    return ddp(model, level, static_graph=True)


def unused(model: Any, level: str) -> Any:
    """DDP looks for parameters without a gradient, and finds one that no forward reaches."""
    model.spare = nn.Identity()
    model.spare.weight = nn.Parameter(torch.ones(2, device=engine_cases.device))
    return ddp(model, level, find_unused_parameters=True)


def compressed(model: Any, level: str) -> Any:
    wrapped = ddp(model, level)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def own_hook(model: Any, level: str) -> Any:
    """Of the user's: it averages, which xamp cannot know."""
    wrapped = ddp(model, level)
    everybody: Any = dist.group.WORLD
    wrapped.register_comm_hook(None, lambda _, bucket: default_hooks.allreduce_hook(everybody, bucket))
    return wrapped


def compiled(model: Any, level: str) -> Any:
    return ddp(engine_cases.compiled(model), level)


def checkpointed(model: Any, level: str) -> Any:
    return ddp(engine_cases.checkpointed(model), level)


def compiled_whole(model: Any, level: str) -> Any:
    return torch.compile(ddp(model, level), backend="aot_eager")


def compiled_before(model: Any, level: str) -> Any:
    """Compiled and run before DDP wraps it, and the other ranks start out with other weights than the first."""
    model.compile(backend="aot_eager")
    model(engine_cases.batch(0, 0, 0)[0])
    model.load_state_dict({name: value + 0.5 * dist.get_rank() for name, value in model.state_dict().items()})
    return ddp(model, level)


def half_of(rank: int) -> Sequence[int]:
    size = dist.get_world_size() // 2
    return range(rank // size * size, rank // size * size + size)


def halves(model: Any, level: str) -> Any:
    size = dist.get_world_size() // 2
    made: list[Any] = [dist.new_group(list(range(first, first + size))) for first in (0, size)]
    return ddp(model, level, process_group=made[dist.get_rank() // size])


CASES = {
    "plain": Case(ddp, late=True, spoil_loss=True),
    "bucket_view": Case(bucket_view, late=True, spoil_loss=True),
    "static_graph": Case(static_graph, late=True, spoil_loss=True),
    "unused": Case(unused, late=True, spoil_loss=True),
    "compressed": Case(compressed, late=True, spoil_loss=True),
    "own_hook": Case(own_hook, late=True, spoil_loss=True),
    "no_sync": Case(ddp, late=True, spoil_loss=True, micro=2, postponed=lambda model: model.no_sync()),
    "each_backward": Case(ddp, late=True, spoil_loss=True, micro=2),
    "each_backward, bucket_view": Case(bucket_view, late=True, spoil_loss=True, micro=2),
    "checkpointed": Case(checkpointed, late=True, spoil_loss=True),
    "halves": Case(
        *(halves, True),
        spoil_loss=True,
        members=half_of,
        options=lambda: {"process_group": dist.group.WORLD},
    ),
}

ON_TWO_RANKS = {
    "compiled": Case(compiled, late=True, spoil_loss=True),
    "compiled whole": Case(compiled_whole, late=True, spoil_loss=True),
    "compiled whole, no_sync": Case(
        compiled_whole, late=True, spoil_loss=True, micro=2, postponed=lambda model: model.no_sync()
    ),
    "compiled before": Case(compiled_before, late=True, spoil_loss=True),
}
"""Each rank compiles for itself, however many there are."""

if __name__ == "__main__":
    engine_cases.work(CASES, on_two_ranks=ON_TWO_RANKS)
