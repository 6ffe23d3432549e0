"""A step executes no more of Python than its bound: a guard that no load on the machine moves.

Covers: benchmarks.instructions, benchmarks.bounds, xamp.scaling.engine.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python import python

sys.path.append(str(Path(__file__).resolve().parents[3]))  # benchmarks/ is not installed

import xamp
from benchmarks import bounds, instructions

ROOT = Path(__file__).resolve().parents[3]


def test_bytecodes_are_counted() -> None:
    def loop(times: int) -> None:
        for _ in range(times):
            pass

    counts = [instructions.bytecodes(functools.partial(loop, times)) for times in (10, 20, 30)]
    assert counts[1] - counts[0] == counts[2] - counts[1] == 10 * 3  # the next number, its store, the jump back
    assert sys.gettrace() is None or "coverage" in repr(sys.gettrace())


COUNTED = """
from benchmarks import instructions
for figure in instructions.run(with_callgrind=False):
    print(figure.case, "missed" if figure.missed else "kept", figure.detail, sep=", ")
"""


def test_steps_keep_their_bounds() -> None:
    """In a process of its own: what other tests have noted of devices takes bytecodes too."""
    done = subprocess.run([python(), "-c", COUNTED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = [line.rpartition(", ")[0] for line in done.stdout.splitlines()]
    assert figures == [f"{case}: bytecodes, kept" for case in bounds.BYTECODES_RATIO], done.stdout


def test_a_longer_step_exceeds_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard sees a loop over the parameters, of the kind that a step must not grow."""
    parameters = list(range(150))
    whole = xamp.scale_loss

    def slower(*args: Any, **kwargs: Any) -> Any:
        assert sum(each for each in parameters)
        return whole(*args, **kwargs)

    monkeypatch.setattr(xamp, "scale_loss", slower)
    assert [figure for figure in instructions.run(with_callgrind=False) if figure.missed]


def test_totals_of_callgrind_are_read() -> None:
    assert instructions._total("version: 1\nevents: Ir\nfn=(1)\n3 4\n\ntotals: 12345\n") == 12345
    assert instructions._total("events: Ir\nsummary: 77\n") == 77
    with pytest.raises(ValueError, match="not enough values"):
        instructions._total("events: Ir\n")
