"""ci/gpu.sh: its stages; how they pass, fail, are killed, cut off or left out; and what is kept of them.

Covers: ci/gpu/run.py, ci/gpu/stages.py, ci/gpu/keep.py.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT

from benchmarks.__main__ import BENCHMARKS
from ci.gpu import log, machine, run
from ci.gpu.__main__ import _surroundings, main
from ci.gpu.stages import MEASURED, Plan, Stage, Step, stages

ABOUT = {"device": "A Card (80 GB)", "type": "npu", "backend": "npu", "python": "3.12.3"}
PLAN = Plan({**ABOUT, "versions": {"torch": "2.11.0+cu130"}}, 16, Path("a.log"))
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def does(name: str, *codes: str, limit: float = 60.0, lacks: str = "", tests: bool = False) -> Stage:
    """A stage whose commands are the programs ``codes``."""
    steps = [Step(f"{name} {n}", [sys.executable, "-c", code], tests=tests) for n, code in enumerate(codes)]
    return Stage(name, f"does {name}", limit, steps, lacks)


def outcome(folder: Path, stage: Stage, *, seconds: float = 600.0, again: bool = False) -> tuple[str, str]:
    """Run a stage; how it ended, and why."""
    file = folder / "run.log"
    run.run_stage(file, stage, _surroundings(folder), time.monotonic() + seconds, again=again)
    end = log.of(file, stage.name).end
    return end["outcome"], end["reason"]


def test_the_stages_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "card.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.endswith(" s |")]
    found = stages(PLAN)
    assert [(f" `{each.name}` ", f" {each.limit:g} s ") for each in found] == [(row[1], row[3]) for row in rows]
    assert sum(stage.limit for stage in found) <= 38 * 60
    assert sorted(name for names in MEASURED.values() for name in names) == sorted(BENCHMARKS)
    assert [stage.name for stage in found if stage.lacks] == ["apex"]
    small = stages(PLAN._replace(rehearse=True))
    words = [word for stage in small for step in stage.steps for word in step.command if word.startswith("tests/")]
    assert all((ROOT / word).exists() for word in words)
    assert machine.file_name(PLAN.about) == "gpu-a-card-80-gb-python3.12-torch2.11.0"


def test_how_a_stage_ends(tmp_path: Path) -> None:
    assert outcome(tmp_path, does("good", "pass", "pass")) == ("passed", "")
    assert outcome(tmp_path, does("bad", "raise SystemExit(3)", "pass")) == ("failed", "bad 0 ended with code 3")
    assert list(log.of(tmp_path / "run.log", "bad").steps) == ["bad 0", "bad 1"]  # the others were run
    assert outcome(tmp_path, does("dies", DIES)) == ("killed", "dies 0 ended by SIGKILL")
    assert outcome(tmp_path, does("apex", "pass", lacks="there is no Apex")) == ("left out", "there is no Apex")
    assert outcome(tmp_path, does("late", "pass"), seconds=1) == ("not reached", "no time was left")
    half = does("half", "from ci.gpu.log import add_test; add_test('a', outcome='passed'); 1 / 0", tests=True)
    half = half._replace(steps=[half.steps[0]._replace(accepts=(0, 1))])
    assert outcome(tmp_path, half) == ("failed", "it ended with code 1, and no test had failed")


def test_a_command_at_its_limit_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GRACE", 0.5)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {deaf!r}]); print(p.pid); {deaf}"
    assert outcome(tmp_path, does("long", code, limit=2.0))[0] == "cut off"
    tail = log.of(tmp_path / "run.log", "long").steps["long 0"]["tail"]
    state = Path(f"/proc/{re.findall(r'[0-9]+', tail)[0]}/stat")
    for _ in range(3000):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("what the command has started runs on")


TESTS = """
import os, signal, time, pytest
def ran(name):
    with open("{place}/ran", "a") as file: file.write(name)
    return os.path.exists("{place}/mended")
def test_a(): ran("a")
def test_b(): assert ran("b")
def test_c():
    if not ran("c"):
        time.sleep(0.5)  # a line that another process writes may need a moment
        os.kill(os.getpid(), signal.SIGKILL)
def test_d(): import no_such_package
"""


@pytest.mark.parametrize("workers", [[], ["-n2", "-p", "xdist"]], ids=["one process", "workers"])
def test_tests_that_passed_are_not_run_again(workers: list[str], tmp_path: Path) -> None:
    """All up to a SIGKILL is on disk. Where a worker is killed, that is a failure of its test alone."""
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_some.py").write_text(TESTS.replace("{place}", str(tmp_path)), encoding="utf-8")
    plain = ["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    words = [sys.executable, "-m", "pytest", "-p", "ci.gpu.keep", "-q", *workers, *plain, str(tmp_path / "suite")]
    stage = Stage("tests", "the tests", 120.0, [Step("tests", words, "pytest", (0, 1, 5), tests=True)])
    first = outcome(tmp_path, stage)
    assert first == (("failed", "2 failed") if workers else ("killed", "tests ended by SIGKILL"))
    (tmp_path / "mended").touch()
    assert outcome(tmp_path, stage, again=True) == ("passed", "not there: no_such_package")
    assert sorted((tmp_path / "ran").read_text()) == ["a", "b", "b", "c", "c"]


def _result(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    (file,) = folder.glob("*-rehearsal.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    return found, {stage["name"]: stage["outcome"] for stage in found["stages"]}


def test_all_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the file of results, the exit code, what a second call keeps, and wrong use."""
    secret = f"raise SystemExit('no {ROOT}/secret/file on {socket.gethostname()}')"
    table = [does("good", "pass"), does("bad", secret), does("dies", DIES), does("none", lacks="it is not there")]
    words = ["--rehearse", "--out", str(tmp_path)]
    about = machine.ask("cpu", _surroundings(tmp_path))
    monkeypatch.setattr(machine, "ask", lambda *_: about)
    assert main(words, lambda _: table) == 1
    found, ended = _result(tmp_path)
    assert ended == {"good": "passed", "bad": "failed", "dies": "killed", "none": "left out"}
    assert (found["schema"], found["rehearsal"], found["by"]) == (1, True, "contributor")
    shown = [line.split()[:2] for line in capfd.readouterr().out.splitlines()]
    assert all([name, how.split()[0]] in shown for name, how in ended.items())
    assert not any(text in json.dumps(found) for text in ("secret", str(ROOT), socket.gethostname()))
    assert main([*words, "good", "none"], lambda _: table) == 0
    assert "== good: passed before, and kept" in capfd.readouterr().out
    assert main([*words, "nope"], lambda _: table) == 2
    monkeypatch.setattr(machine, "ask", lambda *_: "no backend for 'abc'")
    assert main(["--device", "abc", "--out", str(tmp_path)], lambda _: table) == 3
    assert "ci/gpu.sh: no backend for 'abc'\nxamp doctor says more" in capfd.readouterr().err


def test_a_signal_ends_the_run_and_its_result_is_there(tmp_path: Path) -> None:
    program = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}, {str(ROOT / "tests" / "support")!r}]
from test_gpu import does, main
table = [does("quick", "pass"), does("slow", "print('sleeps'); import time; time.sleep(600)"), does("last", "pass")]
sys.exit(main(["--rehearse", "--out", {str(tmp_path)!r}], lambda _: table))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "sleeps\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert _result(tmp_path)[1] == {"quick": "passed", "slow": "killed", "last": "not run"}
