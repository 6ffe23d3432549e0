"""Runs the conformance suite, and writes each clause's result into the log as it comes.

    python -m ci.gpu.clauses DEVICE JOBS [CLAUSE ...]

Clauses that are named in the file ``XAMP_STAGE_DONE`` passed in an earlier run, and are left out.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.gpu.keep import DONE, LOG, STAGE
from ci.gpu.log import Log
from xamp.testing import jobs
from xamp.testing.lane import Lane, open_lane
from xamp.testing.run import Listener, Result, run_by
from xamp.testing.tier import clause_of

_TEXT = 3000  # characters of a failure's text
_LINE = 50  # clauses after which a line says how many there were


class _Keeper(Listener):
    """Writes results down, and says how far it is."""

    def __init__(self) -> None:
        self._log, self._stage = Log(Path(os.environ[LOG])), os.environ[STAGE]
        self._count = self._all = 0

    def begin(self, counts: dict[tuple[str, str], int]) -> None:
        """Take the number of clauses."""
        self._all = sum(counts.values())

    def end(self, result: Result) -> None:
        """Write one result down."""
        about = {"outcome": result.outcome, "seconds": round(result.seconds, 2), "reason": result.reason}
        self._log.add(self._stage, "test", test=result.clause, text=result.text[-_TEXT:], **about)
        self._count += 1
        if result.outcome == "failed":
            print(f"{result.clause} failed: {result.reason}", flush=True)
        if self._count % _LINE == 0 or self._count == self._all:
            print(f"{self._count} of {self._all} clauses", flush=True)


def chosen(lane: Lane, wanted: Sequence[str], done: frozenset[str]) -> list[str]:
    """The clauses that are left to do."""
    found: list[str] = []
    run_by(lambda items: found.extend(clause_of(item) for item in items), [lane], wanted)
    return [clause for clause in found if clause not in done]


def main(device: str, count: str, *wanted: str) -> int:
    """Run the suite; 1 if a clause failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    lane = open_lane("auto", device)
    path = os.environ.get(DONE)
    done = frozenset(Path(path).read_text(encoding="utf-8").splitlines()) if path else frozenset()
    left = chosen(lane, wanted, done) if done else list(wanted)
    if done and not left:
        return 0
    results = jobs.run([lane], left, _Keeper(), jobs=int(count))
    return int(any(result.outcome == "failed" for result in results))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt  # which ends the workers too


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
