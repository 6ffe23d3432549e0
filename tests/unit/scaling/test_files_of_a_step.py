"""How many files a step crosses: a person must be able to hold a step in the head.

Covers: xamp.scaling.engine, docs/architecture.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.torch_compat.torch_private import autocast

ROOT = Path(__file__).parents[3]
FOLDERS = [Path(xamp.__file__).resolve().parent, (Path(xamp.__file__).parent / "backends").resolve()]
MOST = 25


def listed() -> list[str]:
    """The files that the page lists, in its order."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The way of a training step\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `(\S+\.py)` ", section, re.MULTILINE)


def entered() -> list[str]:
    """The files of xamp and its backends of which a third step at O2 runs a function, in the order of the first."""
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    model, optimizer = xamp.initialize(model, optimizer, "O2", verbosity=0)
    codes: dict[str, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            codes[frame.f_code.co_filename] = None

    before = sys.getprofile()
    for number in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8)).square().mean()
        try:
            sys.setprofile(note if number == 2 else before)
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        finally:
            sys.setprofile(before)
    files = dict.fromkeys(Path(name).resolve() for name in codes)
    ours = [path for path in files if any(folder in path.parents for folder in FOLDERS)]
    return [path.relative_to(FOLDERS[0].parent).as_posix() for path in ours]


def test_a_step_enters_the_files_that_the_page_lists_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "clear_autocast_cache", torch._C.clear_autocast_cache)  # as where nobody has used fp8
    files = entered()
    assert files == listed()
    assert len(files) <= MOST
