"""Show what xamp finds on this machine and, for each thing that cannot be used, the cause and the cure.

Child processes run all checks, so that a crash or a hang is reported too. Exit code 1 where something is broken: torch
or every backend is unusable, an XAMP_ variable asks for what this machine cannot do, a backend or an entry point fails
in a way that it does not explain, or a backend does not do what it declares. An absent accelerator is no finding.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

import xamp
from xamp.apex._real import find as find_apex
from xamp.cli._doctor_text import render, report
from xamp.doctor.machine import LIMIT, examine_machine
from xamp.errors import UnsupportedPolicy
from xamp.registry.findings import DEFECT
from xamp.registry.registry import BUILT_INS

__all__ = ["add_arguments", "examine", "run"]

SCHEMA = 1
_VARIABLE = re.compile(
    r"XAMP_\w+|(PY)?TORCH_\w+|\w*VISIBLE_DEVICES"
    r"|\w*(TF32|FPMATH_MODE|WORKSPACE_CONFIG|DETERMINISTIC|CPU_ISA|CPU_CAPABILITY|INF_NAN_MODE)\w*"
    r"|\w+_(HOME|OPP)_PATH|TASK_QUEUE_ENABLE|\w+_LAUNCH_BLOCKING"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp doctor``."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object, for a machine to read")
    what = (
        "measure instead how fast linear layers are in fp8 on this device; initialize reads the result, unless widths "
        "are given"
    )
    parser.add_argument("--fp8", type=int, nargs="*", metavar="WIDTH", help=what)
    form.add_argument("--report", action="store_true", help="print only the block to paste into a bug report")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=LIMIT,
        metavar="SECONDS",
        help="how long one step of the examination may take, such as importing torch (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 where all is fine, 1 where something was found."""
    if args.fp8 is not None:
        return _measure_fp8(args)
    findings = examine(args.timeout)
    if args.json:
        print(json.dumps(findings, indent=2))
    else:
        encoding = sys.stdout.encoding or "utf-8"  # names of devices may not fit a terminal's encoding
        text = report(findings) if args.report else render(findings)
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0 if findings["ok"] else 1


def _measure_fp8(args: argparse.Namespace) -> int:
    """Measure fp8 on the device in use, print the table, and keep its widths where the hardware has fp8."""
    from xamp.doctor import fp8_speed  # needs torch, in this process
    from xamp.registry import fp8_widths, registry

    device = xamp.device()
    backend = registry.resolve("auto", device.type)
    can = backend.capabilities(device)
    if not (can.fp8 or can.fp8_rehearsed):
        raise UnsupportedPolicy(
            f"xamp doctor --fp8: {device} has no fp8. Its recipes, and those of others: docs/guides/fp8.md."
        )
    rows = list(fp8_speed.measure(backend, device, _say, args.fp8))
    widths = fp8_speed.gains(rows)
    if args.json:
        found = [row._asdict() for row in rows]
        print(
            json.dumps({"device": str(device), "rehearsal": not can.fp8, "rows": found, "gains_from": widths}, indent=2)
        )
    else:
        print(*fp8_speed.lines(rows, fp8_widths.name_of(device), not can.fp8), sep="\n")
    if can.fp8 and widths and not args.fp8:  # widths by hand say nothing of larger ones
        print(f"kept in {fp8_widths.keep(device, widths)}: initialize chooses layers by it", file=sys.stderr)
    return 0


def examine(limit: float = LIMIT) -> dict[str, Any]:
    """Find out all that the command shows, as plain values ready for JSON. Raises only KeyboardInterrupt.

    Args:
        limit: seconds that one step may take.

    Returns:
        ``schema`` (1), ``ok``, ``xamp``, ``python``, ``platform`` (strings), ``torch`` (``version``, ``reason``,
        ``hint``, ``detail``, ``printed``, ``findings``), ``apex`` (the installed package of that name: ``has_amp``,
        ``version``, ``says``; null where there is none), ``backends`` (the fields of
        :class:`~xamp.contract.BackendReport`, ``broken``, ``findings``, ``settings``, ``one_pass`` (whether steps at
        O2 and O5 are taken in one pass, or why not; empty where that is not asked), ``seconds``, ``printed``),
        ``chosen`` (``device``, ``backend``, ``reason``; null where there is none), ``environment`` (the variables that
        are set and matter here) and ``recommended`` (``level``, ``reason``, ``alternatives``, ``shapes``; null without
        a device, or where it runs no level). While ``schema`` stays the same, keys may be added and are never removed.
    """
    found, apex = examine_machine(limit, _say), find_apex()
    return {
        "schema": SCHEMA,
        "ok": not found.chosen["reason"] and _is_sound(found.rows),
        "xamp": xamp.__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "platform": platform.platform(),
        "torch": found.torch,
        "apex": None if apex is None else apex._asdict(),
        "backends": found.rows,
        "chosen": found.chosen,
        "environment": _environment(os.environ),
        "recommended": found.recommended,
    }


def _is_sound(rows: list[dict[str, Any]]) -> bool:
    defects = [finding for row in rows for finding in row["findings"] if finding["severity"] == DEFECT]
    return any(row["usable"] for row in rows) and not defects and not any(row["broken"] for row in rows)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose or hide devices, configure torch, or change its arithmetic."""
    masks = {mask for spec in BUILT_INS for mask in spec.masks}
    return {name: value for name, value in sorted(variables.items()) if _VARIABLE.fullmatch(name) or name in masks}


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"xamp doctor: {text}", file=sys.stderr)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return value
