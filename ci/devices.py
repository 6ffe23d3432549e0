"""The devices that xamp is tested on, the releases of torch, and the jobs that are not about one device.

    python ci/devices.py names       every device and job, a line each
    python ci/devices.py releases    the releases of torch on which all tests run, each with its Python
    python ci/devices.py pins 2.8.0  what is installed beside that torch: ci/constraints/ci.txt, as far as it fits
    python ci/devices.py script      what a job runs
    python ci/devices.py matrix      the jobs of the pipeline, as JSON; --github hands them to its later jobs
    python ci/devices.py pages       writes the support tables and the badge; --check fails where they are old

All of it is read from ci/devices.toml, whose head explains the keys.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci.devices_data import DATA, HOW, ROOT, Data, Device, DevicesError, Job, Release, RowError, load

__all__ = [
    "DATA",
    "HOW",
    "PINS",
    "ROOT",
    "Data",
    "Device",
    "DevicesError",
    "Job",
    "Release",
    "RowError",
    "find",
    "load",
    "pins",
    "read",
    "read_jobs",
]

PINS = ROOT / "ci" / "constraints" / "ci.txt"


def read(path: Path | str = DATA) -> tuple[Device, ...]:
    """The devices, in the order of the file. Raises as :func:`load` does."""
    return load(path).devices


def read_jobs(path: Path | str = DATA) -> tuple[Job, ...]:
    """The jobs that are not about one device, in the order of the file. Raises as :func:`load` does."""
    return load(path).jobs


def every(path: Path | str = DATA) -> list[Device | Job]:
    """All rows that have a name: the devices, then the jobs."""
    data = load(path)
    return [*data.devices, *data.jobs]


def find(name: str, path: Path | str = DATA) -> Device | Job:
    """The device or job of that name.

    Raises:
        DevicesError: there is none; the message lists them.
    """
    rows = {row.name: row for row in every(path)}
    if name not in rows:
        raise DevicesError(f"{name!r} is no device or job of {Path(path).name}: there are {', '.join(rows)}")
    return rows[name]


def pins(torch: str, path: Path | str = DATA, constraints: Path = PINS) -> str:
    """The constraints for pip beside a release of torch: those of CI, with that torch and what its row has instead.

    Args:
        torch: the release; it need not have a row.
        path: the data file.
        constraints: the file of CI's.
    """
    instead = [pin for release in load(path).releases if release.torch == torch for pin in release.pins]
    changed = {pin.partition("==")[0]: pin for pin in (f"torch=={torch}", *instead)}
    lines = constraints.read_text(encoding="utf-8").splitlines()
    if f"torch=={torch}" not in lines:
        changed.setdefault("triton", "")  # each release of torch names the one that fits it
    kept = [line for line in lines if re.split(r"[=<>;\s]", line)[0] not in changed]
    return "\n".join([*filter(None, changed.values()), *kept]) + "\n"


def _names(path: Path) -> str:
    """A line for each device and job: its name and title."""
    return "\n".join(f"{row.name:14} {row.title}{_how(row)}" for row in every(path))


def _how(row: Device | Job) -> str:
    return f" ({row.how})" if isinstance(row, Device) and row.how != "host" else ""


def _script(name: str, path: Path) -> str:
    """What a job runs; nothing for a device."""
    row = find(name, path)
    return row.run if isinstance(row, Job) else ""


def _module(name: str) -> Any:
    """A module beside this one, which is imported only where it is used."""
    return importlib.import_module(f"ci.{name}")


def main(words: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 1 where a page is old, 2 where the data or a name is wrong."""
    args = _parsed(words)
    try:
        if args.command == "pages":
            return int(_module("devices_page").main(args.data, args.check))
        makers: dict[str, Callable[[], str]] = {
            "names": lambda: _names(args.data),
            "devices": lambda: "\n".join(f"{row.name} {row.how}" for row in read(args.data)),
            "releases": lambda: "\n".join(f"{row.torch} {row.python}" for row in load(args.data).whole),
            "pins": lambda: pins(args.torch, args.data).rstrip(),
            "matrix": lambda: str(_module("devices_matrix").text(args.data, args.github)),
            "script": lambda: _script(args.name, args.data),
        }
        print(makers[args.command]())
    except DevicesError as error:
        print(f"ci/devices.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/devices.py", description="The devices that xamp is tested on.")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("XAMP_DEVICES", DATA)), metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("names", help="every device and job")
    commands.add_parser("devices", help="every device, and how it is there")
    commands.add_parser("releases", help="every release of torch on which all tests run, and its Python")
    commands.add_parser("pins", help="constraints for pip beside a release of torch").add_argument("torch")
    commands.add_parser("script", help="what a job runs; nothing for a device").add_argument("name")
    commands.add_parser("matrix", help="the pipeline's jobs").add_argument("--github", action="store_true")
    pages = commands.add_parser("pages", help="write the support tables and the badge")
    pages.add_argument("--check", action="store_true", help="write nothing; fail where one is old")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
