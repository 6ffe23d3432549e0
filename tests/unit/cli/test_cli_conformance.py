"""``xamp conformance`` and a third party's test file: outcomes, exit codes, what is shown and what is written.

Covers: xamp.cli.conformance, xamp.cli._conformance_text, xamp.cli._conformance_junit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from forked_python import python
from mutants import registered

from xamp.cli import main
from xamp.testing import Lane, lane
from xamp.testing.probe import Probe

FEW = ["--clause", "probe.seed", "--clause", "probe.product"]


def test_it_runs_every_usable_device_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *FEW]) == 0
    out, err = capsys.readouterr()
    assert "cpu: passes what was chosen: 4 passed" in out
    assert "cpu  probe        4 passed in" in err


def test_a_failure_is_shown_and_found(capsys: pytest.CaptureFixture[str]) -> None:
    with registered("probe_mutants:SeesNoOverflow")():
        code = main(["conformance", "--backend", "mutant", "--clause", "probe.overflow_is_found"])
    assert code == 1
    out, err = capsys.readouterr()
    assert "probe.overflow_is_found[1] failed: AssertionError: overflow in 0" in out
    assert "assert found.item() == " in out  # the line of the clause
    assert "mutant: does not conform: 3 failed" in out
    assert "mutant  probe.overflow_is_found[1] failed" in err


def test_a_device_goes_by_the_name_of_its_backend_too(capsys: pytest.CaptureFixture[str]) -> None:
    with registered("probe_mutants:RunsTwoLevels")():
        for name in ("mutant", "mutant:0"):
            opened = lane.open_lane(device=name)
            assert (str(opened), opened.kind) == ("mutant", "cpu")
        assert lane.open_lane(device="mutant:0").device.index == 0
        assert str(lane.open_lane(device="cpu")) == "cpu"
        assert main(["conformance", "--device", "mutant", "--clause", "levels.effective"]) == 0
        assert "mutant: passes what was chosen: 2 passed" in capsys.readouterr().out
        assert main(["conformance", "--device", "mutant:7", *FEW]) == 1
        assert main(["conformance", "--device", "mutants", *FEW]) == 2
    assert main(["conformance", "--device", "mutant", *FEW]) == 2


def test_what_is_not_declared_is_listed_and_can_be_required(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["conformance", "--backend", "mutant", "--clause", "levels.effective"]
    with registered("probe_mutants:RunsTwoLevels")():
        assert main(words) == 0
        out = capsys.readouterr().out
        assert "mutant: passes what was chosen: 2 passed, 4 not declared" in out
        assert "level O2\n      levels.effective" in out
        assert main([*words, "--require", "O2,fp16", "--require", "bf16"]) == 1
    out = capsys.readouterr().out
    assert "levels.effective[O2] failed: Failed: O2 is required on mutant, and not declared: level O2" in out
    assert "levels.effective[O3] failed" not in out


def test_the_file_of_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    assert main(["conformance", "--device", "cpu", "--json", str(file), *FEW]) == 0
    written = json.loads(file.read_text(encoding="utf-8"))
    assert (written["schema"], written["ok"], written["counts"]["passed"]) == (1, True, 4)
    assert written["clauses"] == ["probe.seed", "probe.product"]  # not the whole suite
    (lane,) = written["lanes"]
    assert (lane["lane"], lane["backend"], lane["device"]) == ("cpu", "cpu", "cpu")
    assert lane["capabilities"]["overflow"] == "inf"
    assert "torch" in lane["versions"]
    first = written["results"][0]
    assert (first["tier"], first["clause"], first["outcome"]) == ("probe", "probe.product[float32]", "passed")
    capsys.readouterr()
    assert main(["conformance", "--device", "cpu", "--json", "-", *FEW]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == written["counts"]


def test_the_file_for_ci_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.xml"
    words = ["--clause", "levels.effective", "--clause", "probe.product"]
    with registered("probe_mutants:RunsTwoLevels")():
        assert main(["conformance", "--backend", "mutant", "--require", "O2", "--junit", str(file), *words]) == 1
    (suite,) = ElementTree.parse(file).getroot()
    assert suite.get("name") == "mutant"
    cases = {f"{case.get('classname')}.{case.get('name')}": case for case in suite.iter("testcase")}
    outcomes = {name: [each.tag for each in case] for name, case in cases.items()}
    assert outcomes["levels.effective[O0]"] == outcomes["probe.product[float32]"] == []
    assert outcomes["levels.effective[O2]"] == ["failure"]
    assert outcomes["levels.effective[O3]"] == ["skipped"]
    failure = cases["levels.effective[O2]"].find("failure")
    assert failure is not None
    assert "O2 is required on mutant, and not declared" in str(failure.get("message"))
    counted = {name: int(suite.get(name, "-1")) for name in ("tests", "failures", "skipped", "errors")}
    tags = [tag for found in outcomes.values() for tag in found]
    assert counted == {
        "tests": len(cases),
        "failures": tags.count("failure"),
        "skipped": tags.count("skipped"),
        "errors": 0,
    }


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--junit", "no/such/folder/results.xml"], 2, "no/such/folder/results.xml: there is no such folder"),
        (["--require", "speed"], 2, "--require speed: there is no such capability. There are O0, O1"),
        (["--backend", "nope"], 2, "--backend nope: no backend of that name is registered. Registered are"),
        (["--device", "abc"], 2, "no backend is registered for device type 'abc'"),
        (["--device", "cpu:x"], 2, "--device cpu:x: Invalid device string"),
        (["--device", "cpu", "--device", "cpu:7"], 1, "--device cpu:7: there is 1 of this type"),
        (
            ["--device", "abc", "--backend", "cpu"],
            2,
            "--backend cpu: this backend serves cpu, not 'abc'. Choose another one, or leave --backend out.",
        ),
        (["--json", "no/such/folder/results.json"], 2, "no/such/folder/results.json: there is no such folder"),
        (["--ledger", "none.json"], 2, "--ledger none.json: cannot be read"),
        (["--clause", "probe.none"], 2, "--clause 'probe.none': no clause is called probe.none"),
        (["--clause", "probe.seed", "--clause", "none.*"], 2, r"no clause is called none.*"),
    ],
)
def test_wrong_use(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", *words]) == code
    out, err = capsys.readouterr()
    assert message in err
    assert not re.search(r"\w\(|\w=['\"]", err), "it speaks of a call in Python"
    assert not out


def test_a_device_that_is_named_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    with registered("test_cli_conformance:Nowhere", device_types=("xpu",), priority=1000)():
        code = main(["conformance", "--backend", "mutant"])
    assert code == 1
    assert "this backend cannot be used" in capsys.readouterr().err


def test_without_pytest_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["conformance"]) == 2
    assert "pip install 'xamp[conformance]'" in capsys.readouterr().err


def test_no_device_at_all_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(lane, "usable_lanes", lambda require: [])
    assert main(["conformance"]) == 1
    assert "no backend can be used here" in capsys.readouterr().err


def test_devices_of_one_backend_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--device", "cpu:0", "--device", "cpu", "--clause", "probe.seed", "--json", "-"]
    assert main(["conformance", *words]) == 0
    written = json.loads(capsys.readouterr().out)
    assert [each["lane"] for each in written["lanes"]] == ["cpu", "cpu:0"]
    assert [(each["lane"], each["clause"]) for each in written["results"]] == [
        ("cpu", "probe.seed"),
        ("cpu:0", "probe.seed"),
    ]


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(self: Probe, lane: Lane) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Probe, "test_seed", interrupted)
    assert main(["conformance", *FEW]) == 130
    assert "conforms" not in capsys.readouterr().out


def _run(words: list[str], folder: Path, **variables: str) -> Any:
    """``xamp conformance`` in a process of its own, in ``folder``."""
    command = [python(), "-m", "xamp", "conformance", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTEST_ADDOPTS": "--collect-only -k nothing --no-such-option"},
        {"PYTEST_ADDOPTS": "-p xdist -n 2 -W error"},
        {"PYTEST_PLUGINS": "takes_all"},
    ],
    ids=["options", "workers", "plugins"],
)
def test_it_minds_no_other_pytest(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "takes_all.py").write_text("def pytest_collection_modifyitems(items):\n    items.clear()\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nfilterwarnings = error\n")
    done = _run(FEW, tmp_path, **variables)
    assert "cpu: passes what was chosen: 4 passed" in done.stdout, done.stderr
    assert done.returncode == 0


def test_it_does_not_run_without_its_checks(tmp_path: Path) -> None:
    done = _run(FEW, tmp_path, PYTHONOPTIMIZE="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Python runs with -O" in done.stderr


THIRD_PARTY = """
from xamp.contract import BackendSpec
from xamp.testing import Conformance
import xamp

xamp.register_backend(BackendSpec("mine", ("cpu",), "probe_mutants:{cls}", priority=-1))

class TestMine(Conformance):
    backend = "mine"
    require = ("O1",)
"""


@pytest.mark.parametrize(("cls", "failed"), [("IsFastInBf16", 0), ("SeesNoOverflow", 3)])
def test_a_third_party_runs_pytest(cls: str, failed: int, tmp_path: Path) -> None:
    file = tmp_path / "test_mine.py"
    file.write_text(THIRD_PARTY.format(cls=cls), encoding="utf-8")
    here = Path(__file__).resolve().parents[2]
    folders = here / "conformance", here / "support", here.parent  # the last where this xamp is not installed
    environment = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "PATH": "/usr/bin:/bin"}
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    chosen = "overflow_is_found or effective or unscale_multiplies"
    done: Any = subprocess.run(
        [*command, "-k", chosen], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert f"\n{failed} failed, " in done.stdout or not failed, done.stdout
    assert done.returncode == (1 if failed else 0), done.stdout
    if failed:
        assert "assert 0.0 == 1.0" in done.stdout  # pytest explains the asserts of the suite
