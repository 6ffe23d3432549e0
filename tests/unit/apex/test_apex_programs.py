"""Random programs give what the last ``apex.amp`` gave: loss scales, counts, parameters and masters.

``tests/data/apex/programs.json`` holds its results, moved to CPU tensors: a row for each seed of ``apex_programs``.

Covers: xamp.apex.amp, xamp.apex._engine, xamp.apex._scale_loss.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apex_programs
import pytest
import torch

from xamp.apex import amp

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "apex" / "programs.json").read_text(encoding="utf-8"))
SAMPLE = range(0, len(RECORDED), 10)


def differing(seeds: Iterable[int]) -> dict[int, str]:
    """What differs, by seed. Numbers may differ by what kernels of other processors round otherwise."""
    found = {}
    for seed in seeds:
        mine, theirs = apex_programs.run(amp, apex_programs.make(seed)), RECORDED[seed]
        if mine.get("error") != theirs.get("error"):
            found[seed] = f"error {mine.get('error')}, not {theirs.get('error')}"
        elif mine["scales"] != theirs["scales"]:
            found[seed] = f"scales {mine['scales']}, not {theirs['scales']}"
        elif not _near(mine["numbers"], theirs["numbers"]):
            found[seed] = f"numbers {apex_programs.short(mine['numbers'])}, not {theirs['numbers']}"
    return found


def _near(mine: list[float], theirs: str) -> bool:
    a, b = (torch.tensor(numbers, dtype=torch.float64) for numbers in (mine, [float(x) for x in theirs.split()]))
    return a.shape == b.shape and torch.allclose(a, b, rtol=2e-3, atol=1e-4, equal_nan=True)


def test_the_programs_do_what_scripts_do() -> None:
    """Each level, and each kind of line, is in the sample, and so are steps that are skipped."""
    programs = [apex_programs.make(seed) for seed in SAMPLE]
    assert {program.level for program in programs} == {"O0", "O1", "O2", "O3"}
    lines: list[tuple[str, tuple[Any, ...]]] = [line for program in programs for line in program.lines]
    methods = {"look", "set_scale", "amp_state", "added", "zero", "backward", "clip", "rate", "step"}
    assert {name for name, _ in lines} == methods
    overflows = [
        program for program in programs if any(name == "backward" and given[4] for name, given in program.lines)
    ]
    assert len(overflows) >= 10


def test_a_sample() -> None:
    assert differing(SAMPLE) == {}


@pytest.mark.thorough
def test_all() -> None:
    assert differing(seed for seed in range(len(RECORDED)) if seed not in SAMPLE) == {}
