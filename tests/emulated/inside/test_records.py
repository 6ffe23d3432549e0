"""What a process group writes down about its work, as torch_npu's on a card does where the environment asks for it.

Covers: backends.npu.emulation.records, backends.npu.emulation.hccl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import datetime, os, sys, torch, torch_npu, torch.distributed as dist
rank = int(sys.argv[1])
torch.npu.set_device(rank)
os.environ["RANK"] = str(rank)
seconds = datetime.timedelta(seconds=120)
dist.init_process_group("hccl", init_method="file://" + sys.argv[2], rank=rank, world_size=2, timeout=seconds)
x = torch.ones(10, device="npu")
"""
WORK = """
group = dist.new_group([0, 1], backend="hccl")
for turn in range(11):
    dist.all_reduce(x)
dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x, group=group)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
"""
LEFT = """
group = dist.new_group([0, 1], backend="hccl")
dist.all_reduce(x, group=group)
try:
    dist.all_gather([x], x, group=group)  # refused, which is no failure of the group
except Exception:
    pass
kept = torch.npu.memory_allocated()
big = torch.empty(1 << 20, device="npu")
dist.send(big, 1, group=group) if rank == 0 else dist.recv(big, 0, group=group)
del big
dist.destroy_process_group()
print(torch.npu.memory_allocated() - kept)
os._exit(0)  # as a process that multiprocessing forked does
"""
LOST = """
pair = dist.new_group([0, 1], backend="hccl")
dist.all_reduce(x, group=pair)
if rank == 1:
    os._exit(0)
try:
    dist.all_reduce(x, group=pair)
except RuntimeError as error:
    assert "EI0002" in str(error)
(written,) = os.listdir(os.environ["TORCH_HCCL_STATUS_SAVE_PATH"])
print(written)
os._exit(0)  # what stands in the file is of the failure
"""
ONE_CARD = """
import torch, torch_npu
has = torch_npu._C._npu_hasPrimaryContext
x = torch.randn(1, device="npu:1")
torch.nn.functional.dropout(x, 0.5)
torch.randn(1).copy_(x)
repr(x)
print(torch.npu.current_device(), [has(index) for index in range(2)])
"""


def run(code: str, folder: Path, **variables: str) -> list[str]:
    """What two ranks print that run ``code``; ``folder`` is where they meet."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "MASTER_ADDR": "10.0.0.1", "HCCL_ALGO": "level0:NA;level1:ring", **variables}
    ranks: list[Any] = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", HEAD + code, str(rank), str(folder / "meet")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


def work_of(content: dict[str, Any]) -> list[tuple[int, str, str, str]]:
    return [(each["seq"], each["op_type"], each["comm_ids"], each["status"]) for each in content["last_comm_op"]]


def test_the_status_of_all_groups_is_in_one_file_of_each_process(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    run(WORK, tmp_path / "a", TORCH_HCCL_STATUS_SAVE_ENABLE="1", TORCH_HCCL_STATUS_SAVE_PATH=str(folder))
    files = sorted(folder.iterdir())
    assert [file.name.rsplit("_", 2)[0] for file in files] == [
        f"torch_hccl_status-{rank}_10.0.0.1_{rank}_2" for rank in range(2)
    ]
    for rank, file in enumerate(files):
        content = json.loads(file.read_text())
        kind = "RECV" if rank else "SEND"
        assert work_of(content) == [(11, kind, "all", "end"), (1, "ALLGATHER", "0 1 ", "end")]
        assert len({each["pg_id"] for each in content["last_comm_op"]}) == 2
        assert (content["is_master"], content["exception_message"]) == (rank == 0, "")
        begun = int(file.stem.rsplit("_", 1)[1])
        assert begun < content["global_pg_end_time"] < begun + 300_000


def test_the_status_is_written_when_the_group_ends_and_with_groups_of_some_ranks_alone(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    variables = {"TORCH_HCCL_STATUS_SAVE_INTERVAL": "1000", "TORCH_HCCL_STATUS_SAVE_PATH": str(folder)}
    said = run(LEFT, tmp_path / "f", TORCH_HCCL_STATUS_SAVE_ENABLE="1", **variables)
    assert [int(each.split()[-1]) for each in said] == [0, 0]  # what was sent is let go
    assert folder.stat().st_mode & 0o777 == 0o750
    for rank, file in enumerate(sorted(folder.iterdir())):
        assert file.stat().st_mode & 0o777 == 0o640
        content = json.loads(file.read_text())
        ((_, op_type, ranks, status),) = work_of(content)
        assert (op_type, ranks, status) == ("RECV" if rank else "SEND", "0 1 ", "end")
        assert content["exception_message"] == ""


def test_work_that_fails_is_written_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "status"
    variables = {"TORCH_HCCL_STATUS_SAVE_INTERVAL": "1000", "TORCH_HCCL_STATUS_SAVE_PATH": str(folder)}
    said = run(LOST, tmp_path / "b", TORCH_HCCL_STATUS_SAVE_ENABLE="1", **variables)
    (file,) = folder.iterdir()
    assert file.name == said[0].split()[-1]
    content = json.loads(file.read_text())
    assert "EI0002" in content["exception_message"]
    assert work_of(content) == [(2, "ALLREDUCE", "0 1 ", "start")]


@pytest.mark.parametrize("enabled", [{}, {"TORCH_HCCL_STATUS_SAVE_ENABLE": "0"}], ids=["unset", "0"])
def test_nothing_is_written_unless_asked(tmp_path: Path, enabled: dict[str, str]) -> None:
    folder = tmp_path / "status"
    run("dist.all_reduce(x)", tmp_path / "c", TORCH_HCCL_STATUS_SAVE_PATH=str(folder), **enabled)
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    variables = {"TORCH_HCCL_STATUS_SAVE_ENABLE": "1", "TORCH_HCCL_STATUS_SAVE_PATH": str(tmp_path / "file" / "in")}
    said = run(f"{WORK}\nprint(x.sum().item())", tmp_path / "d", **variables)
    for each in said:
        assert str(10.0 * 2**11) in each
        assert "[recordHcclStatus] failed: " in each


def test_the_volumes_of_the_first_work_are_written_for_the_network(tmp_path: Path) -> None:
    folder = tmp_path / "nslb"
    run(WORK, tmp_path / "e", NSLB_CP=str(folder), NSLB_MAX_RECORD_NUM="3")
    names = sorted(file.name for file in folder.iterdir())
    assert len(names) == 4
    for rank in range(2):
        name = names[rank]
        assert name.startswith("10.0.0.1_emulated-")
        assert name.endswith(f"_{rank}.log")
        lines = (folder / name).read_text().splitlines()
        assert lines[0] == "HCCL_ALGO=level0:NA;level1:ring"
        assert lines[1:] == [f"allreduce 40 {rank}"] * 3
        assert names[2 + rank].startswith("end_10.0.0.1_")


def test_a_script_that_spares_a_card_makes_a_context_on_its_own_card_alone() -> None:
    """torch_npu asks the current card for a generator's state, and remembers each card that it has asked."""
    environment = {**os.environ, "ACL_OP_INIT_MODE": "1"}
    done = subprocess.run([sys.executable, "-c", ONE_CARD], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "0 [False, True]"
