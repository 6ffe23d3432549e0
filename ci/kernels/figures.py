"""What a compiled kernel is measured by, what is wrong with it, and the table of the most that each may take."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ci.kernels import amd_code, machine_code
from ci.kernels.driver import TARGETS, Variant

__all__ = ["BOUNDS", "FILE", "MOST", "Figures", "compared", "of_kernel", "read", "written"]

FILE = pathlib.Path(__file__).with_name("table.tsv")
MOST = 60
COLUMNS = ("sm_90", "gfx942")
_NVIDIA, _AMD = ("instructions", "registers", "blocks"), ("instructions", "registers", "waves")
_HEAD = "\t".join(("kernel", "constants", *map("sm_90 {}".format, _NVIDIA), *map("gfx942 {}".format, _AMD)))
_BLOCKWISE = ("step", "sums")
_THREADS, _BYTES = 256, {1: 4, 2: 2, 3: 2}


class Figures(NamedTuple):
    """Instructions for an element on the path of a full aligned block, if it has one; registers of a thread; blocks.

    These are blocks of threads at a time on a multiprocessor, or for AMD waves on a SIMD.
    """

    instructions: float | None
    registers: int
    blocks: int


_ADAMW = "step RULE=adam DECOUPLED=1 LATE=0"
BOUNDS = {
    f"{_ADAMW} SKIPS=1 PHASE=2 PARAMS=1 LOWS=2 STATE_CODE=1 STATES=2 GRADS=2 BLOCK=1024": (60, 64, 4),
    f"{_ADAMW} SKIPS=0 PHASE=2 PARAMS=1 LOWS=3 STATE_CODE=1 STATES=2 GRADS=3 BLOCK=1024": (60, 64, 4),
    "sums GRADS=2 IN_PLACE=0 KIND=2 CHECKS=1 SCALED=1 CLIPPED=0 BLOCK=4096": (12, 64, 4),
    "sums GRADS=3 IN_PLACE=0 KIND=2 CHECKS=0 SCALED=0 CLIPPED=0 BLOCK=4096": (12, 64, 4),
}
"""What is promised of a card of NVIDIA (sm_90), whatever the table says: see :class:`Figures`."""


def of_kernel(variant: Variant, kernel: Any, target: str, *, strict: bool = True) -> tuple[Figures, list[str]]:
    """Return the figures of a compiled kernel, and what is wrong with it.

    Where it is not ``strict``, spills of a card of NVIDIA count on the path of a full aligned block alone, if there is
    one: Triton 3.9 spills 8 bytes of two kernels where they take the rest of a tensor.
    """
    if TARGETS[target].backend == "hip":
        return _of_amd(variant, kernel.asm["amdgcn"])
    return _of_nvidia(variant, kernel, target, strict)


def _of_nvidia(variant: Variant, kernel: Any, target: str, strict: bool) -> tuple[Figures, list[str]]:
    cubin = kernel.asm["cubin"]
    taken, code = machine_code.resources(cubin), machine_code.disassembled(cubin)
    path = machine_code.path_of(code) if variant.kernel in _BLOCKWISE else None
    wrong: list[str] = []
    if strict or path is None:
        wrong += [f"{taken[kind]} bytes of {kind.lower()} memory" for kind in ("STACK", "LOCAL") if taken[kind]]
        wrong += ["registers are spilled"] if re.search(r"\b(LDL|STL)\b", code) else []
    elif any(one.name.startswith(("LDL", "STL")) for one in path):
        wrong.append("registers are spilled on the path of a full block")
    warps = kernel.metadata.num_warps
    a_block = -(-taken["REG"] * 32 // 256) * 256 * warps
    blocks = min(65536 // a_block, (48 if target == "sm_89" else 64) // warps, 32)
    if path is None:
        return Figures(None, taken["REG"], blocks), wrong
    wrong += _on_path(variant, path)
    return Figures(round(len(path) / _elements(variant), 1), taken["REG"], blocks), wrong


def _of_amd(variant: Variant, code: str) -> tuple[Figures, list[str]]:
    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", code)[1])  # type: ignore[index]

    spilled = {name: count(name) for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")}
    wrong = [f"{name} is {number}" for name, number in spilled.items() if number]
    registers = count("vgpr_count")
    waves, each = min(8, 512 // (-(-registers // 8) * 8)), None
    if variant.kernel in _BLOCKWISE:
        path = amd_code.path_of(code)
        wrong += _too_narrow(variant, amd_code.loads_of(path))
        if not wrong and (early := amd_code.early_uses(path)):
            wrong.append(f"uses an element before all are on their way: {early[0].name} {early[0].operands}")
        each = round(len(path) / _elements(variant), 1)
    return Figures(each, registers, waves), wrong


def _constants(variant: Variant) -> dict[str, Any]:
    pairs = (pair.split("=") for pair in variant.constants.split())
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


def _elements(variant: Variant) -> int:
    return int(_constants(variant)["BLOCK"] // _THREADS)


def wanted_widths(variant: Variant) -> tuple[list[int], list[int]]:
    """Return the bytes that each load and each store of elements takes, in a full aligned block: 16, at most."""
    c = _constants(variant)
    if variant.kernel == "sums":
        each = c["BLOCK"] // _THREADS * _BYTES[c["GRADS"]]
        own = [16] * (each // 16)
        return own, own if c["CHECKS"] and c["IN_PLACE"] and c["SCALED"] else []
    grads, params, states = [c["GRADS"]], [c["PARAMS"]], [c["STATE_CODE"]] * c["STATES"]
    lows = [c["LOWS"]] if c["LOWS"] else []
    is_lamb, moves = c["RULE"] == "lamb", c["PHASE"] == 2
    loads = [*params, *states, *([] if is_lamb and moves else grads)]
    stores = [*(params + lows if moves else []), *([] if is_lamb and moves else states)]
    return _widths(c["BLOCK"], loads), _widths(c["BLOCK"], stores)


def _widths(block: int, codes: list[int]) -> list[int]:
    each = [block // _THREADS * _BYTES[code] for code in codes]
    return [min(16, size) for size in each for _ in range(max(1, size // 16))]


def _most_barriers(variant: Variant) -> int:
    """Two for a reduction, of which LAMB's first pass has two, and one where it keeps loads together."""
    c = _constants(variant)
    if variant.kernel == "sums":
        return 2
    return 6 if c["PHASE"] == 1 else int(c["RULE"] == "sgd" or c["STATES"] == 3)


def _too_narrow(variant: Variant, found: machine_code.Loads) -> list[str]:
    """Return which widths of elements are missing among the accesses of a path."""
    loads, stores = wanted_widths(variant)
    return [
        f"{have.count(width)} {kind}s of {width * 8} bits, where {want.count(width)} are of elements"
        for kind, have, want in (("load", found[0], loads), ("store", found[1], stores))
        for width in sorted({*want})
        if have.count(width) < want.count(width)
    ]


def _on_path(variant: Variant, path: list[machine_code.Instruction]) -> list[str]:
    """Return what is wrong on the path of a full aligned block."""
    wrong = _too_narrow(variant, machine_code.loads_of(path))
    if not wrong and (early := machine_code.early_uses(path, len(wanted_widths(variant)[0]))):
        wrong.append(f"uses an element before all are on their way: {early[0].name} {early[0].operands}")
    barriers = sum(one.name.startswith("BAR") for one in path)
    if barriers > (most := _most_barriers(variant)):
        wrong.append(f"{barriers} barriers, where {most} are needed")
    if any(one.name == "MUFU.RSQ" for one in path) and not machine_code.is_usual_for_one(path):
        wrong.append("a root of 0 takes the slow path")
    return wrong


def read() -> dict[Variant, dict[str, Figures]]:
    """Return the rows of the file, :data:`MOST` at most. A row of which nothing was measured yet has no figures."""
    rows: dict[Variant, dict[str, Figures]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines()[1:]:
        kernel, constants, *cells = line.split("\t")
        figures = {}
        for number, target in enumerate(COLUMNS if cells else ()):
            each, registers, blocks = cells[3 * number : 3 * number + 3]
            figures[target] = Figures(float(each) if each != "-" else None, int(registers), int(blocks))
        rows[Variant(kernel, constants)] = figures
    if len(rows) > MOST:
        raise ValueError(f"{FILE.name} has {len(rows)} rows: at most {MOST} are compiled for each commit")
    return rows


def written(rows: Mapping[Variant, Mapping[str, Figures]]) -> str:
    """Return the file with these rows."""
    lines = [_HEAD]
    for variant, row in rows.items():
        cells: list[str] = [*variant]
        for found in (row[target] for target in COLUMNS):
            each = "-" if found.instructions is None else f"{found.instructions:.1f}"
            cells += (each, *map(str, found[1:]))
        lines.append("\t".join(cells))
    return "\n".join(lines) + "\n"


def compared(variant: Variant, target: str, found: Figures, row: Mapping[str, Figures]) -> list[str]:
    """Return what is more than the table, or a promise, allows."""
    limits = [(f"{FILE.name} says", row[target])] if target in row else []
    if target == "sm_90" and (promised := BOUNDS.get(" ".join(variant))):
        limits.append(("is promised", Figures(*promised)))
    wrong = []
    for who, limit in limits:
        if found.instructions is not None and (limit.instructions is None or found.instructions > limit.instructions):
            wrong.append(f"{found.instructions} instructions an element, where {limit.instructions} {who}")
        if found.registers > limit.registers:
            wrong.append(f"{found.registers} registers, where {limit.registers} {who}")
        if found.blocks < limit.blocks:
            wrong.append(f"{found.blocks} at a time, where {limit.blocks} {who}")
    return wrong
