"""Policy files that each tested release of torch wrote, compared with the one that runs: the portable policy is one.

Covers: xamp.cli._policy_diff, xamp.cli._policy_file, xamp.casting.ops.table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ci_scripts import ROOT

from xamp.cli import policy
from xamp.cli._policy_diff import compare
from xamp.cli._policy_file import read

FILES = sorted((ROOT / "tests" / "data" / "releases").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_portable_policy_of_each_release_is_that_of_this_one(path: Path) -> None:
    saved = read(str(path))
    found = compare(saved, policy.show(path.stem.partition("-")[2]))
    assert found["differences"] == []
    assert found["same"] >= 100
    assert set(found["rows"]["a"] + found["rows"]["b"]) <= {"linalg_matrix_sqrth"}, "torch 2.15 brought it"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_there_is_one_of_each_release_that_wrote_checkpoints(device: str) -> None:
    releases = {path.stem for path in FILES[0].parent.glob("*.pt")}
    assert {path.stem.partition("-")[0] for path in FILES if path.stem.endswith(device)} == releases


def test_a_recorded_list_is_that_of_the_torch_that_runs() -> None:
    release = torch.__version__.partition("+")[0]
    recorded = {path.stem: read(str(path)) for path in FILES if path.stem.endswith("-cpu")}
    if f"{release}-cpu" not in recorded:
        pytest.skip(f"nothing was recorded on torch {release}")
    live, saved = policy.show("cpu"), recorded[f"{release}-cpu"]
    assert live["device_only"] == saved["device_only"]
    registered = [[row["overload"] for row in each["rows"] if row["registered"]] for each in (live, saved)]
    assert registered[0] == registered[1]
