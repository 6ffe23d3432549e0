"""Between the doctor and its children: what is made of how they end, which is told here rather than waited for.

Covers: xamp.doctor.children, xamp.doctor.machine, xamp.doctor.known.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from site_packages import distribution, plain_environment

from xamp.contract import BackendReport, BackendSpec
from xamp.doctor import children, machine
from xamp.doctor.children import Outcome, Printed, _exit_text, _Reader
from xamp.doctor.known import Known
from xamp.doctor.machine import Examined, examine_machine
from xamp.registry.plugins import EntryPoint
from xamp.registry.registry import BUILT_INS

# --- what a child prints


@pytest.mark.parametrize("size", [1, 3, 7, 1 << 16])
def test_output_is_told_apart_by_step_however_it_is_cut(size: int) -> None:
    mark = b"\x1e0123456789"
    sent = b"before" + mark + b"first\n" + mark + mark + b"third" * 4000

    class Cut(io.BytesIO):
        def read(self, most: int | None = -1, /) -> bytes:
            return super().read(size)

    reader = _Reader(Cut(sent), mark)
    reader.run()
    assert [part.size for part in reader.parts] == [6, 6, 0, 20000]
    assert [part.tail[-5:] for part in reader.parts] == [b"efore", b"irst\n", b"", b"third"]
    assert len(reader.parts[-1].tail) == 8192


def lines(*text: str) -> list[str]:
    printed = Printed()
    printed.add("\n".join(text).encode())
    return printed.lines


def test_the_last_lines_are_kept_each_once_and_cut() -> None:
    assert lines(*(f"line {number}" for number in range(20))) == [f"line {number}" for number in range(14, 20)]
    assert lines("a", "a", "", "a", "b" * 500) == ["a", "b" * 120]


def test_of_a_dumped_traceback_the_head_is_kept_with_the_line_before() -> None:
    dumped = ["old", "card 7", "Fatal Python error: Aborted", "", "Current thread 0x1 (most recent call first):"]
    frames = [
        '  File "<frozen importlib._bootstrap>", line 1 in x',
        *(f'  File "p.py", line {n} in f' for n in range(9)),
    ]
    assert lines(*dumped, *frames, "Extension modules: a, b") == [
        "card 7",
        "Fatal Python error: Aborted",
        "Current thread 0x1 (most recent call first):",
        *(f'  File "p.py", line {n} in f' for n in range(3)),
    ]


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (3, "ends its process with exit code 3"),
        (0, "ends its process with exit code 0"),
        (0xC0000005, "ends its process with exit code 0xc0000005"),
        (-9, "ends its process by SIGKILL (killed)"),
        (-250, "ends its process with exit code -250"),
    ],
)
def test_how_a_process_ended_in_words(code: int, how: str) -> None:
    assert _exit_text(code) == how


def test_a_python_that_cannot_be_started_is_an_ending_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    outcome = children.run_child({}, 1.0)
    assert (outcome.kind, outcome.open_step) == ("crash", None)
    assert outcome.how.startswith("cannot be started: ")


# --- what is made of it

A, B = EntryPoint("a", "p_a:SPEC", "dist-a 1"), EntryPoint("b", "p_b:SPEC", "dist-b 1")
CHOSEN = {"chosen": {"device": "cpu", "backend": "cpu", "reason": ""}, "recommended": None}
TORCH = {"at": ["torch", ""], "version": "2.13", "reason": "", "hint": "", "detail": ""}
Behaviour = Callable[[list[str], list[str]], tuple[str, tuple[str, str]] | None]


def told(monkeypatch: pytest.MonkeyPatch, ending: Behaviour, *points: EntryPoint) -> tuple[Examined, list[Any]]:
    """Examine with children that do all they are asked for, until the step that ``ending`` names.

    Args:
        monkeypatch: of the test.
        ending: from the names of the entry points and the backends of a child to None or (kind, step).
        points: the entry points there are.
    """
    plans: list[Any] = []

    def run_child(plan: Mapping[str, Any], limit: float, variables: Any = None) -> Outcome:
        plans.append(plan)
        names = [name for name, *_ in plan["points"]]
        all_names = [*(spec.name for spec in BUILT_INS), *names]
        starts = [name for name in all_names if plan["starts"] is None or name in plan["starts"]]
        records: list[dict[str, Any]] = [TORCH] if plan["torch"] else []
        for name, _, source in plan["points"]:
            spec = {"name": name, "device_types": ["cpu"], "target": "a:B", "priority": -1}
            records.append({"at": ["load", f"{name} ({source})"], "spec": spec, "seconds": 0.0})
        for name in starts:
            row = vars(BackendReport(name, ("cpu",), usable=True, capabilities=None, source="x"))
            records.append({"at": ["start", name], "row": row, "broken": False, "findings": [], "seconds": 0.0})
            records.append({"at": ["finished", name]})
        if plan["choose"]:
            records.append({"at": ["choose", ""], **CHOSEN})
        end = ending(names, [*starts, *(["choose"] if plan["choose"] else [])])
        if end is None:
            return Outcome(records, "", "finished", None, {})
        kind, step = end
        before = ("finished", step[1]) if step[0] == "settings" else step
        reached = next(n for n, record in enumerate(records) if tuple(record["at"]) == before)
        return Outcome(records[:reached], kind, "ends badly", step, {step: Printed(4, b"last")})

    monkeypatch.setattr(machine, "run_child", run_child)
    monkeypatch.setattr(machine, "list_entry_points", lambda group: list(points))
    return examine_machine(), plans


def named(found: Examined, name: str) -> dict[str, Any]:
    (row,) = [row for row in found.rows if row["name"] == name]
    return row


def test_where_nothing_ends_early_there_is_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plans = told(monkeypatch, lambda points, starts: None, A, B)
    assert len(plans) == 1
    assert found.chosen == CHOSEN["chosen"]
    assert [row["usable"] for row in found.rows] == [True] * (len(BUILT_INS) + 2)


def test_a_choice_that_ends_its_process_is_made_among_what_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    found, plans = told(
        monkeypatch, lambda points, starts: ("crash", ("choose", "")) if points and "choose" in starts else None, A
    )
    assert [len(plan["points"]) for plan in plans] == [1, 0]
    assert found.chosen == CHOSEN["chosen"]


def test_a_choice_that_ends_every_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = told(monkeypatch, lambda points, starts: ("crash", ("choose", "")) if "choose" in starts else None, A)
    assert found.chosen["reason"] == "choosing a device ends badly; set XAMP_DEVICE to a device type that is usable"
    assert found.recommended is None
    assert named(found, "a")["usable"] is True


def test_backends_that_only_break_together_stay_usable_with_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(points: list[str], starts: list[str]) -> tuple[str, tuple[str, str]] | None:
        return ("crash", ("settings", "cpu")) if len(points) == 2 and "cpu" in starts else None

    found, plans = told(monkeypatch, ending, A, B)
    cpu = named(found, "cpu")
    assert cpu["usable"] is True
    assert [finding["text"] for finding in cpu["findings"]] == [
        "works by itself, but together with a (dist-a 1), b (dist-b 1) it ends badly"
    ]
    # all; each of the seven backends by itself; the choice that is left
    assert [len(plan["starts"] or ()) for plan in plans] == [0, *[1] * 7, 0]
    assert found.chosen == CHOSEN["chosen"]


def test_what_had_all_its_time_is_not_given_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def ending(points: list[str], starts: list[str]) -> tuple[str, tuple[str, str]] | None:
        return ("timeout", ("load", "a (dist-a 1)")) if "a" in points else None

    found, plans = told(monkeypatch, ending, A, B)
    assert [[name for name, *_ in plan["points"]] for plan in plans] == [["a", "b"], ["b"], ["b"]]
    assert named(found, "a")["reason"] == "its entry point 'p_a:SPEC' ends badly"
    assert named(found, "a")["printed"] == ["last"]
    assert named(found, "b")["usable"] is True


def test_a_child_that_finds_nothing_out_does_not_make_it_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "run_child", lambda *arguments: Outcome([], "", "finished", None, {}))
    monkeypatch.setattr(machine, "list_entry_points", lambda group: [A])
    found = examine_machine()
    assert found.torch["reason"] == "the process that examines it finds nothing out"
    assert found.chosen["reason"] == found.torch["reason"]
    assert not any(row["usable"] for row in found.rows)


def test_a_spec_travels_between_the_processes_unchanged() -> None:
    spec = BackendSpec("x", ("a", "b"), "m:C", priority=3, install_hint="h", masks=("M",), causes="m:T", tested=False)
    spec = dataclasses.replace(spec, ledger="m:f.json", emulations=(("it", "m:run"),))
    known = Known([A])
    known.keep("load", A.key, spec=json.loads(json.dumps(vars(spec))))
    assert [each for key, each in known.specs() if key] == [spec]


# --- ending it


def test_ctrl_c_ends_it_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    for name, first in (("a", "os._exit(1)"), ("b", ""), ("c", "")):
        note = f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}}\\n')"
        body = f"import os, time\n{first}\n{note}\ntime.sleep(1e6)"
        distribution(tmp_path, f"dist-{name}", f"{name} = p_{name}:SPEC", **{f"p_{name}": body})
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    # With a limit that nothing reaches, so that nothing else ends it.
    code = f"{heed}\nfrom xamp.cli import main; raise SystemExit(main(['doctor', '--timeout', '3600']))"
    asking = subprocess.Popen([sys.executable, "-c", code], env=plain_environment(tmp_path), stderr=subprocess.PIPE)
    pids = tmp_path / "pids"
    while asking.poll() is None and (not pids.exists() or len(pids.read_text().split()) < 2):
        time.sleep(0.05)
    asking.send_signal(signal.SIGINT)
    _, said = asking.communicate()
    assert b"Traceback" not in said
    assert asking.returncode == 130
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
