"""Two processes in one process group, which run one body after the other and tell what they found.

They are started when the first body is asked for. One that fails or hangs ends both: the next body gets fresh ones.
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

_GRACE = 5.0  # what the other ranks get to end by themselves when one has failed
_SHOWN = 4000  # characters of a rank's stderr


def micro_batch(lane: Lane, step: int, micro: int = 0, rank: int = 0) -> torch.Tensor:
    """The input of :class:`Dot`, (7,), for one micro-batch of one rank."""
    return inputs(1, lane, seed=1000 * step + 10 * micro + rank)[0]


class Ranks:
    """The ranks of one lane.

    Args:
        lane: Rank r runs on the device of its type with index r; all on one where there is no other.
        folder: Where they meet, and their stderr goes.
    """

    def __init__(self, lane: Lane, folder: Path) -> None:
        self._lane = lane
        self._folder = folder
        self._started = 0
        self._ranks: list[_Rank] = []

    @functools.cached_property
    def work(self) -> bool:
        """Whether the ranks can talk to each other; on a single device not every library lets them."""
        if self._lane.kind == HOST or not _is_alone(self._lane):
            return True
        try:
            return self.run("add_up") == [WORLD] * WORLD
        except pytest.fail.Exception:
            return False

    def run(self, body: str, **arguments: Any) -> list[Any]:
        """Run a function of :mod:`xamp.testing.rank_bodies` in all ranks; gives what each returned.

        The clause fails where a rank raises, ends, or takes longer than :data:`LIMIT`; says which, and its stderr.
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
        """End the ranks."""
        for rank in self._ranks:
            rank.stop(at_once)
        self._ranks = []

    def _start(self) -> None:
        self._started += 1  # a group meets in a file of its own
        meeting = self._folder / f"meeting{self._started}"
        self._ranks = [_Rank(self._lane, index, meeting) for index in range(WORLD)]

    def _replies(self, deadline: float) -> list[tuple[Any, str]]:
        """What each rank returned, and what is wrong with it: nothing where that is empty."""
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
        """Send a request; one that has ended shows in its reply."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def reply(self) -> tuple[Any, str] | None:
        """The result and what is wrong; None where there is none within a moment."""
        try:
            line = self._lines.get(timeout=0.02)
        except queue.Empty:
            return None
        if not line:
            return None, f"ended with code {self._process.wait()}\n{self.said()}"
        found = json.loads(line)
        return found.get("result"), found.get("error", "")

    def said(self) -> str:
        """The end of its stderr."""
        return self._stderr.read_text(errors="replace")[-_SHOWN:]

    def stop(self, at_once: bool) -> None:
        """End the process, which leaves by itself when nothing more is asked of it."""
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
