"""The output of ``xamp doctor``: its findings as text for a person, and as a block for a bug report."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xamp.registry.findings import DEFECT

__all__ = ["render", "report"]

_WIDTH = 110
_LABEL = 10
_FENCE = "```"
_OVERFLOW = {
    "inf": "gives inf or nan",
    "flag": "saturates and raises a flag: no inf or nan shows",
}
_HOMES = re.compile(r"(?:/home|/Users|[A-Za-z]:\\Users)[/\\][^/\\\s'\"]+")

Findings = dict[str, Any]


def render(findings: Findings) -> str:
    """Format what :func:`xamp.cli.doctor.examine` found as text for a person. The text ends with the report."""
    sections = (_machine, _backends, _choice, _precision, _environment, _verdict)
    lines = [line for section in sections for line in section(findings)]
    return "\n".join([*lines, "", "to paste into a bug report", "", report(findings)])


def report(findings: Findings) -> str:
    """Format what a bug report needs, as a fenced block. It has no name of the user and no paths of this machine."""
    return "\n".join([_FENCE, *(_anonymous(line) for line in _report_lines(findings)), _FENCE])


def _machine(findings: Findings) -> Iterator[str]:
    torch = findings["torch"]
    yield from _field("xamp", findings["xamp"])
    yield from _field("Python", findings["python"])
    yield from _field("platform", findings["platform"])
    yield from _field("torch", torch["version"] or torch["reason"])
    if not torch["version"]:
        yield from _labelled(0, ("error", torch["detail"]), ("cure", torch["hint"]))
        yield from _printed(torch["printed"], 0)
    yield from _findings(torch["findings"], 0)
    if findings["apex"]:
        yield from _field("apex", _apex(findings["apex"]))


def _apex(found: dict[str, Any]) -> str:
    return f"{found['version']}: {found['says']}".removeprefix(": ")


def _backends(findings: Findings) -> Iterator[str]:
    yield "\nbackends (highest priority first)"
    width = max((len(row["name"]) for row in findings["backends"]), default=0)
    reason = findings["torch"]["reason"]
    for row in findings["backends"]:
        yield from _backend(row, width, same_cause=bool(reason) and row["reason"] == reason)


def _backend(row: dict[str, Any], width: int, same_cause: bool) -> Iterator[str]:
    types = ", ".join(row["device_types"]) or "?"
    tested = "" if row["tested"] else ", not tested by its project"
    yield f"  {row['name']:<{width}}  {_state(row):<10}  for {types}; from {row['source']}{tested}"
    indent = width + 4
    if row["usable"]:
        capabilities = row["capabilities"]
        yield from _field("devices", "; ".join(row["devices"]) or "none", indent)
        yield from _field("versions", ", ".join(f"{name} {value}" for name, value in row["versions"].items()), indent)
        yield from _field("levels", ", ".join(capabilities["levels"]), indent)
        yield from _field("fast in", ", ".join(capabilities["fast_dtypes"]) or "float32 only", indent)
        yield from _field("fp8", _fp8(capabilities), indent)
        yield from _field("overflow", _OVERFLOW.get(capabilities["overflow"], capabilities["overflow"]), indent)
        if row["one_pass"]:
            yield from _field("one pass", row["one_pass"], indent)
    elif same_cause:
        yield from _field("cause", "as for torch, above", indent)
    else:
        yield from _field("cause", row["reason"], indent)
        yield from _labelled(indent, ("error", row["detail"]), ("cure", row["hint"]))
    yield from _findings(row["findings"], indent)
    if not same_cause:
        yield from _printed(row["printed"], indent)


def _fp8(capabilities: dict[str, Any]) -> str:
    """Which recipes the hardware runs, and that the others are a rehearsal."""
    runs, rehearsed = ", ".join(capabilities["fp8"]), ", ".join(capabilities["fp8_rehearsed"])
    said = [runs, f"a rehearsal of {rehearsed}: the same values, and slower" if rehearsed else ""]
    return "; ".join(filter(None, said)) or "none"


def _findings(found: list[dict[str, str]], indent: int) -> Iterator[str]:
    """One cure after all that it is for."""
    for cure, findings in itertools.groupby(found, key=lambda finding: finding["cure"]):
        for finding in findings:
            yield from _field(finding["severity"], finding["text"], indent)
        yield from _labelled(indent, ("cure", cure))


def _state(row: dict[str, Any]) -> str:
    if row["usable"]:
        return "usable"
    return "broken" if row["broken"] else "not usable"


def _choice(findings: Findings) -> Iterator[str]:
    chosen, recommended = findings["chosen"], findings["recommended"]
    yield "\nchosen"
    if not chosen["device"]:
        yield from _field("none", chosen["reason"], 2)
        return
    yield from _field("device", chosen["device"], 2)
    yield from _field("backend", chosen["backend"], 2)
    if recommended is None:
        yield from _field("level", "none runs there; the findings of the backend say why", 2)
    else:
        yield from _field("level", f"{recommended['level']}: {recommended['reason']}", 2)
        for level, when in recommended["alternatives"]:
            yield from _field("", f"or {level}: {when}", 2)
        yield from _labelled(2, ("shapes", recommended["shapes"]))


def _precision(findings: Findings) -> Iterator[str]:
    yield "\nprecision"
    settings = list(_settings(findings))
    for severity, name, value, effect, undo in settings:
        yield from _field(severity, f"{name} = {value}: {effect}", 2)
        yield from _field("", f"to set it back: {undo}", 2)
    if any(setting["exact"] for row in findings["backends"] for setting in row["settings"]):
        yield "  xamp.exact_fp32() in a program sets back what takes digits from float32"
    if not settings:
        yield "  nothing is set that changes what a level computes"


def _settings(findings: Findings) -> Iterable[tuple[str, str, str, str, str]]:
    """The settings of all backends, warnings first. A setting that several backends report appears once."""
    fields = ("severity", "name", "value", "effect", "undo")
    found = {tuple(setting[field] for field in fields) for row in findings["backends"] for setting in row["settings"]}
    return sorted(found, reverse=True)


def _environment(findings: Findings) -> Iterator[str]:
    yield "\nenvironment"
    for name, value in findings["environment"].items():
        yield f"  {name}={value}"
    if not any(name.startswith("XAMP_") for name in findings["environment"]):
        yield "  no XAMP_ variable is set"


def _verdict(findings: Findings) -> Iterator[str]:
    yield "\nresult"
    problems = list(_problems(findings))
    for problem in problems:
        yield from _field("found", problem, 2)
    if not problems:
        yield "  fine" if findings["ok"] else "  no backend is usable"


def _problems(findings: Findings) -> Iterator[str]:
    """One line for each thing that makes the exit code 1."""
    reason = findings["torch"]["reason"]
    if reason:
        yield reason
    for row in findings["backends"]:
        name = f"{row['name']} (from {row['source']})"
        if row["broken"] and row["reason"] != reason:
            yield f"{name}: {row['reason']}"
        defects = [finding["text"] for finding in row["findings"] if finding["severity"] == DEFECT]
        if defects:
            yield f"{name}: {defects[0]}" + (f", and {len(defects) - 1} more" if defects[1:] else "")
    if findings["chosen"]["reason"] and findings["chosen"]["reason"] != reason:
        yield findings["chosen"]["reason"].splitlines()[0]


def _report_lines(findings: Findings) -> Iterator[str]:
    torch, chosen, recommended = findings["torch"], findings["chosen"], findings["recommended"]
    yield f"xamp {findings['xamp']}, Python {findings['python'].partition(',')[0].replace('(', '').strip()}"
    yield findings["platform"]
    yield f"torch {torch['version']}" if torch["version"] else torch["reason"] + _bracketed(torch["detail"])
    yield from (f"  | {line}" for line in torch["printed"])
    yield from (f"  {finding['severity']}: {finding['text']}" for finding in torch["findings"])
    if findings["apex"]:
        yield f"apex {_apex(findings['apex'])}"
    for row in findings["backends"]:
        yield from _report_row(row, torch["reason"])
    level = f", level {recommended['level']}" if recommended else ""
    yield f"chosen: {chosen['device']} ({chosen['backend']}){level}" if chosen["device"] else "chosen: none"
    for severity, name, value, _, _ in _settings(findings):
        yield f"{severity}: {name} = {value}"
    yield from (f"{name}={value}" for name, value in findings["environment"].items())
    if chosen["reason"] != torch["reason"]:
        yield from chosen["reason"].splitlines()


def _report_row(row: dict[str, Any], torch_reason: str) -> Iterator[str]:
    source = "" if row["source"] == "xamp" else f" from {row['source']}"
    if row["usable"]:
        versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
        yield f"{row['name']}{source}: usable, {'; '.join(row['devices'])} ({versions})"
    elif row["reason"] != torch_reason:
        yield f"{row['name']}{source}: {_state(row)}, {row['reason']}{_bracketed(row['detail'])}"
    yield from (f"  {finding['severity']}: {finding['text']}" for finding in row["findings"])
    yield from (f"  | {line}" for line in row["printed"])


def _bracketed(detail: str) -> str:
    return f" [{detail}]" if detail else ""


def _anonymous(line: str) -> str:
    """``line`` without the folders of this machine's user and environment."""
    for folder, stands_for in ((sys.prefix, "<python>"), (str(Path.cwd()), "<here>"), (_home(), "~")):
        if len(folder) > 1:
            line = line.replace(folder, stands_for)
    return _HOMES.sub("~", line)


def _home() -> str:
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _printed(lines: list[str], indent: int) -> Iterator[str]:
    """The lines that a process printed before it ended, unchanged."""
    for number, line in enumerate(lines):
        yield " " * indent + f"{'' if number else 'printed':<{_LABEL}}{line}"


def _labelled(indent: int, *fields: tuple[str, str]) -> Iterator[str]:
    """Those of ``fields`` (pairs of label and text) whose text is not empty."""
    for label, text in fields:
        if text:
            yield from _field(label, text, indent)


def _field(label: str, text: str, indent: int = 0) -> Iterator[str]:
    """``label``, then ``text`` wrapped into a column of its own."""
    start = " " * indent + f"{label:<{_LABEL}}"
    for paragraph in text.splitlines() or [""]:
        yield from textwrap.wrap(
            paragraph,
            width=_WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_long_words=False,
            break_on_hyphens=False,
        ) or [start.rstrip()]
        start = " " * len(start)
