"""``xamp.apex.amp`` trains as the last ``apex.amp`` did: the same weights, scales, skips and messages, in 122 cases.

``tests/data/apex/training.json`` holds what the real one gave for the cases of ``apex_training``, moved to CPU tensors,
on some machines: ``sha256`` is a list in their order, and so are the facts that a case names in ``by_machine``. Such a
case trains so wildly that another rounding has its gradients overflow at other steps.

Covers: xamp.apex.amp, xamp.apex._engine, xamp.apex._loss_scaler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import apex_training
import pytest
import torch
from apex_training import CASES, Case

from xamp.apex import amp

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "apex" / "training.json").read_text(encoding="utf-8"))
HERE = apex_training.recorded_here(RECORDED["made_by"]["machines"])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_every_case_is_recorded() -> None:
    assert set(RECORDED["cases"]) == {case.name for case in CASES}


@pytest.mark.drawn(50)
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_apex(case: Case) -> None:
    recorded = RECORDED["cases"][case.name]
    found = apex_training.run(amp, case)
    assert found["header"] == RECORDED["headers"][recorded["header"]]
    for fact in ("printed", "scales", "unskipped", "skipped"):
        if fact not in recorded.get("by_machine", ()):
            assert found[fact] == recorded[fact]
        elif HERE is not None:
            assert found[fact] == recorded[fact][HERE]
    # After 6 steps. Other CPUs have other kernels for fp16: 1.5e-2 was seen there, and 1.2e-6 in fp32.
    assert_near(found["values"], recorded["values"], 1e-5 if case.level == "O0" else 3e-2)
    if HERE is not None:
        assert found["sha256"] == recorded["sha256"][HERE], "near, but not the same bits"


def assert_near(found: dict[str, str], recorded: dict[str, str], bound: float) -> None:
    """Dtypes equal; first entries and sums of absolute values differ by ``bound`` times 1 + the number at most."""
    assert found.keys() == recorded.keys()
    for name, line in recorded.items():
        dtype, *numbers = line.split()
        mine_dtype, *mine_numbers = found[name].split()
        assert mine_dtype == dtype
        mine, theirs = (torch.tensor([float.fromhex(x) for x in each]) for each in (mine_numbers, numbers))
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound, equal_nan=True, msg=name)
