"""``xamp doctor`` and the command line around it, where torch works; test_import.py has the cases where it does not."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xamp
from xamp.cli import main
from xamp.cli.doctor import examine, render
from xamp.contract import BackendReport

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("XAMP_")]:
        monkeypatch.delenv(name)


# --- the command line


def test_as_a_module_it_is_the_same_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "xamp", "doctor", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"xamp {xamp.__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["docter"], ["doctor", "--jsn"], ["doctor", "extra"]])
def test_wrong_use_is_code_2_and_prints_the_usage_to_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: xamp" in printed.err


# --- the findings


def test_json_holds_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "schema",
        "ok",
        "xamp",
        "python",
        "platform",
        "torch",
        "backends",
        "chosen",
        "environment",
    ]
    assert (found["schema"], found["ok"], found["xamp"]) == (1, True, xamp.__version__)
    assert found["torch"] == {"version": torch.__version__, "reason": "", "hint": ""}
    assert found["chosen"] == {"device": str(xamp.device()), "backend": found["chosen"]["backend"], "reason": ""}
    assert found["environment"] == {}
    fields = [field.name for field in dataclasses.fields(BackendReport)]
    assert all(list(row) == fields for row in found["backends"])
    assert [row["name"] for row in found["backends"]] == [row.name for row in xamp.available_backends()]
    (cpu,) = [row for row in found["backends"] if row["name"] == "cpu"]
    assert cpu["usable"] is True
    assert cpu["versions"]["torch"] == torch.__version__
    assert cpu["capabilities"]["levels"] == ["O0", "O1", "O2", "O3", "O4", "O5"]


def test_the_text_shows_every_backend_with_devices_or_cause_and_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"torch {torch.__version__}" in text
    for row in xamp.available_backends():
        if row.usable:
            assert f"{row.name} usable for" in text
            assert "; ".join(" ".join(name.split()) for name in row.devices) in text
        else:
            assert f"{row.name} not usable for" in text
            assert f"cause {row.reason} cure {' '.join(row.hint.split())}" in text
    assert f"chosen device {xamp.device()} backend" in text
    assert "no XAMP_ variable is set" in text


def test_what_is_not_tested_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    marked = {line.split()[0] for line in lines if line.endswith("not tested by its project")}
    assert marked == {row.name for row in xamp.available_backends() if not row.tested}


def test_the_variables_are_shown_and_obeyed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    monkeypatch.setenv("XAMP_BACKEND", "cpu")
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "  XAMP_BACKEND=cpu\n  XAMP_DEVICE=cpu" in text
    assert examine()["chosen"] == {"device": "cpu", "backend": "cpu", "reason": ""}


@pytest.mark.parametrize(
    ("name", "value"), [("XAMP_DEVICE", "gpu"), ("XAMP_DEVICE", "cpu cpu"), ("XAMP_BACKEND", "nope")]
)
def test_a_variable_that_asks_for_the_impossible_is_a_finding(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert f"none      {name}=" in capsys.readouterr().out
    found = examine()
    assert (found["ok"], found["chosen"]["device"]) == (False, None)
    assert found["chosen"]["reason"].startswith(f"{name}=")


def test_no_usable_backend_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = BackendReport("cpu", ("cpu",), usable=False, reason="out of order", hint="mend it")
    monkeypatch.setattr("xamp.cli.doctor.available_backends", lambda: [report])
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "cause     out of order\n" in text
    assert "cure      mend it\n" in text


def test_what_extensions_print_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def talkative() -> list[BackendReport]:
        sys.stdout.write("Warning: a path is not set.\n")
        return xamp.available_backends()

    monkeypatch.setattr("xamp.cli.doctor.available_backends", talkative)
    assert main(["doctor", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is True
    assert printed.err == "Warning: a path is not set.\n"


def test_long_reasons_are_wrapped_into_their_column() -> None:
    findings = examine()
    words = "a reason that goes on " * 20
    long = BackendReport("zz", (), usable=False, reason=words, source="plugin 1.0")
    row = {**dataclasses.asdict(long), "versions": {}}
    lines = render({**findings, "backends": [row]}).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  zz"))
    assert lines[start] == "  zz  not usable  for ?; from plugin 1.0"
    assert lines[start + 1].startswith("      cause     a reason")
    assert lines[start + 2].startswith(" " * 16)
    assert lines[start + 2][16] != " "
    assert max(map(len, lines[start : start + 5])) <= 110


def test_a_terminal_that_cannot_show_a_name_does_not_stop_it() -> None:
    code = (
        "import xamp.cli.doctor as d; from xamp.cli import main; from xamp.contract import BackendReport as R\n"
        "d.available_backends = lambda: [R('x', ('cpu',), True, devices=('\\u6607\\u817e',), capabilities=d.xamp"
        ".available_backends()[-1].capabilities)]\nraise SystemExit(main(['doctor']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u6607\\u817e" in done.stdout
