"""As ``ranks``: the main engines of torch under xamp, at every level of the chip, as on the CPU in test_engines.py.

Rank 1 alone overflows at the second of four steps. All ranks skip it and back off, and the weights become those of one
process in fp64 that leaves the step out. The cases are those of ``tests/distributed/engine_*_worker.py``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import NPU, WORLD, main

from xamp.registry import registry

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "distributed")]

engine_cases: Any = importlib.import_module("engine_cases")
ddp, fsdp1, fsdp2, hsdp, pipeline, tensor, zero = (
    importlib.import_module(f"engine_{name}_worker")
    for name in ("ddp", "fsdp1", "fsdp2", "hsdp", "pipeline", "tensor", "zero")
)

engine_cases.device = NPU

MAIN: dict[Any, tuple[str, ...]] = {
    ddp: ("plain", "own_hook", "no_sync", "each_backward, bucket_view"),
    fsdp1: ("original",),
    fsdp2: ("blocks", "no_sync"),
    hsdp: ("fsdp2",),
    zero: ("plain",),
    tensor: ("some", "all", "with fsdp2"),
}


def trained(train: Callable[[str], dict[str, Any]], level: str, is_whole: bool = True) -> None:
    """All ranks decide alike; weights are those of one process, and on each rank the same where it has all of them."""
    found = train(level)
    everybody: list[Any] = [None] * WORLD
    dist.all_gather_object(everybody, found)
    for told in everybody:
        assert (told["outcomes"], told["scales"]) == engine_cases.DECIDED, told
        assert told["off"] < engine_cases.ERROR[level], told
        assert told["fp32"], told
    assert len({told["weights"] for told in everybody}) == 1 or not is_whole, everybody


def cases() -> Iterator[Callable[[], None]]:
    levels = [
        level for level in engine_cases.LEVELS if level in registry.resolve("npu", "npu").capabilities(NPU).levels
    ]
    for level in levels:
        for engine, names in MAIN.items():
            for name in names:
                train = functools.partial(engine_cases.train, engine.CASES[name])
                yield named(f"{engine.__name__} {name} {level}", trained, train, level)
        for name in ("gpipe", "gpipe in ddp"):
            train = functools.partial(pipeline.train, plan=pipeline.ONE[name])
            yield named(f"pipeline {name} {level}", trained, train, level, False)


def named(name: str, function: Callable[..., None], *args: Any) -> Callable[[], None]:
    case: Any = functools.partial(function, *args)
    case.__name__ = name  # which main prints
    return case  # type: ignore[no-any-return]


if __name__ == "__main__":
    main(tuple(cases()))
