"""Reads ci/devices.toml: the devices that xamp is tested on, and the jobs that are not about one device.

    python ci/devices.py names     every device and job, a line each
    python ci/devices.py script    what a job runs
    python ci/devices.py matrix    the jobs of the pipeline, as JSON; --github hands them to its later jobs
    python ci/devices.py pages     writes the support tables and the badge; --check fails where they are old

A row that cannot be right is a :class:`RowError`, which names the row, the key and the choices.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "DATA",
    "HOW",
    "ROOT",
    "Device",
    "DevicesError",
    "Job",
    "RowError",
    "find",
    "read",
    "read_jobs",
]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "ci" / "devices.toml"
HOW = ("host", "emulated", "third-party", "hardware")
BUILDS = ("cuda", "hip")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
_WORD = re.compile(r"[\w.-]+")

Row = TypeVar("Row", "Device", "Job")


class DevicesError(ValueError):
    """The data file cannot be read, or names no such device. The message says what is wrong and what can be named."""


class RowError(DevicesError):
    """A row of the data file cannot be right. The message names the row, the key, and what may stand there."""


@dataclasses.dataclass(frozen=True)
class Device:
    """A row ``[[device]]``. The head of the data file says what each key means."""

    name: str
    title: str
    how: str
    runner: tuple[str, ...]
    python: tuple[str, ...]
    torch: tuple[str, ...]
    require: tuple[str, ...]
    needs: str
    note: str
    device: str = ""
    emulate: str = ""
    count: int = 1
    packages: tuple[str, ...] = ()
    ready: bool = True
    build: str = ""
    tests: bool = False
    index: str = ""

    @property
    def type(self) -> str:
        """What ``xamp conformance --device`` takes."""
        return self.device or self.name


@dataclasses.dataclass(frozen=True)
class Job:
    """A row ``[[job]]``. The head of the data file says what each key means."""

    name: str
    title: str
    runner: tuple[str, ...]
    python: str
    run: str
    index: str = ""
    nightly: bool = False


def read(path: Path | str = DATA) -> tuple[Device, ...]:
    """The devices, in the order of the file.

    Raises:
        DevicesError: the file cannot be read.
        RowError: a row cannot be right.
    """
    return _read(Path(path))[0]


def read_jobs(path: Path | str = DATA) -> tuple[Job, ...]:
    """The jobs that are not about one device, in the order of the file.

    Raises:
        DevicesError: the file cannot be read.
        RowError: a row cannot be right.
    """
    return _read(Path(path))[1]


def _read(path: Path) -> tuple[tuple[Device, ...], tuple[Job, ...]]:
    try:
        found = _toml().loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DevicesError(f"{path.name}: {error.strerror or error}") from error
    except ValueError as error:
        raise DevicesError(f"{path.name} is no TOML: {error}") from error
    unknown = set(found) - {"device", "job"}
    if unknown:
        raise DevicesError(f"{path.name}: [[{min(unknown)}]] is no table of it; there are [[device]] and [[job]]")
    devices = tuple(_row(Device, row, place) for place, row in enumerate(_rows(found, "device"), 1))
    jobs = tuple(_row(Job, row, place) for place, row in enumerate(_rows(found, "job"), 1))
    if not devices:
        raise DevicesError(f"{path.name} has no row [[device]]")
    for device in devices:
        _check_device(device)
    for job in jobs:
        _check_job(job)
    names = [row.name for row in devices] + [row.name for row in jobs]
    for name in names:
        if names.count(name) > 1:
            raise RowError(f"name = {name!r}: {names.count(name)} rows have this name; give each one of its own")
    return devices, jobs


def _toml() -> Any:
    """Python's reader of TOML; before 3.11 the same one from the environment, or the copy in pip."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise DevicesError("nothing here reads TOML: take Python 3.11 or newer, or pip install tomli")


def _rows(found: Mapping[str, Any], table: str) -> list[Any]:
    rows = found.get(table, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RowError(f"[{table}]: rows are written [[{table}]], with two brackets")
    return rows


def _row(kind: type[Row], row: Mapping[str, Any], place: int) -> Row:
    """One row, with its keys and their types checked."""
    where = f"[[{kind.__name__.lower()}]] {row.get('name') or f'number {place}'}"
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in row:
        if key not in fields:
            raise RowError(f"{where}: {key} is no key of it; there are {', '.join(fields)}")
    values = {}
    for name, field in fields.items():
        if name in row:
            values[name] = _value(f"{where}: {name} = {row[name]!r}", row[name], str(field.type))
        elif field.default is dataclasses.MISSING:
            raise RowError(f"{where}: {name} is missing")
    return kind(**values)


def _value(what: str, value: Any, kind: str) -> Any:
    """``value`` as its field has it; what stands in a table's cell or a script's word is one line of plain text."""
    if kind == "tuple[str, ...]":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise RowError(f"{what}: a list of texts is needed")
        return tuple(_value(what, each, "str") for each in value)
    if type(value).__name__ != kind:
        raise RowError(f"{what}: {'a text' if kind == 'str' else kind} is needed")
    if kind == "str" and (value != value.strip() or re.search(r"[|<>`\x00-\x1f]", value)):
        raise RowError(f"{what}: no line break, |, <, > or ` may be in it, and no space around it")
    return value


def _check_device(row: Device) -> None:
    _check_place(row.name, row.title, row.runner, row.index)
    _check(row.how in HOW, row, "how", row.how, f"one of {', '.join(HOW)}")
    for key, version in [("python", each) for each in row.python] + [("torch", each) for each in row.torch]:
        _check(_VERSION.fullmatch(version), row, key, version, "versions, such as 3.11 or 2.13.0")
    if row.how != "hardware":
        _check(row.python, row, "python", [], "a version: only a job on hardware takes what the machine has")
        _check(row.torch, row, "torch", [], "a version: only a job on hardware takes what the machine has")
    for name in row.require:
        _check(_WORD.fullmatch(name), row, "require", name, "names, as xamp conformance --require has them")
    _check(bool(row.emulate) == (row.how == "emulated"), row, "emulate", row.emulate, 'given where how is "emulated"')
    brought = bool(row.packages) == (row.how == "third-party")
    _check(brought, row, "packages", list(row.packages), 'given where how is "third-party"')
    _check(row.count >= 1 and (row.count == 1 or row.emulate), row, "count", row.count, "1, or more if emulated")
    _check(row.ready or row.how == "hardware", row, "ready", row.ready, "true: only hardware can be missing")
    _check(row.build in ("", *BUILDS), row, "build", row.build, f"one of {', '.join(BUILDS)}, or left out")


def _check_job(row: Job) -> None:
    _check_place(row.name, row.title, row.runner, row.index)
    _check(_VERSION.fullmatch(row.python), row, "python", row.python, "a version, such as 3.11")
    _check(re.match(r"ci/[\w.-]+\.sh\b", row.run), row, "run", row.run, "a script in ci/, with its words")


def _check_place(name: str, title: str, runner: Sequence[str], index: str) -> None:
    for key, right, what in (
        ("name", _NAME.fullmatch(name), "small letters, digits and -"),
        ("title", title, "a text"),
        ("runner", runner and all(map(_WORD.fullmatch, runner)), "labels of a runner"),
        ("index", not index or index.startswith("https://"), "an address that begins with https://"),
    ):
        if not right:
            value = {"name": name, "title": title, "runner": list(runner), "index": index}[key]
            raise RowError(f"row {name}: {key} = {value!r}: {what} must stand there")


def _check(right: object, row: Device | Job, key: str, value: object, what: str) -> None:
    if not right:
        raise RowError(f"row {row.name}: {key} = {value!r}: it must be {what}")


def every(path: Path | str = DATA) -> list[Device | Job]:
    """All rows: the devices, then the jobs."""
    devices, jobs = _read(Path(path))
    return [*devices, *jobs]


def find(name: str, path: Path | str = DATA) -> Device | Job:
    """The device or job of that name.

    Raises:
        DevicesError: there is none; the message lists them.
    """
    rows = {row.name: row for row in every(path)}
    if name not in rows:
        raise DevicesError(f"{name!r} is no device or job of {Path(path).name}: there are {', '.join(rows)}")
    return rows[name]


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
    """A module beside this one, which imports this one."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    sys.modules.setdefault("ci.devices", sys.modules[__name__])  # else its errors would be classes of another copy
    return importlib.import_module(f"ci.{name}")


def main(words: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 1 where a page is old, 2 where the data or a name is wrong."""
    parser = argparse.ArgumentParser(prog="ci/devices.py", description="The devices that xamp is tested on.")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("XAMP_DEVICES", DATA)), metavar="FILE")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("names", help="every device and job")
    commands.add_parser("devices", help="every device, and how it is there")
    commands.add_parser("script", help="what a job runs; nothing for a device").add_argument("name")
    commands.add_parser("matrix", help="the pipeline's jobs").add_argument("--github", action="store_true")
    pages = commands.add_parser("pages", help="write the support tables and the badge")
    pages.add_argument("--check", action="store_true", help="write nothing; fail where one is old")
    args = parser.parse_args(words)
    try:
        if args.command == "pages":
            return int(_module("devices_page").main(args.data, args.check))
        makers: dict[str, Callable[[], str]] = {
            "names": lambda: _names(args.data),
            "devices": lambda: "\n".join(f"{row.name} {row.how}" for row in read(args.data)),
            "matrix": lambda: _module("devices_matrix").text(args.data, args.github),
            "script": lambda: _script(args.name, args.data),
        }
        print(makers[args.command]())
    except DevicesError as error:
        print(f"ci/devices.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
