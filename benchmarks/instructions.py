"""Instructions of a training step, which other load on the machine does not change.

Bytecodes are those that Python executes; they are counted everywhere, and a test holds them to their bound. Where
valgrind is installed callgrind counts the processor's instructions too, those of torch included.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks import bounds
from benchmarks.report import Figure
from benchmarks.step import FORMS, Ours, Theirs

COUNTS = (1, 50)
STEPS = 4
LIMIT_S = 1500.0
"""Seconds for callgrind. It runs some fifty times slower, and torch's import is most of it."""

Call = Callable[[], object]


def run(with_callgrind: bool) -> list[Figure]:
    """Count on a CPU, where all that a step does is instructions."""
    device = torch.device("cpu")
    figures = []
    for (case, ours), theirs in zip(sides(device, "xamp"), dict(sides(device, "torch.amp")).values(), strict=True):
        mine, other = bytecodes(ours), bytecodes(theirs)
        bound = bounds.BYTECODES_RATIO[case]
        figures.append(Figure(f"{case}: bytecodes", mine / other, "ratio", bound, f"{mine} : {other}"))
    return figures + (callgrind() if with_callgrind else [])


def sides(device: torch.device, side: str) -> list[tuple[str, Call]]:
    """The steps of :mod:`benchmarks.step` on one side, by form and number of parameters; the first ones are done."""
    found: list[tuple[str, Call]] = []
    for form, (make, fused) in FORMS.items():
        for count in COUNTS:
            loop: Any = Theirs(count, make, device)
            if side == "xamp":
                loop = Ours(count, make, device, "O1", "auto" if fused else False)
            for _ in range(20):
                loop()
            found.append((f"{form}, {count}", loop))
    return found


def bytecodes(call: Call) -> int:
    """Python's bytecodes in one call: the smallest number of several, since some calls look after what is older."""
    _bytecodes(call)  # Python 3.12 counts none in code that it runs under a tracer for the first time
    return min(_bytecodes(call) for _ in range(STEPS))


def _bytecodes(call: Call) -> int:
    count = 0

    def local(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "opcode"
        return local

    def started(frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(started)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def callgrind() -> list[Figure]:
    """The processor's instructions of all cases; of none where there is no valgrind that torch can talk to."""
    if shutil.which("valgrind") is None or not _C._valgrind_supported_platform():
        return []
    found = {side: _counted(side) for side in ("xamp", "torch.amp")}
    figures = []
    for case, mine in found["xamp"].items():
        other = found["torch.amp"][case]
        detail = f"{mine} : {other}"
        figures.append(Figure(f"{case}: instructions", mine / other, "ratio", bounds.INSTRUCTIONS_RATIO, detail))
    return figures


_C: Any = torch._C  # not all that it has stands in torch's types


def _counted(side: str) -> dict[str, int]:
    """Instructions of one step of each case. The child asks callgrind for a file after each case."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--collect-atstart=no", f"--callgrind-out-file={file}"]
        command += [sys.executable, "-m", "benchmarks.instructions", side]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"callgrind of {side} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        files = sorted(file.parent.glob("out.*"), key=lambda each: int(each.suffix[1:]))
        totals = [_total(each.read_text(encoding="utf-8", errors="replace")) for each in files]
    names = [f"{form}, {count}" for form in FORMS for count in COUNTS]
    return dict(zip(names, (total // STEPS for total in totals), strict=True))


def _total(text: str) -> int:
    """The instructions that a file of callgrind tells."""
    (found,) = re.findall(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)[:1]
    return int(found)


def _be_measured(side: str) -> None:
    """Collect :data:`STEPS` steps of each case, and have them written."""
    torch.set_num_threads(1)
    for _, call in sides(torch.device("cpu"), side):
        _C._valgrind_toggle()
        for _ in range(STEPS):
            call()
        _C._valgrind_toggle_and_dump_stats()


if __name__ == "__main__":
    _be_measured(sys.argv[1])
