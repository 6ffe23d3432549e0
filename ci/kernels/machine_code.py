"""NVIDIA's machine code, read as text: the path that a full aligned block takes, and what stands on it.

``nvdisasm`` comes with Triton. The path goes from the entry to the exit; where it forks, it takes the side with the
wider accesses to memory, and never a slow path of a root or a division, which is a call.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import triton

__all__ = ["WIDE", "Instruction", "disassembled", "early_uses", "is_usual_for_one", "loads_of", "path_of", "resources"]

_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^\s*\.?([\w$.]+):\s*$")
_CALL, WIDE = 10**6, 10**4
_WIDTHS = {"128": 16, "64": 8, "": 4, "U16": 2}
Line = TypeVar("Line")
Loads = tuple[list[int], list[int]]
"""Widths in bytes of the loads and of the stores on a path, in order."""


class Instruction(NamedTuple):
    """One instruction: what it is executed under (empty: always), its name with modifiers, the rest of its line."""

    predicate: str
    name: str
    operands: str

    @property
    def width(self) -> int:
        """How many bytes a load or store takes."""
        return _WIDTHS[next((part for part in self.name.split(".") if part in _WIDTHS), "")]


def disassembled(cubin: bytes) -> str:
    """Return the machine code of a kernel."""
    return _tool("nvdisasm", "-c", cubin)


def resources(cubin: bytes) -> Mapping[str, int]:
    """Return what a kernel takes: ``REG``, and bytes of ``STACK``, ``SHARED`` and ``LOCAL`` memory."""
    found = re.findall(r"\b([A-Z]+):(\d+)", _tool("cuobjdump", "-res-usage", cubin))
    return {name: int(count) for name, count in found}


def _tool(name: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        ran = subprocess.run([_TOOLS / name, option, file], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


def path_of(code: str) -> list[Instruction]:
    """Return the path of a full aligned block. ValueError: there is a loop, or a jump that is not understood."""
    lines: list[Instruction] = []
    labels: dict[str, int] = {}
    for text in code.splitlines():
        if line := _LINE.match(text):
            lines.append(Instruction(line[2] or "", line[3], line[4]))
        elif label := _LABEL.match(text):
            labels[label[1]] = len(lines)
    if not lines:
        raise ValueError("no machine code was found in what nvdisasm said")

    def worth(line: Instruction) -> int:
        is_wide = line.name.startswith(("LDG", "STG")) and line.width >= 8
        return WIDE * is_wide - _CALL * line.name.startswith("CALL")

    return way_through(lines, lambda at: _ways(lines[at], labels, at), worth)


def way_through(lines: Sequence[Line], ways: Callable[[int], list[int]], worth: Callable[[Line], int]) -> list[Line]:
    """Return the path whose lines are worth most, then the shortest; ``ways`` lead on from a line. No loop may be."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 4 * len(lines)))
    best: dict[int, tuple[int, int | None] | None] = {}  # what the best way to the exit is worth, and its next line

    def value(at: int) -> int:
        if at not in best:
            best[at] = None  # a second visit from here on is a loop
            own = worth(lines[at]) - 1
            found: list[tuple[int, int | None]] = [(own + value(way), way) for way in ways(at)]
            best[at] = max(found, key=lambda way: way[0], default=(own, None))
        if (chosen := best[at]) is None:
            raise ValueError("the code has a loop: no path is told from the others")
        return chosen[0]

    value(0)
    path: list[Line] = []
    at: int | None = 0
    while at is not None:
        path.append(lines[at])
        at = (best[at] or (0, None))[1]
    return path


def _ways(line: Instruction, labels: Mapping[str, int], at: int) -> list[int]:
    kind = line.name.split(".")[0]
    if kind in ("BRX", "JMP", "JMX", "RET"):
        raise ValueError(f"a jump that is not understood: {line}")
    if kind == "EXIT":
        return [at + 1] if line.predicate else []
    if kind != "BRA" or line.name.startswith("BRA.DIV"):  # that one is for threads of a warp that went apart
        return [at + 1]
    target = re.search(r"`\(\.?([\w$.]+)\)", line.operands)
    there = [labels[target[1]]] if target else []
    return [at + 1, *there] if line.predicate or "," in line.operands else there


def loads_of(path: Sequence[Instruction]) -> Loads:
    """Return the accesses of a path."""
    loads, stores = ([one.width for one in path if one.name.startswith(kind)] for kind in ("LDG", "STG"))
    return loads, stores


def early_uses(path: Sequence[Instruction], elements: int) -> list[Instruction]:
    """Return what uses an element before the last of ``elements`` wide loads, those of elements, is on its way.

    The loads of tables, which say where elements are, come before.
    """
    wide = [at for at, one in enumerate(path) if one.name.startswith("LDG") and one.width >= 8][-elements:]
    found: list[Instruction] = []
    waiting: set[int] = set()
    for at in range(wide[0], wide[-1] + 1):
        named = [int(number) for number in re.findall(r"\bR(\d+)", path[at].operands)]
        if at in wide:
            waiting |= {named[0] + more for more in range(max(1, path[at].width // 4))}  # what it writes
        elif waiting.intersection(named):
            found.append(path[at])
    return found


def is_usual_for_one(path: Sequence[Instruction]) -> bool:
    """Return whether each root on the path is of 1 where an element is to stay 0, and takes the usual path then.

    The slow path of ``sqrt.rn.f32`` is taken where the bits of its argument, moved by one constant, are above another.
    """
    root_of = [one.operands.split(", ")[1] for one in path if one.name == "MUFU.RSQ"]
    chosen = {one.operands.split(", ")[0] for one in path if one.name == "FSEL" and ", 1, " in one.operands}
    kinds = ("VIADD", "IADD3"), ("ISETP.GT.U32",)
    adds, compares = ([one.operands for one in path if one.name.startswith(kind)] for kind in kinds)
    moved = {int(x, 16) for operands in adds for x in re.findall(r", (0x\w{8})", operands)}
    most = {int(x, 16) for operands in compares for x in re.findall(r"(0x7\w{7})", operands)}
    pairs = [(move, bound) for move in moved for bound in most]
    one_is_usual = any((0x3F800000 + move) % 2**32 <= bound < move for move, bound in pairs)  # and 0 would not be
    return set(root_of) <= chosen and one_is_usual
