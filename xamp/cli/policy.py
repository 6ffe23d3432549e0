"""Show in which dtype each operator runs on a device and which list decides that, or compare two devices.

The device need not be present: every torch has the autocast lists of all devices, and fake tensors of an absent device
pass through them. In place of a device you may name a file that show --json wrote, on another machine or with another
torch. Exit codes: 0 fine, 1 differences that are not expected, 2 wrong use: an unknown device, a broken file.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import pkgutil
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xamp
from xamp.cli._policy_diff import compare
from xamp.cli._policy_file import SCHEMA, WHAT, Saved, read
from xamp.cli._policy_text import WIDTH, render_diff, render_show
from xamp.errors import BackendUnavailable, PolicyError
from xamp.registry.causes import one_line
from xamp.registry.registry import REGISTRY, require_torch

__all__ = ["add_arguments", "run", "show"]

_POLICIES = ("portable", "native")
_DTYPES = ("float16", "bfloat16")
_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``xamp policy show`` and ``xamp policy diff``."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    about = "one row for each operator of the table, on one device"
    one = actions.add_parser("show", help=about, description=about)
    one.add_argument("device", metavar="DEV", help="a device type, such as cuda, or a file that show --json wrote")
    about = "what differs between two devices; exit code 1 where a difference is not expected"
    two = actions.add_parser("diff", help=about, description=about)
    two.add_argument("a", metavar="A", help="as DEV of show")
    two.add_argument("b", metavar="B", help="as DEV of show")
    for each in (one, two):
        each.add_argument("--op-policy", choices=_POLICIES, help="default: as in a file given, else portable")
        each.add_argument("--dtype", choices=_DTYPES, help="the lower dtype; default: as in a file given, else float16")
        each.add_argument("--json", action="store_true", help="print one JSON object, for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Print the rows or the differences. Return 0 where all is fine, 1 for unexpected differences, 2 for wrong use."""
    try:
        if args.action == "show":
            (found,) = _sides([args.device], args)
            code, text = 0, json.dumps(found, indent=1) if args.json else render_show(found, _width())
        else:
            found = compare(*_sides([args.a, args.b], args))
            code, text = (
                int(not found["equal"]),
                json.dumps(found, indent=1) if args.json else render_diff(found, _width()),
            )
    except (PolicyError, BackendUnavailable) as error:
        print(f"xamp policy {args.action}: {error}", file=sys.stderr)
        return 2
    _print(text)
    return code


def show(device_type: str, op_policy: str = "portable", dtype: str = "float16") -> Saved:
    """Find out all that ``xamp policy show`` shows about a device, as plain values ready for JSON.

    Returns:
        The object that :mod:`xamp.cli._policy_file` describes and reads back from a file.

    Raises:
        PolicyError: no backend serves such a device.
        BackendUnavailable: torch, or the module of the device's backend, cannot be imported.
    """
    torch, op_rules = _torch(), _op_rules(device_type)
    from xamp.op_dtypes.survey import survey

    try:
        torch.device(device_type)
    except RuntimeError:  # a module that the backend imports may add the type: start the backend
        with contextlib.suppress(BackendUnavailable):
            REGISTRY.best_for(device_type)

    try:
        found = survey(device_type, op_rules, getattr(torch, dtype), op_policy)
    except RuntimeError as error:
        raise BackendUnavailable(
            f"torch {torch.__version__} cannot tell about {device_type!r}: {one_line(error)}\nrun `xamp policy show "
            f"{device_type} --json > {device_type}.json` where it can, and pass that file{_emulated(device_type)}"
        ) from error
    return {
        "what": WHAT,
        "schema": SCHEMA,
        "torch": str(torch.__version__),
        "xamp": xamp.__version__,
        "device": device_type,
        "present": found.present,
        "op_policy": op_policy,
        "dtype": dtype,
        "rows": [dict(vars(row)) for row in found.rows],
        "device_only": list(found.device_only),
    }


def _emulated(device_type: str) -> str:
    """How to ask an emulation of the device, if a backend has one; empty otherwise."""
    names = [name for spec in REGISTRY.specs() if device_type in spec.device_types for name, _ in spec.emulations]
    return f"; or ask an emulated one: xamp emulate {names[0]} -- xamp policy show {device_type}" if names else ""


def _sides(names: list[str], args: argparse.Namespace) -> list[Saved]:
    """The surveys to show or compare: files as they are; devices under the op policy and the dtype of the files."""
    devices = _devices()
    files = {name: read(name) for name in names if name not in devices and _is_file(name, devices)}
    settings = [_setting(option, files, vars(args)[option], default) for option, default in _DEFAULTS.items()]
    return [files[name] if name in files else show(name, *settings) for name in names]


_DEFAULTS = {"op_policy": _POLICIES[0], "dtype": _DTYPES[0]}


def _is_file(name: str, devices: list[str]) -> bool:
    """Return True where ``name`` is a file; raise a PolicyError where it is none."""
    if Path(name).is_file():
        return True
    close = difflib.get_close_matches(name, devices, n=1, cutoff=0.7)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    raise PolicyError(
        f"{name!r} is neither a device nor a file.{guess} Devices are {', '.join(devices)}; any other argument is the "
        "path of a file that `xamp policy show DEV --json` wrote."
    )


def _setting(option: str, files: Mapping[str, Saved], asked: str | None, default: str) -> str:
    """The value of an option: the one on the command line, else that of the files. All of them must agree."""
    found: dict[str, str] = {} if asked is None else {f"--{option.replace('_', '-')}": asked}
    found |= {name: saved[option] for name, saved in files.items()}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {value}" for name, value in found.items())
        raise PolicyError(f"{option.replace('_', ' ')}: {told}. Compare what was written with the same one.")
    return next(iter(found.values()), default)


def _op_rules(device_type: str) -> Mapping[str, str]:
    """``op_rules`` of the backend of a device, read from its class: neither the backend nor the device is started."""
    failures = []
    for spec in REGISTRY.specs():
        if device_type not in spec.device_types:
            continue
        try:
            rules: Mapping[str, str] = pkgutil.resolve_name(spec.target).op_rules
            return rules
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # third-party code, which may even raise SystemExit
            failures.append(f"backend {spec.name!r} cannot be imported: {one_line(error)}\n{spec.install_hint}".strip())
    if failures:
        raise BackendUnavailable("\n".join(failures))
    raise PolicyError(f"no backend serves {device_type!r}; devices are {', '.join(_devices())}")


def _devices() -> list[str]:
    """The device types that a registered backend serves, usable here or not."""
    return sorted({kind for spec in REGISTRY.specs() for kind in spec.device_types})


def _torch() -> Any:
    """Import torch so that its C++ code does not warn of deprecated operators: the table has some."""
    quiet = "torch" not in sys.modules and _LOG_LEVEL not in os.environ
    if quiet:
        os.environ[_LOG_LEVEL] = "ERROR"  # read once, on import
    try:
        return require_torch("xamp policy")
    finally:
        if quiet:
            del os.environ[_LOG_LEVEL]


def _width() -> int:
    """Columns for the text: those of the terminal; where the output is no terminal, as many as the text needs."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # names of files may not fit a terminal's encoding
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe: it has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
