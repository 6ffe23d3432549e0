"""FullyShardedDataParallel: what each process of test_engines.py runs."""

from __future__ import annotations

import logging
from typing import Any

import engine_cases
import torch
import torch.distributed as dist
from engine_cases import Case
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import xamp


def original(model: Any, _: str, **options: Any) -> Any:
    return FullyShardedDataParallel(model, device_id=engine_cases.device, use_orig_params=True, **options)


def flat(model: Any, _: str) -> Any:
    return FullyShardedDataParallel(model, device_id=engine_cases.device)


def nested(model: Any, level: str) -> Any:
    model[2] = original(model[2], level)
    return original(model, level)


def own_precision(model: Any, level: str) -> Any:
    """The user has told FSDP already what the level means."""
    dtype = {"O2": torch.float16, "O5": torch.bfloat16}.get(level)
    told = None if dtype is None else MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
    return original(model, level, mixed_precision=told)


def copied(model: Any, level: str) -> Any:
    return original(model, level, sharding_strategy=ShardingStrategy.NO_SHARD)


def whole_weights(model: Any, level: str) -> Any:
    """Weights stay gathered between forward and backward."""
    return original(model, level, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def checkpointed(model: Any, level: str) -> Any:
    return original(engine_cases.checkpointed(model), level)


def head(level: str, collapses: bool = False) -> tuple[list[Any], int]:
    """Only the last layer is trained, and some ranks have no element of it; what they saw, and how many they have."""
    model = engine_cases.net().to(engine_cases.device)
    for param in (p for layer in model[:-1] for p in layer.parameters()):
        param.requires_grad_(False)
    sharded = original(model, level)
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.1)
    xamp.initialize(sharded, optimizer, level, loss_scale="dynamic", init_scale=4.0 if collapses else 1024.0)
    session: Any = xamp.session(optimizer)
    seen: list[Any] = []
    try:
        for step in range(60 if collapses else engine_cases.STEPS):
            optimizer.zero_grad()
            x, target = (each.to(engine_cases.device) for each in engine_cases.batch(step, 0, dist.get_rank()))
            loss = engine_cases.loss_of(sharded(x), target)
            with xamp.scale_loss(loss * float("inf") if collapses or step == 1 else loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            seen.append(session.last_step.name)
    except xamp.LossScaleCollapsed:
        seen = ["collapsed", len(seen)]
    return [*seen, session.stats.applied, session.stats.skipped], sum(
        p.numel() for p in optimizer.param_groups[0]["params"]
    )


def heads() -> dict[str, Any]:
    """What :func:`head` tells, and the warnings."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return True

    logging.getLogger("xamp").addFilter(note)
    found = {level: head(level) for level in engine_cases.LEVELS}
    return {**found, "collapse": head("O1", collapses=True), "said": [text for text in said if "no gradient" in text]}


def summoned() -> list[Any]:
    """What an average says while the weights are gathered, and whether that leaves them alone."""
    model = original(engine_cases.net().to(engine_cases.device), "O1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    average = xamp.ema(model, 0.5)
    before, said = engine_cases.whole(model), ""
    with FullyShardedDataParallel.summon_full_params(model):
        for call in (average.update, lambda: xamp.ema(model, 0.5), average.swapped().__enter__):
            try:
                call()
            except xamp.StateError as error:
                said += str(error)
    after = engine_cases.whole(model)
    average.update()
    return [said.count("for summon_full_params"), all(torch.equal(before[name], after[name]) for name in before)]


CASES = {
    "original": Case(original),
    "flat": Case(flat),
    "nested": Case(nested),
    "own_precision": Case(own_precision),
    "copied": Case(copied, spoil_loss=True),
    "whole_weights": Case(whole_weights),
    "checkpointed": Case(checkpointed),
    "no_sync": Case(original, micro=2, postponed=lambda model: model.no_sync()),
}

if __name__ == "__main__":
    engine_cases.work(
        CASES,
        {
            "dtypes": lambda: engine_cases.dtypes(original),
            "averages": lambda: engine_cases.averages(original),
            "heads": heads,
            "summoned": summoned,
        },
    )
