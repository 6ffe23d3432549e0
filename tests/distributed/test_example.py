"""examples/distributed/train.py, as torchrun starts it: it learns, and its ranks agree.

Covers: examples/distributed/train.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from forked_ranks import Ranks

WORKER = Path(__file__).parent / "example_worker.py"


@pytest.mark.parametrize(
    ("engine", "level"),
    [
        ("ddp", "O2"),
        ("fsdp2", "O5"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("ddp", "O1"), ("fsdp2", "O1"), ("fsdp2", "O2"))
        ),
    ],
)
def test_it_learns(engine: str, level: str, forked_ranks: Ranks, tmp_path: Path) -> None:
    """In 12 steps it is better than guessing among 50 letters, which is 3.9."""
    output = tmp_path / "output.txt"
    forked_ranks.run(WORKER, "--engine", engine, "--level", level, "--steps", "12", output=output, covered=False)
    (found,) = re.findall(r"^2 ranks on cpu, (\w+), (\w+): loss (\S+)$", output.read_text(), re.MULTILINE)
    assert found[:2] == (engine, level)
    assert float(found[2]) < 3.6
