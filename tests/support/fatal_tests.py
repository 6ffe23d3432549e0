"""Tests that end the process on some lane, for want of something in torch: each runs in a process of its own there.

``tests/outside/LANE/fatal.json`` lists them, strict both ways: a test on the list that does not end its process fails,
and so does an entry that fits none of the tests of its file.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["ALONE", "find", "run_alone"]

ALONE = "XAMP_TEST_ALONE"
"""Set in a process that runs one test of a list."""

_OUTSIDE = Path(__file__).resolve().parents[1] / "outside"
_KEYS = {"test", "reason", "link"}
_FOUND = pytest.StashKey[Mapping[str, str]]()


def find(items: Sequence[pytest.Item]) -> None:
    """Note which of ``items`` are on the list of their lane.

    Raises:
        pytest.UsageError: an entry lacks a key, or fits no test of its file.
    """
    if ALONE in os.environ:
        return
    lanes = {lane for item in items if (lane := _lane_of(item))}
    for lane in lanes & {path.parent.name for path in _OUTSIDE.glob("*/fatal.json")}:
        mine = [item for item in items if _lane_of(item) == lane]
        for entry in _read(_OUTSIDE / lane / "fatal.json"):
            _note(entry, mine)


def _note(entry: Mapping[str, str], items: Sequence[pytest.Item]) -> None:
    test = entry["test"].partition("[")[0]
    same = [item for item in items if item.nodeid.partition("[")[0] == test]
    pattern = entry["test"].replace("[", "[[]")  # brackets stand for themselves
    fitting = [item for item in same if fnmatch.fnmatchcase(item.nodeid, pattern)]
    if same and not fitting:
        raise pytest.UsageError(f"fatal.json: {entry['test']!r} fits no case of that test: take it out, or correct it")
    for item in fitting:
        item.stash[_FOUND] = entry


def _read(path: Path) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    for entry in entries:
        if set(entry) != _KEYS:
            raise pytest.UsageError(f"{path}: {entry}: an entry has {', '.join(sorted(_KEYS))}")
    return entries


def _lane_of(item: pytest.Item) -> str:
    chosen: Any = item.callspec.params if hasattr(item, "callspec") else {}
    return str(chosen.get("lane", ""))


def run_alone(item: pytest.Item) -> bool:
    """Run a test of the list in a process of its own, and return True; return False for another test."""
    entry = item.stash.get(_FOUND, None)
    if entry is None:
        return False
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--device", _lane_of(item)]
    environment = {**os.environ, ALONE: "1"}
    root = item.config.rootpath
    done = subprocess.run(
        [sys.executable, *words, item.nodeid], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    if done.returncode >= 0:
        pytest.fail(f"it ends no process: take it out of fatal.json\n{done.stdout[-2000:]}", pytrace=False)
    pytest.xfail(f"{entry['reason']} ({entry['link']})")
