"""Servers that tests fork processes from: where a device was started in one, it starts processes anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import Runs
from forked_ranks import Ranks
from site_packages import distribution

# A device that starts with torch: forked processes may not use it.
STARTED = """
import os, sys, types
def start():
    owner = os.getpid()
    device = types.ModuleType("torch.quipu")
    device.is_available, device._is_in_bad_fork = lambda: True, lambda: os.getpid() != owner
    sys.modules["torch"].quipu = device
"""
TELL = "[torch.quipu._is_in_bad_fork() if hasattr(torch, 'quipu') else None, 'colorsys' in sys.modules]"
RANK = f"""
import json, os, sys, torch
open(sys.argv[1] + "/" + os.environ["RANK"] + ".json", "w").write(json.dumps({TELL}))
"""
WORKER = f"""
import json, sys, torch, faults
def work(spec):
    open(spec["folder"] + "/said.json", "w").write(json.dumps({TELL}))
if __name__ == "__main__":
    faults.serve(sys.argv[1:], work, lambda: None)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "quipu", "quipu = quipu:start", "torch.backends", quipu=STARTED)
    monkeypatch.syspath_prepend(tmp_path)


def ranks(folder: Path) -> list[list[bool | None]]:
    (folder / "rank.py").write_text(RANK)
    with Ranks(["torch", "torch.distributed", "colorsys"]) as server:  # the last tells who was forked
        return server.results(folder / "rank.py", folder=folder, covered=False)


def run(folder: Path) -> bool | None:
    (folder / "worker.py").write_text(WORKER)
    with Runs(folder / "worker.py", fork=True) as runs:
        assert not runs.run({"folder": str(folder)}).killed
    said: list[bool | None] = json.loads((folder / "said.json").read_text())
    return said[0]


def test_a_rank_can_use_a_device_that_the_imports_have_started(started: None, tmp_path: Path) -> None:
    assert ranks(tmp_path) == [[False, False]] * 2


def test_a_run_can_use_a_device_that_the_imports_have_started(started: None, tmp_path: Path) -> None:
    assert run(tmp_path) is False


def test_where_none_was_started_ranks_are_forked(tmp_path: Path) -> None:
    assert ranks(tmp_path) == [[None, True]] * 2
