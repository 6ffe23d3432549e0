"""Reports: JSON and SARIF for machines, HTML and plain text for people."""

from __future__ import annotations

import difflib
import functools
import html
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from xamp.errors import PolicyError
from xamp.port.explain import about
from xamp.port.files import Outcome
from xamp.port.rule import Finding, Grade
from xamp.port.rules import load
from xamp.values.version import __version__

__all__ = ["ENDINGS", "caret", "counted", "diff", "render"]

ENDINGS = (".json", ".html", ".sarif")
SCHEMA = 1
_LEVELS = {Grade.CERTAIN: "note", Grade.NEUTRAL: "none", Grade.NOTED: "warning", Grade.UNSUPPORTED: "error"}


def counted(files: int) -> str:
    """``"1 file"``, ``"2 files"``."""
    return f"{files} file{'' if files == 1 else 's'}"


def render(path: str, outcomes: Sequence[Outcome]) -> str:
    """The report for a file name: JSON, HTML or SARIF by its ending.

    Raises:
        PolicyError: the ending is another one.
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in ENDINGS:
        raise PolicyError(f"--report {path}: the ending must be one of {', '.join(ENDINGS)}.")
    makers = {".json": _json, ".html": _html, ".sarif": _sarif}
    return makers[ending](outcomes)


_WIDTH = 200  # characters of a line that are shown; a line of a notebook or of JSON may have millions


def caret(finding: Finding) -> str:
    """The line of a finding, with marks below the place."""
    first = max(0, finding.column - 1 - _WIDTH // 2) if len(finding.excerpt) > _WIDTH else 0
    shown = finding.excerpt[first : first + _WIDTH]
    before = "".join(each if each == "\t" else " " for each in shown[: finding.column - 1 - first])
    length = min(finding.length, 120, max(1, len(shown) - len(before)))
    return f"    {shown}\n    {before}{'^' * length}"


def diff(outcome: Outcome) -> str:
    """A unified diff of a file, as ``git apply`` and ``patch -p1`` take it; bytes that are no UTF-8 are surrogates."""
    before, after = (
        re.findall(r"[^\n]*\n|[^\n]+", each.decode("utf-8", "surrogateescape"))
        for each in (outcome.before, outcome.after)
    )
    lines = difflib.unified_diff(before, after, _named("a", outcome.path), _named("b", outcome.path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _named(side: str, path: str) -> str:
    """A path in the head of a diff: seen from the working folder, and quoted as git quotes names."""
    inside = os.path.relpath(path)
    if os.path.isabs(inside) or inside.split(os.sep)[0] == os.pardir:
        inside = os.path.abspath(path).lstrip(os.sep)
    name = f"{side}/{inside}".replace(os.sep, "/")
    quoted = "".join(map(_quoted, os.fsencode(name)))
    if quoted != name:
        return f'"{quoted}"'
    return f"{name}\t" if " " in name else name  # the tab says where a name with spaces ends


def _quoted(byte: int) -> str:
    if byte in b'"\\':
        return f"\\{chr(byte)}"
    return chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}"


def grouped(findings: Iterable[Finding]) -> list[tuple[Finding, list[int]]]:
    """Findings with a note: one for each text, with the lines where it holds."""
    found: dict[tuple[str, str], tuple[Finding, list[int]]] = {}
    for finding in findings:
        if finding.text:
            found.setdefault((finding.rule, finding.text), (finding, []))[1].append(finding.line)
    return list(found.values())


@functools.cache
def _about(rule: str) -> str:
    """The first line of a rule's docstring: why what it recognises stays."""
    return next((about(each).partition("\n")[0] for each in load() if each.name == rule), "")


def _row(finding: Finding) -> dict[str, Any]:
    reason = _about(finding.rule) if finding.grade is Grade.NEUTRAL else ""
    return {
        "rule": finding.rule,
        "grade": finding.grade.value,
        "line": finding.line,
        "column": finding.column,
        "note": finding.text or reason,
        "excerpt": caret(finding),
    }


def _counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    found = list(outcomes)
    return {grade.value: sum(outcome.count(grade) for outcome in found) for grade in Grade}


def _json(outcomes: Sequence[Outcome]) -> str:
    files = [
        {
            "path": _plain(outcome.path),
            "changed": outcome.is_changed,
            "error": outcome.error or None,
            "counts": _counts([outcome]),
            "findings": [_row(finding) for finding in outcome.findings],
            "stays": [_row(finding) for finding in outcome.stays],
        }
        for outcome in outcomes
    ]
    return (
        json.dumps({"schema": SCHEMA, "xamp": __version__, "counts": _counts(outcomes), "files": files}, indent=2)
        + "\n"
    )


def _plain(text: str) -> str:
    """A path that any file can hold, also one whose bytes are no text."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _sarif(outcomes: Sequence[Outcome]) -> str:
    results = []
    for outcome in outcomes:
        place = {"artifactLocation": {"uri": _plain(outcome.path).replace(os.sep, "/")}}
        if outcome.error:
            results.append(_result("unreadable", "error", outcome.error, place))
        for finding in outcome.findings:
            if finding.grade is Grade.NEUTRAL or (finding.grade is Grade.CERTAIN and not outcome.is_changed):
                continue
            region = {"startLine": finding.line, "startColumn": finding.column}
            region["endColumn"] = finding.column + finding.length
            text = finding.text or "can be written for every device by xamp port"
            results.append(_result(finding.rule, _LEVELS[finding.grade], text, {**place, "region": region}))
    names = sorted({result["ruleId"] for result in results})
    driver = {"name": "xamp port", "version": __version__, "rules": [{"id": name} for name in names]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    head = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0"}
    return json.dumps({**head, "runs": [run]}, indent=2) + "\n"


def _result(rule: str, level: str, text: str, place: dict[str, Any]) -> dict[str, Any]:
    return {"ruleId": rule, "level": level, "message": {"text": text}, "locations": [{"physicalLocation": place}]}


_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "pre{background:#f6f6f6;padding:.6em;overflow-x:auto}h2{border-bottom:1px solid #ddd;font-size:1.1em}"
    ".add{color:#116329}.del{color:#a40e26}.unsupported,.error{color:#a40e26}.noted{color:#8a5a00}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre{background:#242424}"
    ".add{color:#7ee787}.del,.unsupported,.error{color:#ff9a93}.noted{color:#e3b341}h2{border-color:#444}}"
)


def _html(outcomes: Sequence[Outcome]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in _counts(outcomes).items())
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>xamp port</title>',
        f"<style>{_STYLE}</style><h1>xamp port</h1><p>{counted(len(outcomes))}: {counts}.</p>",
    ]
    for outcome in outcomes:
        if not (outcome.error or outcome.is_changed or grouped(outcome.findings) or outcome.stays):
            continue
        parts.append(f"<h2>{html.escape(_plain(outcome.path))}</h2>")
        if outcome.error:
            parts.append(f'<p class="error">{html.escape(outcome.error)}</p>')
        for finding, lines in grouped(outcome.findings):
            where = ", ".join(map(str, lines))
            head = f"{finding.grade.value}, line {where}: {finding.text} ({finding.rule})"
            parts.append(
                f'<p class="{finding.grade.value}">{html.escape(head)}</p><pre>{html.escape(caret(finding))}</pre>'
            )
        if outcome.stays:
            lines_of = "".join(f"{each.line}: {html.escape(each.text)}\n" for each in outcome.stays)
            head = f"<summary>{len(outcome.stays)} more name a device and stay</summary>"
            parts.append(f"<details>{head}<pre>{lines_of}</pre></details>")
        if outcome.is_changed:
            text = "".join(map(_coloured, _plain(diff(outcome)).rstrip("\n").split("\n")))
            parts.append(f"<pre>{text}</pre>")
    return "\n".join([*parts, "</html>\n"])


def _coloured(line: str) -> str:
    kind = {"+": "add", "-": "del"}.get(line[:1])
    text = html.escape(line)
    return f'<span class="{kind}">{text}</span>\n' if kind else f"{text}\n"
