"""ZeroRedundancyOptimizer: what each process of test_engines.py runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import engine_cases
import torch
from engine_cases import LR, MOMENTUM, Case
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.errors import UnsupportedPolicy


def ddp(model: Any, _: str) -> Any:
    return DistributedDataParallel(model)


def zero(params: Iterable[Any], **options: Any) -> Any:
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=LR, momentum=MOMENTUM, **options)


def two_groups(params: Iterable[Any]) -> Any:
    first, *others = params
    return zero([{"params": [first]}, {"params": others}])


def buckets_are_refused() -> str:
    model = engine_cases.net()
    optimizer = zero(model.parameters(), parameters_as_bucket_view=True)
    try:
        xamp.initialize(model, optimizer, "O2", verbosity=0)
    except UnsupportedPolicy as error:
        return str(error)
    return ""


def consolidated() -> bool:
    """The state of all ranks, gathered, names every parameter, and belongs to fp32 masters."""
    model = engine_cases.net()
    optimizer = zero(model.parameters())
    xamp.initialize(model, optimizer, "O2", init_scale=1024.0, verbosity=0)
    outer = DistributedDataParallel(model)
    x, target = engine_cases.batch(0, 0, 0)
    with xamp.scale_loss(engine_cases.loss_of(outer(x), target), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if torch.distributed.get_rank():
        return True
    state = optimizer.state_dict()["state"]
    moments = [entry["momentum_buffer"].dtype for entry in state.values()]
    return moments == [torch.float32] * len(list(model.parameters()))


CASES = {
    "plain": Case(ddp, late=True, spoil_loss=True, optimizer=zero),
    "two groups": Case(ddp, late=True, spoil_loss=True, optimizer=two_groups),
}

if __name__ == "__main__":
    engine_cases.work(CASES, {"buckets": buckets_are_refused, "consolidated": consolidated})
