"""What has nothing to do with xamp computes the same bits before and after the portable policy is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xamp.casting.ops.portable import PLAIN
from xamp.casting.ops.samples import operator, samples

WORKER = Path(__file__).resolve().parents[2] / "support" / "foreign_code.py"


def test_foreign_code_is_bit_identical_also_beside_a_region_in_another_thread() -> None:
    done = subprocess.run([sys.executable, str(WORKER)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    ran, changed, beside = map(int, done.stdout.split())
    assert ran >= 60  # computations in bfloat16, each in three states of autocast
    assert changed >= 20  # what a region makes of the same ones
    assert beside == 1000


class Calls(TorchDispatchMode):
    """Lists the operators that are called below Autocast and Autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("overload", PLAIN)
def test_an_operator_of_plain_calls_one_other_operator(overload: str) -> None:
    for sample in samples(overload):
        call = sample.call("cpu", torch.float32, grad=False)
        with Calls() as calls:
            operator(overload)(*call.args, **call.kwargs)
        assert calls.found == [PLAIN[overload]]


INSIDE = """
import torch
from xamp.casting.ops import portable
library = torch.library.Library("aten", "IMPL")
def softmax(x, dim, half_to_float):
    with torch.autocast("cpu", enabled=False):
        return torch.ops.aten._softmax(x.float(), dim, half_to_float)
library.impl("_softmax", softmax, "AutocastCPU")
portable.install("cpu", {})
with torch.autocast("cpu", torch.bfloat16):
    print(torch.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1).dtype)
    print(torch.layer_norm(torch.ones(2, 2, dtype=torch.bfloat16), (2,)).dtype)
"""
CELL = """
import torch
from xamp.casting.ops import portable
portable.install("cpu", {"gru_cell": "lower", "lstm_cell": "lower"})
torch.manual_seed(0)
gru, lstm, x = torch.nn.GRUCell(3, 4), torch.nn.LSTMCell(3, 4), torch.randn(2, 3)
with torch.autocast("cpu", torch.bfloat16):
    found = [gru(x), *lstm(x)]
for each, wanted in zip(found, [gru(x), *lstm(x)]):
    print(each.dtype, bool((each - wanted).abs().max() < 0.02))
"""


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_device_that_lists_what_a_plain_operator_calls_is_asked() -> None:
    assert printed(INSIDE) == ["torch.float32", "torch.bfloat16"]


def test_a_device_may_have_a_rule_for_cells() -> None:
    assert printed(CELL) == ["torch.bfloat16 True"] * 3
