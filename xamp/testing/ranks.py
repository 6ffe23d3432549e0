"""Two processes in one process group. They run one body (a function of ``rank_bodies``) after another, and reply.

They start with the first body. If one process fails or hangs, both are ended, and the next body gets fresh ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from xamp.registry.registry import HOST
from xamp.testing.exact import inputs
from xamp.testing.lane import Lane
from xamp.testing.processes import command, environment

__all__ = ["WORLD", "Ranks", "micro_batch"]

WORLD = 2

LIMIT = 120.0
"""Seconds after which a body counts as hanging."""

_GRACE = 5.0  # seconds in which the other ranks may end by themselves after one has failed
_SHOWN = 4000  # characters of a rank's stderr to show


def micro_batch(lane: Lane, step: int, micro: int = 0, rank: int = 0) -> torch.Tensor:
    """The input of :class:`Dot`, (7,), for one micro-batch of one rank."""
    return inputs(1, lane, seed=1000 * step + 10 * micro + rank)[0]


class Ranks:
    """The ranks of one lane.

    Args:
        lane: Rank r runs on the device of the lane's type with index r; if there is only one, all ranks share it.
        folder: The folder for the file that the ranks meet in, and for their stderr.
    """

    def __init__(self, lane: Lane, folder: Path) -> None:
        self._lane = lane
        self._folder = folder
        self._started = 0
        self._ranks: list[_Rank] = []

    @functools.cached_property
    def work(self) -> bool:
        """Whether the ranks can communicate; not every library allows that on a single device."""
        if self._lane.kind == HOST or not _is_alone(self._lane):
            return True
        try:
            return self.run("add_up") == [WORLD] * WORLD
        except pytest.fail.Exception:
            return False

    def run(self, body: str, **arguments: Any) -> list[Any]:
        """Run a function of :mod:`xamp.testing.rank_bodies` in all ranks; return each rank's result.

        The clause fails if a rank raises, ends, or takes longer than :data:`LIMIT`; the message names the rank and
        shows its stderr.
        """
        if not self._ranks:
            self._start()
        for rank in self._ranks:
            rank.ask({"body": body, "arguments": arguments})
        replies = self._replies(time.monotonic() + LIMIT)
        troubles = [f"rank {i}: {trouble}" for i, (_, trouble) in enumerate(replies) if trouble]
        if troubles:
            self.stop(at_once=True)
            called = f"{body}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            pytest.fail("\n".join([f"{called} in {WORLD} ranks on {self._lane}", *troubles]), pytrace=False)
        return [result for result, _ in replies]

    def stop(self, at_once: bool = False) -> None:
        """End the processes of all ranks."""
        for rank in self._ranks:
            rank.stop(at_once)
        self._ranks = []

    def _start(self) -> None:
        self._started += 1  # each group needs a fresh file to meet in
        meeting = self._folder / f"meeting{self._started}"
        self._ranks = [_Rank(self._lane, index, meeting) for index in range(WORLD)]

    def _replies(self, deadline: float) -> list[tuple[Any, str]]:
        """Each rank's result, and what went wrong in it; an empty text means nothing did."""
        replies: dict[int, tuple[Any, str]] = {}
        while len(replies) < len(self._ranks) and time.monotonic() < deadline:
            for index, rank in enumerate(self._ranks):
                found = None if index in replies else rank.reply()
                if found is not None:
                    replies[index] = found
                    if found[1]:
                        deadline = min(deadline, time.monotonic() + _GRACE)
        return [
            replies.get(i) or (None, f"has not come back after {LIMIT:g} s\n{rank.said()}")
            for i, rank in enumerate(self._ranks)
        ]


def _is_alone(lane: Lane) -> bool:
    """Whether all ranks have to share one device."""
    return lane.kind == HOST or len(list(lane.backend.devices())) < WORLD


class _Rank:
    """One process: requests go into its stdin, replies come out of its stdout, a line of JSON each."""

    def __init__(self, lane: Lane, index: int, meeting: Path) -> None:
        device = lane.device if _is_alone(lane) else torch.device(lane.kind, index)
        variables = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": WORLD, "OMP_NUM_THREADS": 1}
        told = {"XAMP_BACKEND": str(lane), "XAMP_DEVICE": str(device), **{k: str(v) for k, v in variables.items()}}
        self._stderr = meeting.with_name(f"{meeting.name}-{index}.txt")
        with self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                command(dataclasses.replace(lane, device=device), "xamp.testing.rank_bodies", str(meeting)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(**told),
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def ask(self, request: object) -> None:
        """Send a request. If the process has ended, :meth:`reply` says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def reply(self) -> tuple[Any, str] | None:
        """The result and what went wrong; None if there is no reply within a moment."""
        try:
            line = self._lines.get(timeout=0.02)
        except queue.Empty:
            return None
        if not line:
            return None, f"ended with code {self._process.wait()}\n{self.said()}"
        found = json.loads(line)
        return found.get("result"), found.get("error", "")

    def said(self) -> str:
        """The end of the process's stderr."""
        return self._stderr.read_text(errors="replace")[-_SHOWN:]

    def stop(self, at_once: bool) -> None:
        """End the process: close its stdin and wait; kill it if it does not end, or ``at_once``."""
        if at_once:
            self._process.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")
