"""ci/gpu.sh: stages pass, fail, are killed, cut off or left out, and what is kept of them. The stages are fakes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_stages
import pytest
from ci_scripts import ROOT
from gpu_stages import DIES, does, pytest_stage, table

from ci.gpu import process, result
from ci.gpu.__main__ import main
from ci.gpu.log import Log
from ci.gpu.runner import Runner, surroundings
from ci.gpu.stage import Stage, Step

LIMIT = 60.0  # seconds in which another process does something


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(Log(tmp_path / "run.log"), tmp_path, surroundings(ROOT))


def outcome(runner: Runner, stage: Stage, **options: bool) -> tuple[str, str]:
    """Run a stage; how it ended, and why."""
    runner.run(stage, **options)
    end = runner.log.of(stage.name).end
    assert end is not None
    return end["outcome"], end["reason"]


def written(folder: Path) -> dict[str, Any]:
    """The file of results."""
    (file,) = folder.glob("*-rehearsal.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in found["stages"]}


# ---------------------------------------------------------------- how a stage ends


def test_a_command_that_fails(runner: Runner) -> None:
    assert outcome(runner, does("good", "pass", "pass")) == ("passed", "")
    assert outcome(runner, does("bad", "raise SystemExit(3)", "pass")) == ("failed", "bad 0 ended with code 3")
    assert list(runner.log.of("bad").steps) == ["bad 0", "bad 1"]  # the others were run


def test_a_command_that_is_killed(runner: Runner) -> None:
    assert outcome(runner, does("dies", DIES)) == ("killed", "dies 0 ended by SIGKILL")


def test_a_command_at_its_limit(runner: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It gets SIGTERM, then SIGKILL, and so do those that it started."""
    monkeypatch.setattr(process, "GRACE", 0.5)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    sleeps = f"{child}; time.sleep(600)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n"
    code += f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid)); {sleeps}"
    began = time.monotonic()
    assert outcome(runner, does("long", code, limit=2.0)) == ("cut off", "long 0 was not done when its time was over")
    assert time.monotonic() - began < 30
    assert "deaf" in runner.log.of("long").steps["long 0"]["tail"]
    assert _is_gone(int((tmp_path / "child").read_text()))


def test_what_a_command_leaves_running_is_ended(runner: Runner, tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    code += f"open({str(tmp_path / 'child')!r}, 'w').write(str(p.pid))"
    assert outcome(runner, does("forgets", code)) == ("passed", "")
    assert _is_gone(int((tmp_path / "child").read_text()))


def test_what_is_lacking_is_left_out(runner: Runner) -> None:
    lacks = does("apex", "raise SystemExit(1)", lacks="there is no Apex")
    assert outcome(runner, lacks) == ("left out", "there is no Apex")


def test_no_time_is_left(runner: Runner) -> None:
    runner.until = time.monotonic() + 1
    assert outcome(runner, does("good", "pass")) == ("not reached", "no time was left")
    runner.until = time.monotonic() + 600
    assert outcome(runner, does("good", "pass")) == ("passed", "")


# ---------------------------------------------------------------- going on


def test_a_stage_goes_on_after_the_last_command_that_was_done(runner: Runner, tmp_path: Path) -> None:
    ran = f"open({str(tmp_path / 'ran')!r}, 'a').write"
    dies_once = f"import os; {ran}('2')\nif not os.path.exists('mended'): {DIES}"
    stage = does("some", f"{ran}('1')", dies_once, f"{ran}('3')")
    assert outcome(runner, stage)[0] == "killed"
    assert (tmp_path / "ran").read_text() == "12"
    (tmp_path / "mended").touch()
    assert outcome(runner, stage) == ("passed", "")
    assert (tmp_path / "ran").read_text() == "1223"
    runner.run(stage, again=True)
    assert (tmp_path / "ran").read_text() == "1223"  # it is kept
    runner.log.add(stage.name, "forget")
    runner.run(stage)
    assert (tmp_path / "ran").read_text() == "1223123"


TESTS = f"""
import os, signal, time, pytest

def ran(name):
    with open("ran", "a") as file:
        file.write(name)

def test_a(): ran("a")

def test_b():
    ran("b")
    assert os.path.exists("mended"), "not mended in {ROOT}/tests on {socket.gethostname()}"

def test_c():
    ran("c")
    if not os.path.exists("survives"):
        time.sleep(0.5)  # a line that another process writes may need a moment
        os.kill(os.getpid(), signal.SIGKILL)

def test_d(): ran("d")

def test_e(): pytest.skip("not here")
"""


@pytest.mark.parametrize("workers", [[], ["-n2", "-p", "xdist"]], ids=["one process", "workers"])
def test_tests_that_passed_are_not_run_again(workers: Sequence[str], runner: Runner, tmp_path: Path) -> None:
    """All up to a SIGKILL is on disk. Where a worker is killed, that is a failure of its test alone."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_some.py").write_text(TESTS, encoding="utf-8")
    stage = pytest_stage(tmp_path / "suite", *workers)
    first = outcome(runner, stage)
    kept = {name.rpartition("_")[2]: test["outcome"] for name, test in runner.log.of("tests").tests.items()}
    if workers:
        assert first == ("failed", "2 failed")
        assert kept == {"a": "passed", "b": "failed", "c": "failed", "d": "passed", "e": "skipped"}
    else:
        assert first == ("killed", "tests ended by SIGKILL")
        assert kept == {"a": "passed", "b": "failed"}
    before = (tmp_path / "ran").read_text()
    (tmp_path / "survives").touch()
    assert outcome(runner, stage, again=True) == ("failed", "1 failed")
    assert sorted((tmp_path / "ran").read_text()[len(before) :]) == (["b", "c"] if workers else ["b", "c", "d"])
    assert outcome(runner, stage) == ("failed", "1 failed")  # kept
    (tmp_path / "mended").touch()
    assert outcome(runner, stage, again=True) == ("passed", "")
    assert (tmp_path / "ran").read_text().count("a") == 1
    counts = result.made(runner.log, [stage], {}, "project", rehearsal=True)["stages"][0]["counts"]
    assert counts == {"passed": 4, "skipped": 1}


def test_tests_that_end_half_way_have_not_passed(runner: Runner, tmp_path: Path) -> None:
    """An error of the command itself ends with the code that failed tests end with."""
    log = "from ci.gpu.keep import LOG; from ci.gpu.log import Log; import os, pathlib; "
    log += "Log(pathlib.Path(os.environ[LOG])).add('half', 'test', test='a', outcome='passed', seconds=0, reason='')"
    step = Step("suite", [sys.executable, "-c", f"{log}; raise RuntimeError"], accepts=(0, 1), tests=True)
    half = Stage("half", "ends half-way", 60.0, [step])
    assert outcome(runner, half) == ("failed", "suite ended with code 1, and no test had failed")


def test_tests_that_lack_a_package_say_so(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_one.py").write_text("import no_such_package.part\n", encoding="utf-8")
    stage = pytest_stage(tmp_path / "suite")
    assert outcome(runner, stage) == ("left out", "not there: no_such_package")
    more = "def test_a(): import no_such_other\ndef test_b(): pass\n"
    (tmp_path / "suite" / "test_two.py").write_text(more, encoding="utf-8")
    assert outcome(runner, stage) == ("passed", "not there: no_such_other, no_such_package")
    (tmp_path / "suite" / "test_three.py").write_text("import xamp.no_such_part\n", encoding="utf-8")
    runner.log.add(stage.name, "forget")
    assert outcome(runner, stage)[0] == "failed"


def test_a_file_that_is_mended_has_not_failed(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    file = tmp_path / "suite" / "test_one.py"
    file.write_text("1 / 0\n", encoding="utf-8")
    stage = pytest_stage(tmp_path / "suite")
    assert outcome(runner, stage) == ("failed", "1 failed; tests ended with code 2")
    file.write_text("def test_a(): pass\n", encoding="utf-8")
    assert outcome(runner, stage, again=True) == ("passed", "")


def test_no_tests_at_all_is_a_failure(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    assert outcome(runner, pytest_stage(tmp_path / "suite")) == ("failed", "there were no tests")


def test_a_line_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    log = Log(tmp_path / "run.log")
    log.add("one", "start")
    log.add("one", "test", test="a", outcome="passed")
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"stage": "one", "event": "test", "test": "b", "outc')
    log.add("one", "test", test="c", outcome="failed")
    assert {name: test["outcome"] for name, test in log.of("one").tests.items()} == {"a": "passed", "c": "failed"}


# ---------------------------------------------------------------- the whole command


def test_all_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The table, the file of results, the exit code, and what a second call keeps."""
    secret = f"raise SystemExit('no {ROOT}/secret/file on {socket.gethostname()}')"
    stages = [does("good", "pass"), does("bad", secret), does("dies", DIES), does("none", lacks="it is not there")]
    words = ["--rehearse", "--out", str(tmp_path)]
    assert main(words, table(*stages)) == 1
    shown = capfd.readouterr().out
    found = written(tmp_path)
    assert outcomes(found) == {"good": "passed", "bad": "failed", "dies": "killed", "none": "left out"}
    assert (found["schema"], found["rehearsal"], found["by"]) == (1, True, "contributor")
    assert found["machine"]["type"] == "cpu"
    for name, ended in outcomes(found).items():
        assert any(line.split()[:2] == [name, ended.split()[0]] for line in shown.splitlines()), name
        assert f"== {name}: {ended} after " in shown
    text = (next(tmp_path.glob("*.json"))).read_text(encoding="utf-8")
    assert "secret" not in text
    assert str(ROOT) not in text
    assert socket.gethostname() not in text
    assert len(list(tmp_path.iterdir())) == 2
    assert main([*words, "good", "none"], table(*stages)) == 0
    assert "== good: passed before, and kept" in capfd.readouterr().out
    assert main([*words, "--report"], table(*stages)) == 1
    assert main([*words, "--minutes", "0", "other"], table(*stages, does("other", "pass"))) == 1
    assert outcomes(written(tmp_path))["other"] == "not reached"


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"name": "one", "outcome": "failed", "reason": "2 failed", "seconds": 7, "counts": {"failed": 2}}]
    stages += [{"name": "two", "outcome": "passed", "reason": "", "seconds": 5, "counts": {"passed": 3, "skipped": 1}}]
    about = {"device": "a card", "type": "npu", "python": "3.12.3", "versions": {"torch": "2.11.0"}}
    result.show({"machine": about, "stages": stages})
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0] == ["a", "card", "(npu);", "python", "3.12.3,", "torch", "2.11.0"]
    assert lines[2:] == [
        ["one", "failed", "2", "7", "2", "failed"],
        ["two", "passed", "3", "1", "skipped", "5"],
        ["all", "12"],
    ]


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--out", str(tmp_path)]
    assert main([*words, "--rehearse", "nope"], table(does("good", "pass"))) == 2
    assert "no stage is called nope. There are good" in capsys.readouterr().err
    assert main([*words, "--device", "abc"], table()) == 3
    assert "no backend is registered for device type 'abc'" in capsys.readouterr().err
    monkeypatch.setenv("XAMP_BY", "me")
    assert main([*words, "--rehearse"], table()) == 2
    assert "XAMP_BY='me': it must be one of contributor, project" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _start(folder: Path) -> subprocess.Popen[str]:
    """A run of three stages, of which the second waits for a file."""
    path = os.pathsep.join([str(ROOT), str(Path(gpu_stages.__file__).parent)])
    command = [sys.executable, "-m", "gpu_stages", str(folder)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def _wait_for_slow(folder: Path, run: subprocess.Popen[str]) -> int:
    """The process of the second stage, once it runs."""
    until = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < until
        assert run.poll() is None
        lines = (folder / "ran").read_text().splitlines() if (folder / "ran").exists() else []
        if lines and lines[-1].startswith("slow"):
            return int(lines[-1].split()[1])
        time.sleep(0.02)


def _is_gone(number: int) -> bool:
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{number}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True  # only its parent has not looked
        time.sleep(0.02)
    return False


def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    with _start(tmp_path) as run:
        slow = _wait_for_slow(tmp_path, run)
        run.kill()
    assert _is_gone(slow)  # it does not stay beside the next run
    assert outcomes(written(tmp_path)) == {"quick": "passed", "slow": "not run", "last": "not run"}
    words = ["--rehearse", "--out", str(tmp_path)]
    stages = gpu_stages._slow(tmp_path)
    assert main([*words, "--report"], table(*stages)) == 1
    assert outcomes(written(tmp_path)) == {"quick": "passed", "slow": "killed", "last": "not run"}
    (tmp_path / "go").touch()
    assert main(words, table(*stages)) == 0
    assert [line.split()[0] for line in (tmp_path / "ran").read_text().splitlines()] == [
        "quick",
        "slow",
        "slow",
        "last",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_and_its_result_is_there(number: signal.Signals, tmp_path: Path) -> None:
    with _start(tmp_path) as run:
        slow = _wait_for_slow(tmp_path, run)
        run.send_signal(number)
        out, _ = run.communicate(timeout=LIMIT)
    assert run.returncode == 128 + number
    assert _is_gone(slow)
    assert outcomes(written(tmp_path)) == {"quick": "passed", "slow": "killed", "last": "not run"}
    assert any(line.split()[:2] == ["slow", "killed"] for line in out.splitlines())
