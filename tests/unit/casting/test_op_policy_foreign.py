"""What has nothing to do with xamp computes the same bits before and after the portable policy is there.

Covers: xamp.casting.ops.portable.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from torch.utils._python_dispatch import TorchDispatchMode

from xamp.casting.ops.parts import operator
from xamp.casting.ops.portable import CALLS_NONE
from xamp.op_dtypes.samples import samples

WORKER = Path(__file__).resolve().parents[2] / "support" / "foreign_code.py"


def test_foreign_code_is_bit_identical_also_beside_a_region_in_another_thread() -> None:
    done = subprocess.run([python(), str(WORKER)], capture_output=True, text=True, timeout=300)
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


@pytest.mark.parametrize("overload", CALLS_NONE)
def test_an_operator_of_plain_calls_one_other_operator(overload: str) -> None:
    for sample in samples(overload):
        call = sample.call("cpu", torch.float32, grad=False)
        with Calls() as calls:
            operator(overload)(*call.args, **call.kwargs)
        assert calls.found == [CALLS_NONE[overload]]


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
portable.install("cpu", dict.fromkeys(("gru_cell", "lstm_cell"), RULE))
torch.manual_seed(0)
gru, lstm, x = torch.nn.GRUCell(3, 4), torch.nn.LSTMCell(3, 4), torch.randn(2, 3)
with torch.autocast("cpu", torch.bfloat16):
    found = [gru(x), *lstm(x)]
for each, wanted in zip(found, [gru(x), *lstm(x)]):
    print(each.dtype, bool((each - wanted).abs().max() < 0.02), torch.equal(each, wanted))
"""
FAILED = """
import torch, xamp
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 4)
    def forward(self, x):
        return self.words(x).softmax(-1)
model = Model()
xamp.initialize(model, level="O4", verbosity=0)
compiled = torch.compile(model, backend="eager")
try:
    compiled(torch.tensor([7]))
except IndexError:
    print("an error in a compiled region")
with torch.autocast("cpu", torch.bfloat16):
    print(torch.ones(2, 2, dtype=torch.bfloat16).softmax(-1).dtype)
"""
INNER = """
import torch, xamp
from torch import nn
@torch.library.custom_op("mine::paused", mutates_args=())
def paused(x: torch.Tensor) -> torch.Tensor:
    with xamp.disable_casts():
        return x.float() * 2
@paused.register_fake
def _(x):
    return x.float()
class Block(nn.Module):
    def forward(self, x):
        return paused(x)
class Model(nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.block = torch.compile(Block(), backend=backend) if backend else Block()
    def forward(self, x):
        y = self.linear(x)
        self.block(y)
        print(y.dtype, y.softmax(-1).dtype)
        return y
for backend in (None, "eager", "aot_eager"):
    model = Model(backend)
    xamp.initialize(model, level="O4", verbosity=0)
    with torch.no_grad():
        model(torch.ones(2, 4))
"""
SCRIPTED = """
import torch
from torch.overrides import TorchFunctionMode
from xamp.casting.ops import portable
portable.install("cpu", {})
class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        print(getattr(function, "__name__", function))
        return function(*args, **(kwargs or {}))
scripted = torch.jit.CompilationUnit("def scripted(x):\\n    return torch.softmax(x, -1)\\n").scripted
x = torch.ones(2, 2, dtype=torch.bfloat16)
with torch.autocast("cpu", torch.bfloat16), Mode():
    scripted(x)
"""


def printed(code: str) -> list[str]:
    done = subprocess.run([python(), "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_device_that_lists_what_a_plain_operator_calls_is_asked() -> None:
    assert printed(INSIDE) == ["torch.float32", "torch.bfloat16"]


def test_a_device_may_have_a_rule_for_cells() -> None:
    assert printed(CELL.replace("RULE", '"lower"')) == ["torch.bfloat16 True False"] * 3
    assert printed(CELL.replace("RULE", '"fp32"')) == ["torch.float32 True True"] * 3


def test_an_error_in_a_compiled_region_does_not_outlive_it() -> None:
    assert printed(FAILED) == ["an error in a compiled region", "torch.bfloat16"]


def test_a_region_goes_on_after_one_inside_compiled_code() -> None:
    assert printed(INNER) == ["torch.bfloat16 torch.float32"] * 3


def test_modes_do_not_see_what_scripted_code_calls() -> None:
    assert "softmax" not in printed(SCRIPTED)
