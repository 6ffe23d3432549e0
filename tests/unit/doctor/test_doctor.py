"""``xamp doctor`` and the command line around it, where everything works; test_doctor_*.py break something.

Covers: xamp.cli.doctor, xamp.cli._doctor_text, xamp.doctor.examine, xamp.registry.findings.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from site_packages import best_of, doctor_finds, plain_environment, row_of

import xamp
from xamp.cli import doctor, main
from xamp.cli._doctor_text import render, report
from xamp.cli.doctor import add_arguments
from xamp.contract import BackendReport
from xamp.doctor.examine import _choose
from xamp.doctor.lists import list_findings
from xamp.doctor.machine import Examined

FIELDS = [field.name for field in dataclasses.fields(BackendReport)]
KEYS = ["schema", "ok", "xamp", "python", "platform", "torch", "apex", "backends", "chosen", "environment"]
KEYS += ["recommended"]
ADDED = ["broken", "findings", "settings", "one_pass", "seconds", "printed"]


ASK = """
import sys
from xamp.doctor import machine
from xamp.cli import main
calls, run_child = [], machine.run_child
machine.run_child = lambda *arguments: calls.append(arguments) or run_child(*arguments)
code = main(["doctor", "--json", "--timeout", "3600"])
heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "numpy") or name.startswith("xamp.backends")]
print(code, len(calls), heavy, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def asked() -> subprocess.CompletedProcess[str]:
    """A new process that asks the doctor where nothing is broken and nothing is set."""
    command = [sys.executable, "-W", "error", "-c", ASK]
    return subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def found(asked: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(asked.stdout)
    return plain


def words(text: str) -> str:
    return " ".join(text.split())


def changed(found: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``found``, with a row or other things in place of what it has."""
    return {**found, **changes}


def row(name: str, usable: bool = False, **changes: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(BackendReport(name, (), usable=usable, source="plugin 1.0"))
    added = {"broken": False, "findings": [], "settings": [], "one_pass": "", "seconds": 0.1, "printed": []}
    return {**plain, **added, **changes}


# --- the command line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"xamp {xamp.__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["docter"],
        ["doctor", "--jsn"],
        ["doctor", "extra"],
        ["doctor", "--json", "--report"],
        ["doctor", "--timeout", "0"],
        ["doctor", "--timeout", "soon"],
        ["doctor", "--timeout", "nan"],
    ],
)
def test_wrong_use_is_code_2_and_prints_the_usage_to_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "usage: xamp" in printed.err


def test_a_step_may_take_a_minute_unless_told_otherwise() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert parser.parse_args([]).timeout == 60.0
    assert parser.parse_args(["--timeout", "2.5"]).timeout == 2.5


# --- what it finds


def test_json_holds_what_is_known(found: dict[str, Any]) -> None:
    assert list(found) == KEYS
    assert (found["schema"], found["ok"], found["xamp"]) == (1, True, xamp.__version__)
    empty = {"reason": "", "hint": "", "detail": "", "printed": []}
    findings = [dataclasses.asdict(finding) for finding in list_findings()]
    assert found["torch"] == {"version": torch.__version__, **empty, "findings": findings}
    assert found["chosen"] == {"device": best_of(found), "backend": found["chosen"]["backend"], "reason": ""}
    assert found["environment"] == {}
    assert all(list(row) == FIELDS + ADDED for row in found["backends"])


def test_the_rows_are_what_the_process_itself_would_see(found: dict[str, Any]) -> None:
    own = [json.loads(json.dumps(dataclasses.asdict(row))) for row in xamp.available_backends()]
    assert [{name: row[name] for name in FIELDS} for row in found["backends"]] == own
    assert not any(row["broken"] or row["findings"] for row in found["backends"])
    (cpu,) = [row for row in found["backends"] if row["name"] == "cpu"]
    assert cpu["usable"] is True
    assert cpu["capabilities"]["levels"] == ["O0", "O1", "O2", "O3", "O4", "O5"]
    assert 0 < cpu["seconds"] < 60


def test_the_level_is_that_of_auto(found: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 2, device=found["chosen"]["device"])
    xamp.initialize(model, verbosity=0)
    assert found["recommended"]["level"] == xamp.session(model).policy.level
    assert found["recommended"]["reason"]


def test_one_child_does_it_all_and_the_asking_process_imports_nothing(asked: subprocess.CompletedProcess[str]) -> None:
    code, children, heavy = asked.stderr.split(maxsplit=2)
    assert (code, children, heavy.strip()) == ("0", "1", "[]")


# --- as text


def test_the_text_shows_every_backend_with_devices_or_cause_and_cure(found: dict[str, Any]) -> None:
    text = words(render(found))
    assert f"torch {torch.__version__}" in text
    for each in found["backends"]:
        if each["usable"]:
            assert f"{each['name']} usable for" in text
            assert words("; ".join(each["devices"])) in text
        else:
            assert f"{each['name']} not usable for" in text
            # A build of torch for a GPU says more where there is no driver.
            error = f" error {words(each['detail'])}" if each["detail"] else ""
            assert f"cause {each['reason']}{error} cure {words(each['hint'])}" in text
    assert f"chosen device {found['chosen']['device']} backend {found['chosen']['backend']}" in text
    assert f"level {found['recommended']['level']}: {words(found['recommended']['reason'])}" in text
    assert "no XAMP_ variable is set" in text
    assert "result fine" in text
    without = words(render({**found, "recommended": None}))
    assert "level none runs there; the findings of the backend say why" in without


def test_the_text_ends_with_the_report(found: dict[str, Any]) -> None:
    assert render(found).endswith("\nto paste into a bug report\n\n" + report(found))


def test_what_is_not_tested_says_so(found: dict[str, Any]) -> None:
    marked = {line.split()[0] for line in render(found).splitlines() if line.endswith("not tested by its project")}
    assert marked == {"xpu", "mps"}


def test_long_reasons_are_wrapped_into_their_column(found: dict[str, Any]) -> None:
    lines = render(changed(found, backends=[row("zz", reason="a reason that goes on " * 20)])).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("  zz"))
    assert lines[start] == "  zz  not usable  for ?; from plugin 1.0"
    assert lines[start + 1].startswith("      cause     a reason")
    assert lines[start + 2].startswith(" " * 16)
    assert lines[start + 2][16] != " "
    assert max(map(len, lines[start : start + 5])) <= 110


def test_a_known_cause_is_shown_with_the_error_behind_it(found: dict[str, Any]) -> None:
    known = row("zz", reason="no card", hint="put one in", detail="OSError: slot 7", printed=["one", "two"])
    text = render(changed(found, backends=[known]))
    assert (
        "      cause     no card\n      error     OSError: slot 7\n      cure      put one in\n"
        "      printed   one\n                two\n"
    ) in text
    assert "zz from plugin 1.0: not usable, no card [OSError: slot 7]\n  | one\n  | two\n" in report(
        changed(found, backends=[known])
    )


def test_findings_of_one_cure_say_it_once(found: dict[str, Any]) -> None:
    findings = [{"severity": "defect", "text": f"lie {number}", "cure": "mend it"} for number in (1, 2)]
    usable = row("zz", usable=True, capabilities=found["backends"][-1]["capabilities"], findings=findings)
    text = render(changed(found, backends=[usable], ok=False))
    assert "      defect    lie 1\n      defect    lie 2\n      cure      mend it\n" in text
    assert "\nresult\n  found     zz (from plugin 1.0): lie 1, and 1 more\n" in text


@pytest.mark.parametrize(
    ("fp8", "rehearsed", "said"),
    [
        ((), (), "none"),
        (("tensorwise", "rowwise"), (), "tensorwise, rowwise"),
        ((), ("mxfp8",), "a rehearsal of mxfp8: the same values, and slower"),
        (("tensorwise",), ("mxfp8",), "tensorwise; a rehearsal of mxfp8: the same values, and slower"),
    ],
)
def test_recipes_of_fp8_are_told_and_which_are_a_rehearsal(
    found: dict[str, Any], fp8: tuple[str, ...], rehearsed: tuple[str, ...], said: str
) -> None:
    capabilities = {**found["backends"][-1]["capabilities"], "fp8": fp8, "fp8_rehearsed": rehearsed}
    text = render(changed(found, backends=[row("zz", usable=True, capabilities=capabilities)], ok=True))
    assert re.search(rf"^ +fp8 +{said}$", text, re.MULTILINE)


def test_one_pass_is_told_of_a_device_in_one_line(found: dict[str, Any]) -> None:
    capabilities = found["backends"][-1]["capabilities"]
    line = "no (Triton is not installed)"
    usable = row("zz", usable=True, capabilities=capabilities, one_pass=line)
    text = render(changed(found, backends=[usable], ok=True))
    assert f"      one pass  {line}\n" in text
    assert "\nresult\n  fine" in text
    assert "one pass" not in render(found)  # of the host


def test_a_terminal_that_cannot_show_a_name_does_not_stop_it(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usable = row("zz", usable=True, capabilities=found["backends"][-1]["capabilities"], devices=["\u6607\u817e"])
    monkeypatch.setattr(doctor, "examine", lambda limit: changed(found, backends=[usable]))
    plain = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(plain, encoding="ascii"))
    assert main(["doctor"]) == 0
    sys.stdout.flush()
    assert rb"devices   \u6607\u817e" in plain.getvalue()


# --- variables


def test_what_is_set_is_shown_and_obeyed(tmp_path: Path) -> None:
    variables = {
        "XAMP_DEVICE": "cpu",
        "XAMP_BACKEND": "cpu",
        "ASCEND_RT_VISIBLE_DEVICES": "0,1",
        "CUDA_VISIBLE_DEVICES": "",
        "ZE_AFFINITY_MASK": "0",
        "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
        "UNRELATED": "1",
    }
    found = doctor_finds(folder=tmp_path, code=0, **variables)
    assert found["chosen"] == {"device": "cpu", "backend": "cpu", "reason": ""}
    assert found["environment"] == {name: variables[name] for name in sorted(variables) if name != "UNRELATED"}
    assert "  XAMP_BACKEND=cpu\n  XAMP_DEVICE=cpu" in render(found)
    assert "\nASCEND_RT_VISIBLE_DEVICES=0,1\nCUDA_VISIBLE_DEVICES=\n" in report(found)
    # two of them change the arithmetic of the CPU: both are warnings, with the way back
    text = words(render(found))
    assert "warning torch.get_float32_matmul_precision() = 'high': float32 products may be computed with fewer" in text
    assert 'to set it back: torch.set_float32_matmul_precision("highest")' in text
    assert "warning ONEDNN_DEFAULT_FPMATH_MODE (environment) = BF16: oneDNN may compute float32 in" in text
    assert "to set it back: unset ONEDNN_DEFAULT_FPMATH_MODE" in text


def test_a_variable_that_asks_for_the_impossible_is_a_finding(tmp_path: Path) -> None:
    found = doctor_finds(folder=tmp_path, code=1, XAMP_DEVICE="gpu")
    assert (found["ok"], found["chosen"]["device"], found["recommended"]) == (False, None, None)
    assert found["chosen"]["reason"].startswith("XAMP_DEVICE=gpu")
    assert "none      XAMP_DEVICE=gpu" in render(found)
    assert "\nresult\n  found     XAMP_DEVICE=gpu" in render(found)
    assert row_of(found, "cpu")["usable"] is True


@pytest.mark.parametrize(("name", "value"), [("XAMP_DEVICE", "cpu cpu"), ("XAMP_BACKEND", "nope")])
def test_no_device_is_chosen_against_a_variable(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XAMP_DEVICE", raising=False)
    monkeypatch.setenv(name, value)
    choice = _choose(torch)
    assert (choice["chosen"]["device"], choice["recommended"]) == (None, None)
    assert choice["chosen"]["reason"].startswith(f"{name}=")


def test_no_usable_backend_is_a_finding(found: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    none = Examined(found["torch"], [row("cpu", reason="out of order")], found["chosen"], None)
    monkeypatch.setattr(doctor, "examine_machine", lambda limit, say: none)
    assert doctor.examine()["ok"] is False
    assert "\nresult\n  no backend is usable\n" in render(doctor.examine())


# --- precision settings


def test_notes_come_after_warnings_and_what_all_backends_share_is_said_once(found: dict[str, Any]) -> None:
    def setting(name: str, severity: str) -> dict[str, object]:
        row = {"name": name, "value": "1", "effect": "changes it", "undo": "unset it", "severity": severity}
        return {**row, "exact": name == "W"}

    rows = [
        row("a", settings=[setting("N", "note"), setting("W", "warning")]),
        row("b", settings=[setting("W", "warning")]),
    ]
    text = render(changed(found, backends=rows))
    assert (
        "\nprecision\n"
        "  warning   W = 1: changes it\n            to set it back: unset it\n"
        "  note      N = 1: changes it\n            to set it back: unset it\n"
    ) in text
    assert "nothing is set that changes what a level computes" in render(found)


# --- the report


def test_the_report_alone_is_one_fenced_block(
    found: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda limit: found)
    assert main(["doctor", "--report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1], lines.count("```")) == ("```", "```", 2)
    assert f"torch {torch.__version__}" in lines
    assert any(line.startswith("cpu: usable, ") for line in lines)
    assert any(line.startswith("chosen: ") and ", level O" in line for line in lines)


def test_the_report_names_no_user_and_no_folder_of_this_machine(found: dict[str, Any]) -> None:
    secrets = [
        "/home/jane.doe/project/plugin.py",
        "/Users/jane/x",
        "C:\\Users\\jane\\x",
        str(Path.home() / "mine"),
        str(Path.cwd() / "here.py"),
        f"{sys.prefix}/lib/site.py",
    ]
    block = report(
        changed(found, backends=[row("zz", reason=" ".join(secrets))], environment={"TORCH_HOME": "/home/jane/t"})
    )
    assert "~/project/plugin.py ~/x ~\\x ~/mine <here>/here.py <python>/lib/site.py" in block
    assert "TORCH_HOME=~/t" in block
    assert "jane" not in block
    assert sys.executable not in report(found)
