"""Show what xamp finds on this machine and, for each thing that cannot be used, the cause and the cure.

Exit code 1 where no training is possible as things stand: torch or every backend is unusable, or an XAMP_ variable asks
for what this machine cannot do. An accelerator that is merely absent is no finding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import xamp
from xamp._registry import available_backends, resolve
from xamp._torch import TorchFailure, find_torch, one_line
from xamp.contract import BackendReport

__all__ = ["add_arguments", "examine", "render", "run"]

SCHEMA = 1
_WIDTH = 110
_LABEL = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Print the findings; 0 fine, 1 found something."""
    # Extensions of torch print while they load; on stdout that would spoil the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        findings = examine()
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        encoding = sys.stdout.encoding or "utf-8"  # names of devices may not fit a terminal's encoding
        print(render(findings).encode(encoding, "backslashreplace").decode(encoding))
    return 0 if findings["ok"] else 1


def examine() -> dict[str, Any]:
    """All that the command shows, as plain values ready for JSON. Raises nothing but KeyboardInterrupt.

    Returns:
        ``schema`` (1), ``ok``, ``xamp``, ``python``, ``platform`` (strings), ``torch`` (``version``, ``reason``,
        ``hint``), ``backends`` (the fields of :class:`~xamp.contract.BackendReport`), ``chosen`` (``device``,
        ``backend``, ``reason``; null where there is none) and ``environment`` (the XAMP_ variables that are set).
    """
    found = find_torch()
    if isinstance(found, TorchFailure):
        torch = {"version": None, "reason": found.reason, "hint": found.hint}
        chosen: dict[str, str | None] = {"device": None, "backend": None, "reason": found.reason}
    else:
        torch = {"version": str(found.__version__), "reason": "", "hint": ""}
        chosen = _choose()
    backends = [_plain(report) for report in available_backends()]
    return {
        "schema": SCHEMA,
        "ok": not chosen["reason"] and any(row["usable"] for row in backends),
        "xamp": xamp.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "platform": platform.platform(),
        "torch": torch,
        "backends": backends,
        "chosen": chosen,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("XAMP_")},
    }


def render(findings: dict[str, Any]) -> str:
    """The text for a person of what :func:`examine` found."""
    return "\n".join(_lines(findings))


def _choose() -> dict[str, str | None]:
    try:
        device = xamp.device()
        return {"device": str(device), "backend": resolve("auto", device.type).name, "reason": ""}
    except Exception as error:
        reason = str(error) if isinstance(error, xamp.XampError) else one_line(error)
        return {"device": None, "backend": None, "reason": reason}


def _plain(report: BackendReport) -> dict[str, Any]:
    row = dataclasses.asdict(report)
    return {**row, "versions": {str(name): str(version) for name, version in report.versions.items()}}


def _lines(findings: dict[str, Any]) -> Iterator[str]:
    torch, chosen = findings["torch"], findings["chosen"]
    yield from _field("xamp", findings["xamp"])
    yield from _field("Python", findings["python"])
    yield from _field("platform", findings["platform"])
    yield from _field("torch", torch["version"] or torch["reason"])
    if torch["hint"]:
        yield from _field("", f"cure: {torch['hint']}")
    yield "\nbackends (highest priority first)"
    width = max((len(row["name"]) for row in findings["backends"]), default=0)
    for row in findings["backends"]:
        yield from _backend_lines(row, width, same_cause=bool(torch["reason"]) and row["reason"] == torch["reason"])
    yield "\nchosen"
    if chosen["device"]:
        yield from _field("device", chosen["device"], indent=2)
        yield from _field("backend", chosen["backend"], indent=2)
    else:
        yield from _field("none", chosen["reason"], indent=2)
    yield "\nenvironment"
    for name, value in findings["environment"].items():
        yield f"  {name}={value}"
    if not findings["environment"]:
        yield "  no XAMP_ variable is set"


def _backend_lines(row: dict[str, Any], width: int, same_cause: bool) -> Iterator[str]:
    state = "usable" if row["usable"] else "not usable"
    types = ", ".join(row["device_types"]) or "?"
    tested = "" if row["tested"] else ", not tested by its project"
    yield f"  {row['name']:<{width}}  {state:<10}  for {types}; from {row['source']}{tested}"
    indent = width + 4
    if row["usable"]:
        capabilities = row["capabilities"]
        yield from _field("devices", "; ".join(row["devices"]) or "none", indent)
        yield from _field("versions", ", ".join(f"{name} {value}" for name, value in row["versions"].items()), indent)
        yield from _field("levels", ", ".join(capabilities["levels"]), indent)
        yield from _field("fast in", ", ".join(capabilities["fast_dtypes"]) or "float32 only", indent)
    else:
        yield from _field("cause", "as for torch, above" if same_cause else row["reason"], indent)
        if row["hint"] and not same_cause:
            yield from _field("cure", row["hint"], indent)


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
