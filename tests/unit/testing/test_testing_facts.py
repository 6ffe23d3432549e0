"""What is recorded of a device: here of the CPU, which refuses nothing. tests/conformance/test_standin.py has gaps.

Covers: xamp.testing.facts.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from mutants import registered

from xamp.testing import facts


def test_the_cpu_lacks_only_capturable_forms(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "facts.json"
    assert facts.main(["--device", "cpu", "--json", str(path)]) == 0
    assert capfd.readouterr().out == ""
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["about"]["torch"] == torch.__version__
    assert found["dtypes"] == ["float16", "bfloat16"]
    assert found["refuses"] == {}
    assert found["fp32_numbers"] == []
    assert found["fused"] == dict.fromkeys(("Adagrad", "Adam", "AdamW", "SGD"), "")
    assert found["capturable"].keys() >= {"Adam", "AdamW", "NAdam", "RMSprop"}
    assert all("capturable=True" in error for error in found["capturable"].values())
    assert {"linear", "mm", "conv2d"} <= set(found["autocast"]["lower"].split())
    rest = ("recurrent", "copies", "waits", "fork")
    assert [found[key] for key in rest] == ["", {"late_by": 0}, [], ""]


def test_facts_go_to_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts.main(["--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["cards"] == 1


def test_a_device_that_torch_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts.main(["--device", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("python -m xamp.testing.facts: --device nosuch: Expected one of ")


SCRIPTS = {
    "works": ("os._exit(0)", ""),
    "raises": ("print(json.dumps({'error': 'no fork\\nhere'}), flush=True); os._exit(0)", "no fork\nhere"),
    "ends with a code": ("os._exit(7)", "it ends with code 7"),
    "is killed": ("os.kill(os.getpid(), signal.SIGSEGV)", "it ends by SIGSEGV"),
    "hangs": ("Path(os.environ['PID_IN']).write_text(str(os.getpid())); time.sleep(600)", "a forked process that uses"),
}
PARENT = """
import json, os, signal, sys, time
from pathlib import Path
child = os.fork()
if child:
    print(json.dumps({{"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}}), flush=True)
else:
    {}
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_how_a_forked_process_ends_is_the_fact(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The scripts take the place of the one that uses the device, and of its end."""
    script, told = SCRIPTS[name]
    monkeypatch.setenv("PID_IN", str(tmp_path / "pid"))
    monkeypatch.setattr(facts, "_FORK", PARENT.format(script))
    monkeypatch.setattr(facts, "_LIMIT", 1.0 if name == "hangs" else 60.0)
    assert facts._fork("cpu")[: len(told) or None] == told
    if name == "hangs" and (pid := tmp_path / "pid").exists():  # on a busy machine it may not have come so far
        until = time.monotonic() + 60.0
        while is_running(int(pid.read_text(encoding="ascii"))):
            assert time.monotonic() < until, "it was left running"
            time.sleep(0.01)


def is_running(process: int) -> bool:
    """Whether it has not been killed; who inherits it may not have asked yet how it ended."""
    stat = Path("/proc", str(process), "stat")
    return stat.exists() and stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"


def test_what_fails_before_the_fork_is_no_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_FORK", "raise SystemError('the driver is gone')")
    with pytest.raises(
        RuntimeError, match=r"to fork on cpu ended with code 1:\n(?s:.*)SystemError: the driver is gone"
    ):
        facts._fork("cpu")


def test_a_backend_of_this_process_is_known_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import json, sys; print(json.dumps({'code': 0, 'error': [spec['name'] for spec in json.loads(sys.argv[2])]}))"
    )
    monkeypatch.setattr(facts, "_FORK", script)
    with registered("probe_mutants:SeesNoOverflow")():
        assert facts._fork("cpu") == "['cpu', 'mutant']"
