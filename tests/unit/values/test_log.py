"""What xamp says reaches stderr where logging is not configured, and only the logger where it is.

Covers: xamp.values.log.
"""

from __future__ import annotations

import io
import logging

import pytest

from xamp.values import log


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(log._stderr, "stream", written)
    monkeypatch.setattr(log, "_logger", logging.Logger("xamp"))  # no root, so that the handlers of pytest are not its
    return written


def test_without_a_handler_it_goes_to_stderr(stderr: io.StringIO) -> None:
    log.say("level %s", "O1")
    log.say("a detail", level=logging.DEBUG)
    assert stderr.getvalue() == "xamp: level O1\n"


def test_a_level_of_the_logger_and_a_handler_are_honoured(stderr: io.StringIO) -> None:
    log._logger.setLevel(logging.WARNING)
    log.say("level O1")
    log._logger.setLevel(logging.INFO)
    mine = io.StringIO()
    log._logger.addHandler(logging.StreamHandler(mine))
    log.say("level O2")
    assert (stderr.getvalue(), mine.getvalue()) == ("", "level O2\n")
