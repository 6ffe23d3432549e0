"""Show in which dtype each operator runs on a device and who sees to that, or what differs between two devices.

A device need not be there: the autocast lists of all devices are in every torch, and fake tensors of an absent device
pass through them. What show --json wrote, on another machine or with another torch, takes a device's place.
Exit codes: 0 fine, 1 differences that are not expected, 2 wrong use: an unknown device, a broken file.
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
    about = "what differs between two devices; exit code 1 where it is not expected to"
    two = actions.add_parser("diff", help=about, description=about)
    two.add_argument("a", metavar="A", help="as DEV of show")
    two.add_argument("b", metavar="B", help="as DEV of show")
    for each in (one, two):
        each.add_argument("--op-policy", choices=_POLICIES, help="default: as in a file given, else portable")
        each.add_argument("--dtype", choices=_DTYPES, help="the lower dtype; default: as in a file given, else float16")
        each.add_argument("--json", action="store_true", help="print one JSON object, for a machine to read")


def run(args: argparse.Namespace) -> int:
    """Print the rows or the differences; 0 fine, 1 differences that are not expected, 2 wrong use."""
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
    """All that ``xamp policy show`` shows of a device, as plain values ready for JSON; a file of them is read back.

    Returns:
        What :mod:`xamp.cli._policy_file` describes.

    Raises:
        PolicyError: no backend serves such a device.
        BackendUnavailable: torch, or the module of the device's backend, cannot be imported.
    """
    torch, op_rules = _torch(), _op_rules(device_type)
    from xamp.casting.ops.survey import survey

    try:
        torch.device(device_type)
    except RuntimeError:  # what the backend imports when it starts may be what adds the type
        with contextlib.suppress(BackendUnavailable):
            REGISTRY.best_for(device_type)

    try:
        found = survey(device_type, op_rules, getattr(torch, dtype), op_policy)
    except RuntimeError as error:
        raise BackendUnavailable(
            f"torch {torch.__version__} cannot tell about {device_type!r}: {one_line(error)}\nrun `xamp policy show "
            f"{device_type} --json > {device_type}.json` where it can, and pass that file"
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


def _sides(names: list[str], args: argparse.Namespace) -> list[Saved]:
    """What was asked for: files as they are, devices under the policy and the dtype of the files."""
    devices = _devices()
    files = {name: read(name) for name in names if name not in devices and _is_file(name, devices)}
    settings = [_setting(option, files, vars(args)[option], default) for option, default in _DEFAULTS.items()]
    return [files[name] if name in files else show(name, *settings) for name in names]


_DEFAULTS = {"op_policy": _POLICIES[0], "dtype": _DTYPES[0]}


def _is_file(name: str, devices: list[str]) -> bool:
    """True; raises PolicyError where there is none of that name."""
    if Path(name).is_file():
        return True
    close = difflib.get_close_matches(name, devices, n=1, cutoff=0.7)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    raise PolicyError(
        f"{name!r} is neither a device nor a file.{guess} Devices are {', '.join(devices)}; any other argument is the "
        "path of a file that `xamp policy show DEV --json` wrote."
    )


def _setting(option: str, files: Mapping[str, Saved], asked: str | None, default: str) -> str:
    """The value of an option: what was asked for, else what the files have, which must not disagree."""
    found: dict[str, str] = {} if asked is None else {f"--{option.replace('_', '-')}": asked}
    found |= {name: saved[option] for name, saved in files.items()}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {value}" for name, value in found.items())
        raise PolicyError(f"{option.replace('_', ' ')}: {told}. Compare what was written with the same one.")
    return next(iter(found.values()), default)


def _op_rules(device_type: str) -> Mapping[str, str]:
    """What the backend of a device says of its own rules, from its class: the device is not asked."""
    failures = []
    for spec in REGISTRY.specs():
        if device_type not in spec.device_types:
            continue
        try:
            rules: Mapping[str, str] = pkgutil.resolve_name(spec.target).op_rules
            return rules
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a third party's code, which may even end the process
            failures.append(f"backend {spec.name!r} cannot be imported: {one_line(error)}\n{spec.install_hint}".strip())
    if failures:
        raise BackendUnavailable("\n".join(failures))
    raise PolicyError(f"no backend serves {device_type!r}; devices are {', '.join(_devices())}")


def _devices() -> list[str]:
    """The device types that a registered backend serves, usable here or not."""
    return sorted({kind for spec in REGISTRY.specs() for kind in spec.device_types})


def _torch() -> Any:
    """torch, whose C++ code must not warn of deprecated operators: some of the table are."""
    quiet = "torch" not in sys.modules and _LOG_LEVEL not in os.environ
    if quiet:
        os.environ[_LOG_LEVEL] = "ERROR"  # read once, on import
    try:
        return require_torch("xamp policy")
    finally:
        if quiet:
            del os.environ[_LOG_LEVEL]


def _width() -> int:
    """Columns for the text: the terminal's, or where it goes elsewhere all that it takes."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"  # names of files may not fit a terminal's encoding
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # such as of head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
