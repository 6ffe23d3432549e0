"""What ``xamp doctor`` says of torch's autocast lists where they are not those that the table was written from.

Covers: xamp.doctor.lists, xamp.casting.ops.parts, xamp.casting.ops.table.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from site_packages import distribution, doctor_finds

import xamp
from xamp.casting.ops.parts import HERE
from xamp.casting.ops.table import LAYERS, OWN, RULES
from xamp.cli._doctor_text import render, report
from xamp.doctor import lists
from xamp.doctor.lists import list_findings
from xamp.op_dtypes.observe import has_entry
from xamp.op_dtypes.survey import own_list
from xamp.registry.findings import NOTE, Finding

version = tuple(int(part) for part in torch.__version__.split(".")[:2])
WRITTEN_FROM = (2, 13)
WHERE = f"torch {torch.__version__}: its autocast list for"
CURE = "a newer xamp may know them; `xamp policy show` says what becomes of the others"
OLDER = "lacks overloads that other releases list: rms_norm; under the portable policy xamp casts them"
PLAIN = [] if has_entry("rms_norm", "cuda") else [Finding(NOTE, f"{WHERE} cuda {OLDER}")]
"""What is to be said of the torch that runs this."""

LONGER = """
import torch

def load():
    global libraries
    libraries = [torch.library.Library("aten", "IMPL") for _ in range(2)]
    libraries[0].impl("relu", torch.library.fallthrough_kernel, "AutocastCUDA")
    libraries[0].impl("abs", torch.library.fallthrough_kernel, "AutocastCUDA")
    libraries[1].impl("hypot", torch.library.fallthrough_kernel, "AutocastCPU")
"""


def test_the_table_knows_the_lists_of_every_torch_that_is_supported() -> None:
    assert list(list_findings()) == PLAIN
    assert not PLAIN or version < WRITTEN_FROM


def test_what_xamp_adds_itself_is_not_said_to_be_torchs() -> None:
    xamp.initialize(torch.nn.Linear(1, 1), level="O4", verbosity=0)
    assert list(list_findings()) == PLAIN
    assert own_list("cpu", {}) <= OWN["cpu"] | RULES.keys()


def test_overloads_that_the_table_does_not_know_are_told_with_their_device(tmp_path: Path) -> None:
    distribution(tmp_path, "torch-longer", "longer = torch_longer:load", "torch.backends", torch_longer=LONGER)
    found = doctor_finds(folder=tmp_path, code=0)
    told = {"severity": NOTE, "cure": CURE}
    text = "has overloads that xamp does not know, and leaves to that list:"
    assert found["torch"]["findings"] == [
        {**told, "text": f"{WHERE} cuda {text} abs, relu"},
        *map(dataclasses.asdict, PLAIN),
        {**told, "text": f"{WHERE} cpu {text} hypot"},
    ]
    assert f"note {WHERE} cpu {text} hypot cure {CURE}" in " ".join(render(found).split())
    assert f"\n  note: {WHERE} cuda {text} abs, relu\n" in report(found)


def test_overloads_that_a_list_lacks_are_told_where_torch_has_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lists._EXPECTED, "cpu", (OWN["cpu"] | {"relu", "no_such_operator"}, "so it is"))
    text = "lacks overloads that other releases list: relu; so it is"
    assert list(list_findings()) == [*PLAIN, Finding(NOTE, f"{WHERE} cpu {text}")]


def test_the_rows_that_this_torch_has_are_those_of_its_operators() -> None:
    assert list(HERE) == [name for name in RULES if name in HERE]
    assert HERE.keys() >= LAYERS
    lacking = {"linalg_matrix_sqrth"} if version < (2, 15) else set()
    assert RULES.keys() - HERE.keys() == lacking
