"""AMD's machine code, as LLVM writes it: the path that a full aligned block takes, and what stands on it.

Each line says which line of the kernel it comes from, so loads and stores of elements are told from those of tables: by
the functions of :mod:`xamp.onepass.elements` that read and write them. A wait for ``vmcnt(N)`` ends when at most N of
the accesses before it are under way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ci.kernels.machine_code import WIDE, Loads, way_through
from xamp.onepass import elements

__all__ = ["Instruction", "early_uses", "loads_of", "path_of"]

_FILE = re.compile(r'\s+\.file\s+(\d+).*"(\w+)\.py"')
_PLACE = re.compile(r"\s+\.loc\s+(\d+)\s+(\d+)\s")
_LINE = re.compile(r"\s+([a-z]\w*)\b[ \t]*([^;]*?)\s*(?:;.*)?$")
_LABEL = re.compile(r"(\.LBB\w+):")
_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_WIDTHS = {"dwordx4": 16, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2}
_REGISTERS = re.compile(r"\bv(?:(\d+)|\[(\d+):(\d+)\])")


class Instruction(NamedTuple):
    """One instruction; ``access`` is ``"load"`` or ``"store"`` of elements, or empty; ``width`` is in bytes."""

    name: str
    operands: str
    access: str = ""
    width: int = 0


def path_of(code: str) -> list[Instruction]:
    """Return the path of a full aligned block. ValueError: there is a loop, or a jump that is not understood."""
    lines, labels = _read(code)
    return way_through(lines, lambda at: _ways(lines[at], labels, at), lambda one: WIDE * (one.width >= 8))


def _read(code: str) -> tuple[list[Instruction], dict[str, int]]:
    functions = elements.read, elements.write, elements.wide, elements.narrow  # an access may have the place of a cast
    own = {line for each in functions for line in _lines_of(each)}
    files: dict[str, str] = {}
    lines: list[Instruction] = []
    labels: dict[str, int] = {}
    is_of_elements = False
    for text in code[code.index(".cfi_startproc") : code.index(".cfi_endproc")].splitlines():
        if file := _FILE.match(text):
            files[file[1]] = file[2]
        elif place := _PLACE.match(text):
            is_of_elements = files.get(place[1]) == "elements" and int(place[2]) in own
        elif label := _LABEL.match(text):
            labels[label[1]] = len(lines)
        elif line := _LINE.match(text):
            access = _ACCESS.match(line[1]) if is_of_elements else None
            found = (access[1], _WIDTHS.get(access[2], 0)) if access else ("", 0)
            lines.append(Instruction(line[1], line[2], *found))
    return lines, labels


def _lines_of(function: object) -> range:
    """Return the lines of a kernel's function in its file."""
    code = function.fn.__code__  # type: ignore[attr-defined]
    return range(code.co_firstlineno, max(line for *_, line in code.co_lines() if line) + 1)


def _ways(line: Instruction, labels: Mapping[str, int], at: int) -> list[int]:
    if line.name == "s_endpgm":
        return []
    if line.name == "s_branch":
        return [labels[line.operands]]
    if line.name.startswith("s_cbranch_"):
        return [at + 1, labels[line.operands]]
    if line.name.startswith(("s_setpc", "s_swappc", "s_call")):
        raise ValueError(f"a jump that is not understood: {line}")
    return [at + 1]


def loads_of(path: Sequence[Instruction]) -> Loads:
    """Return the accesses of a path to elements."""
    loads, stores = ([one.width for one in path if one.access == kind] for kind in ("load", "store"))
    return loads, stores


def _registers(operands: str) -> set[int]:
    found = ((int(one or first), int(one or last)) for one, first, last in _REGISTERS.findall(operands))
    return {register for first, last in found for register in range(first, last + 1)}


def early_uses(path: Sequence[Instruction]) -> list[Instruction]:
    """Return what uses an element, or waits for one, before the loads of all are on their way."""
    loads = [at for at, one in enumerate(path) if one.access == "load"]
    found: list[Instruction] = []
    waiting: set[int] = set()
    under_way = 0  # accesses since the first load of an element
    for one in path[loads[0] : loads[-1]]:
        wait = re.search(r"vmcnt\((\d+)\)", one.operands) if one.name == "s_waitcnt" else None
        if one.access == "load":
            waiting |= _registers(one.operands.split(",")[0])
        elif (wait and int(wait[1]) < under_way) or _registers(one.operands) & waiting:
            found.append(one)
        under_way += bool(_ACCESS.match(one.name))
    return found
