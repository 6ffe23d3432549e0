"""Faults that old scripts meet today, raised for real, are explained; faults of other kinds are not.

Covers: xamp.run.ages.
"""

from __future__ import annotations

import collections
import importlib
import io
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from xamp.run import ages


class _Old(torch.autograd.Function):
    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return x


def _load_object() -> None:
    file = io.BytesIO()
    torch.save({"args": collections.Counter("a"), "f": ages.explain}, file)
    file.seek(0)
    torch.load(file)


def _accuracy() -> None:
    correct = torch.ones(4, 6).t() == torch.ones(1, 4)
    correct[:2].view(-1).float().sum()


class _StepLR:
    def __init__(self, optimizer: Any) -> None:
        pass


def _steps_before_the_backward() -> None:
    w = torch.ones(1, requires_grad=True)
    first, second = torch.optim.SGD([w], lr=0.1), torch.optim.SGD([w], lr=0.1)
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    first.step()
    loss.backward()
    second.step()


AGED: dict[str, tuple[Callable[[], Any], str]] = {
    "full of int": (
        lambda: functional.binary_cross_entropy_with_logits(torch.zeros(2), torch.full((2,), 1)),
        "torch.full",
    ),
    "view": (_accuracy, "reshape"),
    "view of a comparison": (lambda: torch.ones(4, 6).t().eq(1.0)[:2].view(-1), "reshape"),
    "data[0]": (lambda: torch.ones(2).sum().data[0], "loss.item()"),
    "legacy function": (lambda: _Old()(torch.ones(1)), "static methods"),  # type: ignore[no-untyped-call]
    "byte mask": (lambda: torch.ones(2).masked_fill(torch.ones(2, dtype=torch.uint8), 0.0), "mask.bool()"),
    "1 - mask": (lambda: 1 - (torch.ones(2) > 0), "~mask"),
    "int32 labels": (lambda: functional.cross_entropy(torch.ones(2, 3), torch.ones(2, dtype=torch.int32)), ".long()"),
    "iterator.next": (lambda: iter(torch.utils.data.DataLoader([1])).next(), "next(iterator)"),  # type: ignore[attr-defined, arg-type]
    "weights_only": (_load_object, "weights_only=False"),
    "symeig": (lambda: torch.symeig(torch.eye(2)), "took its place"),  # type: ignore[attr-defined]
    "no torch._six": (lambda: importlib.import_module("torch._six"), "math.inf"),
    "no rfft": (lambda: torch.rfft(torch.ones(2), 1), "torch.fft.rfft"),  # type: ignore[attr-defined]
    "no ffi": (lambda: importlib.import_module("torch.utils.ffi"), "cpp_extension"),
    "no Iterable": (lambda: collections.Iterable, "collections.abc.Iterable"),  # type: ignore[attr-defined]
    "async statement": (lambda: compile("x = x.cuda(async=True)", "old.py", "exec"), "non_blocking=True"),
    "async": (lambda: torch.nn.Linear(1, 1).cuda(**{"async": True}), "non_blocking=True"),
    "python 2": (lambda: compile("print 'x'", "x", "exec"), "Python 2"),
    "verbose": (lambda: _StepLR(None, verbose=True), "schedulers"),  # type: ignore[call-arg]
    "a step between": (_steps_before_the_backward, "after the last backward"),
    "reduction": (lambda: functional.mse_loss(torch.ones(1), torch.ones(1), reduction="elementwise"), "reduction"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", AGED)
def test_what_comes_from_age_is_told_as_that(case: str) -> None:
    code, says = AGED[case]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        code()
    explained = ages.explain(caught.value)
    assert any(line.startswith("the script's age: ") and says in line for line in explained), (caught.value, explained)


def test_a_program_of_the_driver_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        subprocess.run([tmp_path / "nvidia-smi"], check=True)
    (line,) = ages.explain(caught.value)
    assert line.startswith("not redirected: this program comes with the driver of another device")


OTHERS: dict[str, BaseException] = {
    "a merge left open": SyntaxError("invalid syntax", ("a.py", 1, 1, "=======\n")),
    "shape": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "key": KeyError("weight"),
    "attribute": AttributeError("module 'torch' has no attribute 'zeroes'"),
    "import": ModuleNotFoundError("No module named 'mypackage'"),
    "value": ValueError("Expected more than 1 value per channel"),
}


def _chunk() -> None:
    q, _ = torch.ones(4, 6).t().chunk(2)
    q.view(-1)


NEW: dict[str, Callable[[], Any]] = {
    "a view of a chunk": _chunk,
    "a view of what has no name": lambda: torch.ones(4, 6).t()[:2].view(-1),
    "an index of a number": lambda: torch.ones(2).sum()[1],
    "a word of its own": lambda: _chunk(verbose=True),  # type: ignore[call-arg]
    "a loss's word of its own": lambda: _chunk(reduce=True),  # type: ignore[call-arg]
    "a mode": lambda: functional.mse_loss(torch.ones(1), torch.ones(1), reduction="average"),
    "a word of a model of its own": lambda: _chunk(pretrained=True),  # type: ignore[call-arg]
    "a range of its own": lambda: _chunk(range=1),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", NEW)
def test_what_a_new_script_meets_too_is_no_age(case: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        NEW[case]()
    assert ages.explain(caught.value) == []


def _of_a_file(folder: Path, text: str) -> list[str]:
    """What is said of the error that a script of its own raises."""
    path = folder / f"script{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    with pytest.raises(RuntimeError) as caught:
        exec(compile(text, path, "exec"), {})
    return ages.explain(caught.value)


INTEGERS = "import torch\ny = {}\ntorch.nn.functional.binary_cross_entropy_with_logits(torch.zeros(2), y)\n"
CHANGED = "import torch\nw = torch.ones(1, requires_grad=True)\ny = w.exp()\ny += 1\n{}\n(y * 2).sum().backward()\n"


def test_what_the_file_has_tells_whether_age_is_behind_it(tmp_path: Path) -> None:
    assert "torch.full()" in _of_a_file(tmp_path, INTEGERS.format("torch.full((2,), 1)"))[0]
    assert _of_a_file(tmp_path, INTEGERS.format("torch.tensor([1, 2])")) == []
    assert _of_a_file(tmp_path, CHANGED.format("o = 1")) == []


@pytest.mark.parametrize("case", OTHERS)
def test_other_faults_are_left_alone(case: str) -> None:
    assert ages.explain(OTHERS[case]) == []


@pytest.mark.parametrize("name", [name for name in ages.REMOVED if name.startswith("torch.")])
def test_names_told_as_removed_are_gone(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        found = hasattr(importlib.import_module(module), attribute)
    except ImportError:
        found = False
    if not found:
        with pytest.raises(ImportError):
            importlib.import_module(name)
    assert not found, f"{name} is there"
