"""A process that runs clauses for another one: ``python -m xamp.testing.worker LANE``.

The first line of JSON on its standard input has the ``clauses`` and the ``ledger`` of the run, which may be more than
the 131,072 bytes that Linux lets an argument have. Each line after it is a list of clauses; it runs these and answers
with lines of JSON on its standard output: ``{"ready": true}`` first, ``{"start": clause}`` and ``{"end": result}`` for
each clause, and ``{"ready": true}`` again when all of the list are done. It ends when its input does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import IO, Any

import pytest

from xamp.testing.processes import opened
from xamp.testing.run import Listener, Result, run_by
from xamp.testing.tier import clause_of

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""The exit code after a ``KeyboardInterrupt``."""


def main(lane_as_text: str) -> int:
    """Run what is asked for until there is no more."""
    signal.signal(signal.SIGINT, _leave_it_to_the_parent)
    signal.signal(signal.SIGTERM, _interrupt)
    requests, replies = _channel()
    told = json.loads(next(requests))
    sender = _Sender(replies)

    def loop(found: Sequence[pytest.Item]) -> None:
        items = {clause_of(item): item for item in found}
        sender.send(ready=True)
        for line in requests:
            batch = [items[name] for name in json.loads(line)]
            for item, following in zip(batch, [*batch[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sender.send(ready=True)

    try:
        run_by(loop, [opened(lane_as_text)], told["clauses"], sender, ledger=told["ledger"], capture="sys")
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


class _Sender(Listener):
    """Sends the events of the run."""

    def __init__(self, replies: IO[str]) -> None:
        self._replies = replies

    def send(self, **message: Any) -> None:
        """Send one message."""
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()

    def start(self, lane: str, clause: str) -> None:
        """Send the name of the clause that starts."""
        self.send(start=clause, lane=lane)

    def end(self, result: Result) -> None:
        """Send a result."""
        self.send(end=dataclasses.asdict(result))


def _channel() -> tuple[IO[str], IO[str]]:
    """Standard input and output, kept away from the clauses: what these print goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _leave_it_to_the_parent(*_: object) -> None:
    """Do nothing: a terminal sends Ctrl-C to all, and the parent ends this one. Children do not inherit a handler."""


def _interrupt(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ends now is not disturbed
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
