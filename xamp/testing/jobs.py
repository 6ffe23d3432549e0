"""Runs the suite in several processes that share the clauses, with the results of :func:`xamp.testing.run.run`.

Each worker is a fresh interpreter: a process that forks after a device was initialised cannot use that device. Two
tiers are no common work. ``distributed`` starts ranks of its own, which all its clauses share, so one worker takes all
of it, first, since it is the longest. ``overhead`` measures time: it runs at the end, when no other worker is left.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from xamp.testing.lane import Lane
from xamp.testing.run import Listener, Result, run_by
from xamp.testing.tier import clause_of
from xamp.testing.workers import Crash, Inbox, Message, Worker

__all__ = ["run"]

_TOGETHER, _ALONE = "distributed", "overhead"
_BATCH = 8
"""So many clauses a worker takes at a time, and fewer when few are left, so that all workers end together."""


def run(
    lanes: Sequence[Lane],
    clauses: Sequence[str] = (),
    listener: Listener | None = None,
    *,
    ledger: str = "",
    jobs: int,
) -> list[Result]:
    """Run the suite in ``jobs`` processes, lane after lane.

    A clause that ends its process has failed, also where the process ends after the clause and before the next, or
    with an error when there is nothing more to do. The others still run, in a new one.

    Args:
        lanes: As in :func:`xamp.testing.run.run`, as are ``clauses`` and ``ledger``.
        clauses: See there.
        listener: Receives the events as they come: several clauses may have started and not ended.
        ledger: See there.
        jobs: The number of workers, at least 1.

    Returns:
        A result for each clause, in the order of a run in one process.

    Raises:
        PolicyError: as in a run in one process.
        KeyboardInterrupt: the user interrupted the run; no worker is left.
        RuntimeError: a worker did not start, nor did the one in its place; or pytest failed.
    """
    told, collected = listener or Listener(), _collect(lanes, clauses, listener, ledger)
    choice = {"clauses": list(clauses), "ledger": ledger}
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="xamp-conformance-") as folder:
        for lane in lanes:
            mine, found = collected.get(lane.title, []), dict[str, Result]()
            for work, count in _rounds(mine, jobs):
                start = _starter(lane, choice, Path(folder), count)
                found |= _Pool(lane, start, told, work, count).run()
            results += [found[clause] for clause in mine]
    return results


def _collect(
    lanes: Sequence[Lane], clauses: Sequence[str], listener: Listener | None, ledger: str
) -> dict[str, list[str]]:
    """The clauses of each lane, in order."""
    collected: dict[str, list[str]] = {}

    def look(items: Sequence[pytest.Item]) -> None:
        for item in items:
            owner = item.getparent(pytest.Class)
            assert owner is not None
            collected.setdefault(owner.obj.title, []).append(clause_of(item))

    run_by(look, lanes, clauses, listener, ledger=ledger)
    return collected


def _rounds(clauses: Sequence[str], jobs: int) -> list[tuple[_Work, int]]:
    """What is done one after the other: the work, and the number of workers for it."""
    by_tier: dict[str, list[str]] = {_TOGETHER: [], _ALONE: [], "": []}
    for clause in clauses:
        tier = clause.partition(".")[0]
        by_tier[tier if tier in by_tier else ""].append(clause)
    shared = _Work([by_tier[_TOGETHER]] if by_tier[_TOGETHER] else [], by_tier[""], jobs)
    alone = _Work([by_tier[_ALONE]] if by_tier[_ALONE] else [], [], 1)
    return [(work, min(jobs, work.left)) for work, jobs in ((shared, jobs), (alone, 1)) if work.left]


def _starter(lane: Lane, choice: Mapping[str, object], folder: Path, count: int) -> Callable[[Inbox], Worker]:
    threads = max(1, (os.cpu_count() or 1) // count)
    return lambda inbox: Worker(lane, choice, folder, inbox, threads)


class _Work:
    """The clauses that no worker has taken yet."""

    def __init__(self, batches: Sequence[list[str]], single: Sequence[str], jobs: int) -> None:
        self._batches = collections.deque(batches)
        self._single = collections.deque(single)
        self._jobs = jobs

    @property
    def left(self) -> int:
        """How many workers could take something."""
        return len(self._batches) + len(self._single)

    def take(self) -> list[str]:
        """What a worker does next; empty if nothing is left."""
        if self._batches:
            return self._batches.popleft()
        count = min(_BATCH, max(1, len(self._single) // (2 * self._jobs)), len(self._single))
        return [self._single.popleft() for _ in range(count)]

    def give_back(self, clauses: list[str]) -> None:
        """Clauses that a worker took and did not run."""
        if clauses:
            self._batches.appendleft(clauses)


class _Pool:
    """Workers of one lane, and what each of them has to do."""

    def __init__(
        self, lane: Lane, start: Callable[[Inbox], Worker], listener: Listener, work: _Work, count: int
    ) -> None:
        self._lane = lane
        self._start = start
        self._listener = listener
        self._work = work
        self._inbox = Inbox()
        self._all = [start(self._inbox) for _ in range(count)]
        self._busy = set(self._all)
        self._tasks: dict[Worker, list[str]] = {}
        self._second: set[Worker] = set()  # started in place of those that did not start
        self._began: dict[Worker, float] = {}  # of those in which a clause runs
        self._last: dict[Worker, Result] = {}  # of clauses that ended, until the next starts: the process may end first
        self._results: dict[str, Result] = {}

    def run(self) -> dict[str, Result]:
        """The result of each clause, by its name."""
        try:
            while self._busy:
                worker, message = self._inbox.next(self._busy)
                self._take(worker, message)
        finally:
            for worker in self._busy:
                worker.interrupt()
            for worker in self._all:
                worker.stop()
        return self._results

    def _take(self, worker: Worker, message: Message | Crash) -> None:
        if isinstance(message, Crash):
            self._ended(worker, message)
        elif "start" in message:
            self._let_go(worker)
            self._began[worker] = time.monotonic()
            self._listener.start(self._lane.title, message["start"])
        elif "end" in message:
            del self._began[worker]
            del self._tasks[worker][0]
            self._last[worker] = Result(**message["end"])
        elif batch := self._work.take():
            self._tasks[worker] = batch
            worker.ask(batch)
        else:
            worker.finish()

    def _ended(self, worker: Worker, crash: Crash) -> None:
        """Fail the clause that ran, or had run last, or would have run first; leave the others to a new worker."""
        self._busy.remove(worker)
        if crash.interrupted:
            raise KeyboardInterrupt
        if not crash.was_ready:
            self._start_again(worker, crash)
            return
        tasks = self._tasks.pop(worker, [])
        if worker not in self._began and worker in self._last:
            self._let_go(worker, None if crash.was_due else crash)
        elif tasks:
            self._fail(tasks.pop(0), self._began.pop(worker, None), crash)
        self._work.give_back(tasks)
        if self._work.left:
            self._add()

    def _start_again(self, worker: Worker, crash: Crash) -> None:
        """Start another worker in place of one that did not start, once: a device may be full for a moment."""
        if worker in self._second:
            raise RuntimeError(f"a worker of the suite {crash.how} before it ran anything\n{crash.said}")
        self._second.add(self._add())

    def _add(self) -> Worker:
        self._all.append(self._start(self._inbox))
        self._busy.add(self._all[-1])
        return self._all[-1]

    def _fail(self, clause: str, began: float | None, crash: Crash) -> None:
        seconds, reason = 0.0, f"the process that was to run it {crash.how} before it ran anything"
        if began is None:
            self._listener.start(self._lane.title, clause)
        else:
            seconds, reason = time.monotonic() - began, f"the process that ran it {crash.how}"
        self._keep(Result(self._lane.title, clause, "failed", reason, seconds, crash.said))

    def _let_go(self, worker: Worker, crash: Crash | None = None) -> None:
        """Keep the last result of a worker: as it was, or as a failure where the process ended behind it."""
        result = self._last.pop(worker, None)
        if result is None:
            return
        if crash is not None:
            reason = f"the process that ran it {crash.how} after it"
            if result.outcome == "failed":
                reason = f"{result.reason}; and {reason}"
            text = "\n".join(filter(None, (result.text, crash.said)))
            result = dataclasses.replace(result, outcome="failed", reason=reason, text=text)
        self._keep(result)

    def _keep(self, result: Result) -> None:
        self._results[result.clause] = result
        self._listener.end(result)
