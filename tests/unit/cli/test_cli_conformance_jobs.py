"""``xamp conformance --jobs N``: several processes share the clauses, and what comes out is what comes out of one.

Covers: xamp.testing.jobs, xamp.testing.workers, xamp.testing.worker.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mutants import registered

from xamp.backends.cpu import CpuBackend
from xamp.cli import main
from xamp.testing import jobs, workers
from xamp.testing.lane import open_lane
from xamp.testing.run import Listener, Result

HERE = Path(__file__).resolve().parent
LIMIT = 120.0  # seconds in which other processes do something


@pytest.fixture(autouse=True)
def _workers_find_this_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


class Dies(CpuBackend):
    """Ends its process when it is to overflow."""

    def make_overflow_(self, grad: torch.Tensor) -> None:
        print("the last words", file=sys.__stderr__, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class Meets(CpuBackend):
    """Overflows only once two processes are about to, in the folder that a variable names."""

    def make_overflow_(self, grad: torch.Tensor) -> None:
        folder, until = Path(os.environ["MEET_IN"]), time.monotonic() + LIMIT
        (folder / str(os.getpid())).touch()
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < until, "nobody came"
            time.sleep(0.01)
        super().make_overflow_(grad)


class EndsBadly(CpuBackend):
    """Lets its process end with an error when all is done, as a library that is unloaded may."""

    def make_overflow_(self, grad: torch.Tensor) -> None:
        atexit.register(os._exit, 3)
        super().make_overflow_(grad)


class Raises(CpuBackend):
    """Is interrupted from within."""

    def make_overflow_(self, grad: torch.Tensor) -> None:
        raise KeyboardInterrupt


def _results(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and each result without its time and its text."""
    code = main(["conformance", "--json", "-", *words])
    found = json.loads(capsys.readouterr().out)["results"]
    return code, [{key: each[key] for key in ("lane", "clause", "outcome", "reason")} for each in found]


def test_results_are_those_of_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With failures, known gaps, a ledger that is wrong both ways, and what is not declared or required."""
    gap = {"reason": "its flag is broken", "link": "https://example.org/1"}
    entries = [{"clause": name, **gap} for name in ("probe.overflow_is_found[1]", "probe.seed", "probe.nothing")]
    ledger = tmp_path / "ledger.json"
    ledger.write_text(json.dumps(entries), encoding="utf-8")
    words = ["--backend", "mutant", "--clause", "probe.*", "--clause", "levels.effective", "--ledger", str(ledger)]
    with registered("probe_mutants:SeesNoOverflow")():
        one = _results(words, capsys)
        two = _results([*words, "--jobs", "2"], capsys)
    outcomes = {each["clause"]: each["outcome"] for each in two[1]}
    assert outcomes["probe.overflow_is_found[1]"] == "known gap"
    assert outcomes["probe.seed"] == outcomes["probe.ledger"] == "failed"
    assert "not declared" in outcomes.values()
    assert one == two
    assert two[0] == 1


def test_lanes_follow_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--device", "cpu:0", "--clause", "probe.product", "--clause", "levels.effective"]
    required = [*words, "--require", "O2"]
    assert _results(required, capsys) == (0, _results([*required, "--jobs", "2"], capsys)[1])


def test_what_is_required_is_required_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "mutant", "--clause", "levels.effective", "--require", "O2", "--jobs", "2"]
    with registered("probe_mutants:RunsTwoLevels")():
        code, found = _results(words, capsys)
    assert code == 1
    assert [each["clause"] for each in found if each["outcome"] == "failed"] == ["levels.effective[O2]"]


def test_progress_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.xml"
    words = ["--clause", "probe.seed", "--clause", "probe.product", "--junit", str(file)]
    assert main(["conformance", "--jobs", "3", *words]) == 0
    out, err = capsys.readouterr()
    assert "cpu  probe        4 passed in" in err
    assert "cpu: passes what was chosen: 4 passed" in out
    assert 'tests="4"' in file.read_text(encoding="utf-8")


def test_two_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MEET_IN", str(tmp_path))
    with registered("test_cli_conformance_jobs:Meets")():
        code, found = _results(["--backend", "mutant", "--clause", "probe.overflow_is_found", "--jobs", "2"], capsys)
    assert (code, [each["outcome"] for each in found]) == (0, ["passed"] * 3)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_worker_that_is_killed_fails_its_clause_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "--backend", "mutant", "--clause", "probe.*", "--jobs", "2"]
    with registered("test_cli_conformance_jobs:Dies")():
        code = main([*words, "--json", "-"])
        found = json.loads(capsys.readouterr().out)["results"]
        assert main(words) == 1
    failed = {each["clause"]: each for each in found if each["outcome"] == "failed"}
    assert code == 1
    sizes = [f"probe.overflow_is_found[{size}]" for size in (1, 7, 1000)]
    assert list(failed) == ["probe.declarations", *sizes]  # each makes the device overflow
    assert {each["reason"] for each in failed.values()} == {"the process that ran it ended by SIGKILL"}
    assert all("the last words" in each["text"] for each in failed.values())
    assert len(found) == 32
    assert "mutant: does not conform: " in capsys.readouterr().out


def test_a_worker_that_ends_with_an_error_fails_what_it_ran_last() -> None:
    """The choice is longer than an argument may be."""
    with registered("test_cli_conformance_jobs:EndsBadly")():
        found = jobs.run([open_lane("mutant")], ["*" * 140_000 + "probe.overflow_is_found"], jobs=1)
    assert [each.outcome for each in found] == ["passed", "passed", "failed"]
    assert found[-1].reason == "the process that ran it ended with code 3 after it"


class Scripted(workers.Worker):
    """Does not start a process: says what a process would, and ends after so many clauses, or when nothing is left."""

    def __init__(self, inbox: workers.Inbox, clauses: float = math.inf, *, starts: bool = True) -> None:
        self.inbox, self.left, self.ended = inbox, clauses, not starts
        self._finished = math.inf
        self.say({"ready": True} if starts else None)

    def say(self, message: dict[str, Any] | None) -> None:
        self.inbox.put(self, "" if message is None else json.dumps(message))

    def read(self, line: str) -> workers.Message | workers.Crash:
        due = self._finished < math.inf
        return json.loads(line) if line else workers.Crash("ended by SIGABRT", "said", False, not self.ended, due)

    def ask(self, clauses: Sequence[str]) -> None:
        for clause in clauses:
            self.say({"start": clause})
            self.say({"end": dataclasses.asdict(Result("cpu", clause, "passed", "", 0.5))})
            self.left -= 1
        self.say({"ready": True} if self.left > 0 else None)

    def finish(self) -> None:
        if self._finished == math.inf:
            self._finished = 0.0
            self.say(None)

    @property
    def is_dead(self) -> bool:
        return False

    def interrupt(self) -> None: ...

    def stop(self) -> None: ...


def pooled(monkeypatch: pytest.MonkeyPatch, *scripts: dict[str, Any], listener: Listener | None = None) -> list[Result]:
    """The results of a run of six clauses with one worker, and then another, each by its script."""
    queue = [*scripts]
    monkeypatch.setattr(jobs, "_starter", lambda *_: lambda inbox: Scripted(inbox, **queue.pop(0)))
    try:
        return jobs.run([open_lane("cpu")], ["probe.overflow_is_found", "probe.product"], listener, jobs=1)
    finally:
        assert queue == []


def test_a_process_that_ends_between_two_batches_fails_the_clause_before(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder()
    found = pooled(monkeypatch, {"clauses": 3}, {}, listener=recorder)
    assert [each.outcome for each in found] == ["passed", "passed", "failed", "passed", "passed", "passed"]
    assert (found[2].reason, found[2].seconds, found[2].text) == (
        "the process that ran it ended by SIGABRT after it",
        0.5,
        "said",
    )
    assert recorder.events == [("start", "probe"), ("end", "probe")] * 6


def test_a_worker_that_does_not_start_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    found = pooled(monkeypatch, {"clauses": 3}, {"starts": False}, {})
    assert [each.outcome for each in found].count("passed") == 5
    with pytest.raises(RuntimeError, match="a worker of the suite ended by SIGABRT before it ran anything\nsaid"):
        pooled(monkeypatch, {"starts": False}, {"starts": False})


def test_a_worker_that_cannot_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered("test_cli_conformance_jobs:Meets")():
        lane = open_lane("mutant")
        monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(HERE)])  # which workers get
        with pytest.raises(RuntimeError, match=r"worker of the suite ended with code 1 before it ran anything\n[^$]"):
            jobs.run([lane], ["probe.seed"], jobs=2)


class _Recorder(Listener):
    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def start(self, lane: str, clause: str) -> None:
        self.events.append(("start", clause.partition(".")[0]))

    def end(self, result: Result) -> None:
        self.events.append(("end", result.tier))


def test_what_measures_time_runs_alone_at_the_end() -> None:
    recorder = _Recorder()
    found = jobs.run([open_lane("cpu")], ["overhead.memory_of_masters", "probe.product"], recorder, jobs=2)
    assert [each.tier for each in found] == ["probe"] * 3 + ["overhead"] * 2
    assert recorder.events[-4:] == [("start", "overhead"), ("end", "overhead")] * 2
    assert "overhead" not in {tier for _, tier in recorder.events[:-4]}


def test_an_interrupt_within_a_clause_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with registered("test_cli_conformance_jobs:Raises")():
        assert main(["conformance", "--backend", "mutant", "--clause", "probe.overflow*", "--jobs", "2"]) == 130
    assert "conforms" not in capsys.readouterr().out


SCRIPT = """
import sys
from mutants import registered
from xamp.backends.cpu import CpuBackend
from xamp.cli import main
with registered("test_cli_conformance_jobs:Meets")():
    sys.exit(main(["conformance", "--backend", "mutant", "--clause", "probe.overflow_is_found[1]", "--jobs", "2"]))
"""


@pytest.mark.parametrize("to_all", [False, True], ids=["the parent", "as a terminal does"])
def test_ctrl_c_ends_all(to_all: bool, tmp_path: Path) -> None:
    """One clause waits, in vain, for a second process."""
    folders = (HERE.parents[2], HERE, HERE.parents[1] / "conformance", HERE.parents[1] / "support")
    environment = {**os.environ, "MEET_IN": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        until = time.monotonic() + LIMIT
        while not (there := list(tmp_path.iterdir())):
            assert time.monotonic() < until
            assert parent.poll() is None, parent.stderr.read() if parent.stderr else ""
            time.sleep(0.05)
        began = time.monotonic()
        if to_all:
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.send_signal(signal.SIGINT)
        out, err = parent.communicate(timeout=LIMIT)
    assert parent.returncode == 130, err
    assert time.monotonic() - began < LIMIT / 2
    assert "conforms" not in out
    with pytest.raises(ProcessLookupError):
        os.kill(int(there[0].name), 0)


@pytest.mark.parametrize("count", ["0", "-1", "many"])
def test_wrong_use(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--jobs", count]) == 2
    assert "--jobs" in capsys.readouterr().err
