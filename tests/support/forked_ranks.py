"""Runs scripts as the ranks of a process group: processes that are forked from one that has imported torch.

They find each other as under torchrun, by its environment and a store that is not theirs, and start in a tenth of the
time. What they are forked from has done nothing but import, and not xamp: no thread runs in it, and no device. Where
the imports have started one all the same, each rank is a process of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compiling
import forking
import measuring
import torch

_IMPORTED = (
    *("torch", "torch.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.parallel"),
    *("torch._dynamo", "torch.distributed.checkpoint.state_dict"),
    "torch.distributed.optim",  # for ZeroRedundancyOptimizer; compiles what it has for TorchScript: 0.5 s
    "torch._inductor.compile_fx",  # brings what a first compilation imports: 560 modules, 2.2 s in each rank
)
_c10d: Any = torch._C._distributed_c10d  # not all that it has stands in torch's types
_RANK = "--rank"
_LIMIT = 300.0  # seconds that ranks may take
_POLL = 0.02
_COVERED_RANKS = 2  # how many: further ones reach the same lines


class Ranks:
    """Runs scripts, one after another. A context manager.

    Args:
        imported: what is imported before ranks are forked.
    """

    def __init__(self, imported: Sequence[str] = _IMPORTED) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._server = subprocess.Popen(
            [sys.executable, __file__, *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **forking.SETTINGS, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # closes its standard input, which ends it

    def run(self, script: Path, *arguments: str, count: int = 2, output: Path, covered: bool = True) -> None:
        """Run ``script`` as ``count`` ranks, and fail with the end of what they said where one of them fails.

        Args:
            script: of Python.
            arguments: its own.
            count: how many ranks.
            output: the file for what they print.
            covered: whether their coverage counts, where coverage is measured, also of a test whose own does not.
                That of a third rank never does. To compile takes twice as long with it.
        """
        # Here, as torchrun has it: no port is free for certain by the time that a rank takes it.
        store = _c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        asked = {"script": str(script), "arguments": arguments, "count": count, "port": store.port}
        asked["covered"] = covered
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({**asked, "output": str(output)}) + "\n")
        self._server.stdin.flush()
        codes = self._server.stdout.readline()
        assert codes, "the process that they are forked from is gone"
        assert not any(json.loads(codes)), f"{codes} {output.read_text()[-4000:]}"

    def results(self, script: Path, *arguments: str, count: int = 2, folder: Path, covered: bool = True) -> list[Any]:
        """Run ``script`` as ``run`` does, with ``folder`` as its last argument; what each rank wrote there.

        Rank 0 writes ``0.json``, and so on; what they print is in ``output.txt``.
        """
        self.run(script, *arguments, str(folder), count=count, output=folder / "output.txt", covered=covered)
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def _serve(imported: Sequence[str]) -> None:
    for name in imported:
        importlib.import_module(name)
    compiling.log_less()
    gc.collect()
    gc.freeze()  # these 250,000 objects stay, and ranks need not look through them, nor copy their pages
    forks = forking.may_fork()
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for rank in range(asked["count"]):
            pid = os.fork() if forks else _start_rank(rank, line)
            if not pid:
                _be_rank(rank, asked)
                return  # and end, as any process does
            pids.append(pid)
        print(json.dumps(_wait(pids)), flush=True)


def _start_rank(rank: int, line: str) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, __file__, _RANK, str(rank), line], os.environ)


def _be_rank(rank: int, asked: dict[str, Any]) -> None:
    if not asked["covered"] or rank >= _COVERED_RANKS:
        measuring.stop()
    output = os.open(asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked["count"], "LOCAL_WORLD_SIZE": asked["count"]}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": asked["port"], "TORCHELASTIC_USE_AGENT_STORE": True}
    told = {**known, **where, "GROUP_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in told.items()})
    sys.path[0] = os.path.dirname(asked["script"])
    sys.argv = [asked["script"], *asked["arguments"]]
    runpy.run_path(asked["script"], run_name="__main__")


def _wait(pids: list[int]) -> list[int]:
    """How they ended; where one fails the others, which may wait for it, are ended, as by torchrun."""
    began, codes = time.monotonic(), dict.fromkeys(pids, 0)
    left = set(pids)
    while left:
        for pid in list(left):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                left.discard(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) or time.monotonic() - began > _LIMIT:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL)
    return list(codes.values())


if __name__ == "__main__":
    if sys.argv[1] == _RANK:
        _be_rank(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        _serve(sys.argv[1:])
