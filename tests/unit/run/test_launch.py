"""Launching as people did: ``--local_rank``, torch's launchers, world sizes and backends.

Covers: xamp.run.launch.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import pytest
import torch.distributed

from xamp.run.launch import Settings, launcher_words
from xamp.run.redirect import redirected


def _parser(*options: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    if options:
        parser.add_argument(*options, type=int, default=-1)
    return parser


CASES = {
    "declared": (("--local_rank",), [], 3),
    "declared with a dash": (("--local-rank",), ["--lr", "1"], 3),
    "both spellings": (("--local_rank", "--local-rank"), [], 3),
    "given": (("--local_rank",), ["--local_rank=1"], 1),
    "given apart": (("--local_rank",), ["--local_rank", "1"], 1),
    "given with a dash": (("--local_rank",), ["--local-rank=1"], 1),
    "not declared": ((), [], None),
}


@pytest.mark.parametrize("case", CASES)
def test_local_rank_reaches_a_script_that_declares_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, words, rank = CASES[case]
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with redirected("cpu"):
        args = _parser(*options).parse_args()
        assert getattr(args, "local_rank", None) == rank
        assert sys.argv == ["train.py", *words]
        assert _parser("--local_rank").parse_args(["--lr", "2"]).local_rank == -1  # not this process's command line


def test_without_a_launcher_nothing_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with redirected("cpu"):
        assert _parser("--local_rank").parse_args().local_rank == -1


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        (
            "torch.distributed.launch",
            ["--nproc_per_node=2", "train.py", "--lr", "1"],
            ["--nproc_per_node=2", "--use_env", "--module", "xamp", "run", "--pretend-cuda", "train.py", "--lr", "1"],
        ),
        (
            "torch.distributed.run",
            ["--standalone", "--nproc-per-node", "2", "-m", "pack.train", "-m", "x"],
            [
                "--standalone",
                "--nproc-per-node",
                "2",
                "-m",
                "xamp",
                "run",
                "--pretend-cuda",
                "-m",
                "pack.train",
                "-m",
                "x",
            ],
        ),
    ],
)
def test_a_launcher_starts_each_rank_by_xamp_run(module: str, words: list[str], expected: list[str]) -> None:
    assert launcher_words(module, words, Settings(pretend=True)) == expected


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What ``init_process_group`` and ``new_group`` of torch get."""
    found: list[tuple[Any, ...]] = []

    def init(
        backend: Any = None, method: Any = None, timeout: Any = None, world_size: int = -1, *_: Any, **__: Any
    ) -> None:
        found.append((backend, world_size, os.environ.get("TORCHELASTIC_USE_AGENT_STORE")))

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        monkeypatch.setattr(module, "init_process_group", init)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return found


GROUPS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "nccl": ({"backend": "nccl", "init_method": "env://"}, ("gloo", -1, "True")),
    "NCCL": ({"backend": "NCCL"}, ("gloo", -1, "True")),
    "hccl": ({"backend": "hccl", "world_size": 2}, ("gloo", 2, "True")),
    "gloo": ({"backend": "gloo"}, ("gloo", -1, "True")),
    "each device": ({"backend": "cpu:gloo,cuda:nccl"}, ("cpu:gloo", -1, "True")),
    "none": ({}, (None, -1, "True")),
    "no devices": ({"backend": "nccl", "world_size": 0}, ("gloo", 4, "True")),
    "tcp": ({"backend": "nccl", "init_method": "tcp://127.0.0.1:12584"}, ("gloo", -1, "False")),
    "tcp of the agent": ({"backend": "nccl", "init_method": "tcp://127.0.0.1:29500"}, ("gloo", -1, "True")),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_process_group_is_made_for_the_device_in_use(case: str, calls: list[tuple[Any, ...]]) -> None:
    given, expected = GROUPS[case]
    with redirected("cpu"):
        torch.distributed.init_process_group(**given)
    assert calls == [expected]
    assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"
