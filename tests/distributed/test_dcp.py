"""torch.distributed.checkpoint, for which a session is a Stateful: in one process, in two, and from two to one.

Covers: xamp.sessions.session, xamp.sessions.checkpoint, xamp.sessions.sharding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docs_blocks
import pytest
import torch
from checkpoints import everything, start, train
from forked_ranks import Ranks
from lanes import Lane
from stepping import assert_same

import xamp

HERE = Path(__file__).parent

# torch says so of every save and load outside a process group, and means no harm.
in_one_process = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit:UserWarning")


def names_for(run: Any, folder: Path) -> dict[str, Any]:
    names = {"model": run.model, "optimizer": run.optimizer, "folder": str(folder), "torch": torch, "xamp": xamp}
    return docs_blocks.run("checkpoints.md", names, "class Whole")


@in_one_process
@pytest.mark.parametrize("variant", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_in_one_process(lane: Lane, variant: str, optimizer: str, tmp_path: Path) -> None:
    run = start(lane, variant, optimizer=optimizer)
    train(run, lane, range(6), overflows=[4])
    docs_blocks.run("checkpoints.md", names_for(run, tmp_path), "dcp.save")
    train(run, lane, range(6, 12), overflows=[8])
    resumed = start(lane, variant, seed=2, optimizer=optimizer)
    docs_blocks.run("checkpoints.md", names_for(resumed, tmp_path), "dcp.load(parts")
    train(resumed, lane, range(6, 12), overflows=[8])
    assert_same(everything(resumed), everything(run))


@in_one_process
@pytest.mark.parametrize("levels", [("O1", "O2"), ("O2", "O1"), ("O4", "O5"), ("O2", "O0")])
def test_at_another_level_masters_have_no_place(lane: Lane, levels: tuple[str, str], tmp_path: Path) -> None:
    run = start(lane, levels[0], optimizer="Adam")
    train(run, lane, range(6))
    docs_blocks.run("checkpoints.md", names_for(run, tmp_path), "dcp.save")
    other = start(lane, levels[1], seed=2, optimizer="Adam")
    docs_blocks.run("checkpoints.md", names_for(other, tmp_path), "dcp.load(others")
    exact = run.model.state_dict()
    names_of = [name for name, _ in run.model.named_parameters()]
    for name, master in zip(names_of, xamp.master_params(other.optimizer), strict=True):
        assert torch.equal(master.detach(), exact[name]), name
    assert other.scale == (256.0 if "O0" not in levels and "O4" not in levels else 1.0)


def processes(ranks: Ranks, count: int, mode: str, level: str, folder: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    ranks.run(HERE / "dcp_worker.py", mode, level, str(folder), count=count, output=folder / f"{mode}.txt")
    return [json.loads((folder / f"{mode}{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_processes_save_and_two_or_one_load(level: str, forked_ranks: Ranks, tmp_path: Path) -> None:
    saved = processes(forked_ranks, 2, "save", level, tmp_path)
    assert saved[0] == saved[1]
    assert saved[0]["there"]["stats"] == [3, 1]
    assert saved[0]["there"]["scalers"] == [{"dynamic": True, "scale": 1024.0, "growth_tracker": 1}]
    assert processes(forked_ranks, 2, "load", level, tmp_path) == saved
    [alone] = processes(forked_ranks, 1, "load", level, tmp_path)
    assert alone["there"] == saved[0]["there"]
    assert alone["end"]["stats"] == [6, 2]


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_torchs_own_way_to_load_an_optimizer(lane: Lane, level: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    run = start(lane, level, optimizer="Adam")
    train(run, lane, range(3))
    state = get_optimizer_state_dict(run.model, run.optimizer)
    resumed = start(lane, level, seed=2, optimizer="Adam")
    set_optimizer_state_dict(resumed.model, resumed.optimizer, state)
    assert_same(resumed.optimizer.state_dict(), run.optimizer.state_dict())
