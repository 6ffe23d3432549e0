"""FullyShardedDataParallel: what each process of test_engines.py runs."""

from __future__ import annotations

from typing import Any

import engine_cases
import torch
from engine_cases import Case
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy


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
    engine_cases.work(CASES, {"dtypes": lambda: engine_cases.dtypes(original)})
