"""An old script for two GPUs, unmodified under ``xamp run`` in two real processes on a CPU, as under torchrun.

Covers: xamp.run.ranks, xamp.run.launch.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from forked_ranks import Ranks

HERE = Path(__file__).parent


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("how", ["env", "tcp"])
def test_an_old_script_trains_on_two_ranks(how: str, forked_ranks: Ranks, tmp_path: Path) -> None:
    words = {"env": [], "tcp": [f"--dist-url=tcp://127.0.0.1:{_free_port()}", "--world=0"]}[how]  # 0: count devices
    ranks = forked_ranks.results(HERE / "run_rank.py", str(HERE / "old_script.py"), *words, folder=tmp_path)
    for rank, found in enumerate(ranks):
        assert (found["rank"], found["world"], found["backend"]) == (rank, 2, "gloo")
        assert found["gradients"] < 1e-12
        assert found["buffers"] < 1e-12
        assert found["evaluates"] == [5, 1]
    said = (tmp_path / "output.txt").read_text()
    assert said.count("xamp run: redirected to cpu") == 1  # rank 0 reports
    assert "--local_rank from LOCAL_RANK" in said
    assert "DistributedDataParallel(device_ids=...)" in said
    assert "SyncBatchNorm on a CPU" in said
