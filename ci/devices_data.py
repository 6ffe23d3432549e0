"""The rows of ci/devices.toml: releases of torch, devices on which xamp is tested, and jobs not about one device.

A row that cannot be right is a :class:`RowError`, which names the row, the key and the choices. This module needs
nothing but Python: a pipeline reads the data before anything is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "DATA",
    "HOW",
    "ROOT",
    "Data",
    "Device",
    "DevicesError",
    "Job",
    "Release",
    "RowError",
    "load",
]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "ci" / "devices.toml"
HOW = ("host", "emulated", "third-party", "hardware")
BUILDS = ("cuda", "hip")
_NAME = re.compile(r"[a-z0-9]+([-.][a-z0-9]+)*")
_RELEASE = re.compile(r"\d+\.\d+\.\d+")
_PYTHON = re.compile(r"\d+\.\d+")
_WORD = re.compile(r"[\w.-]+")

_PIN = re.compile(r"[\w.-]+==[\w.]+")
_MADE = {"made": True}
"""Of a field that no row of the file has: it follows from others."""

Row = TypeVar("Row", "Release", "Device", "Job")


class DevicesError(ValueError):
    """The data file cannot be read, or names no such device. The message says what is wrong and what can be named."""


class RowError(DevicesError):
    """A row of the data file cannot be right. The message names the row, the key, and what may stand there."""


@dataclasses.dataclass(frozen=True)
class Release:
    """A row ``[[release]]``: a release of torch, and the Python on which it is tested."""

    torch: str
    python: str
    usual: bool = False
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"torch {self.torch}"


@dataclasses.dataclass(frozen=True)
class Device:
    """A row ``[[device]]``. The head of the data file says what each key means.

    ``python`` is that of each release in ``torch``, in the same order.
    """

    name: str
    title: str
    how: str
    runner: tuple[str, ...]
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
    python: tuple[str, ...] = dataclasses.field(default=(), metadata=_MADE)

    @property
    def type(self) -> str:
        """What ``xamp conformance --device`` takes."""
        return self.device or self.name


@dataclasses.dataclass(frozen=True)
class Job:
    """A row ``[[job]]``. The head of the data file says what each key means. ``python`` is that of its release."""

    name: str
    title: str
    runner: tuple[str, ...]
    run: str
    torch: str = ""
    index: str = ""
    nightly: bool = False
    python: str = dataclasses.field(default="", metadata=_MADE)


@dataclasses.dataclass(frozen=True)
class Data:
    """All rows, each in the order of the file."""

    releases: tuple[Release, ...]
    devices: tuple[Device, ...]
    jobs: tuple[Job, ...]

    @property
    def usual(self) -> Release:
        """The release on which each commit is tested."""
        return next(release for release in self.releases if release.usual)

    @property
    def whole(self) -> tuple[Release, ...]:
        """The releases on which all tests run, from the oldest: those of the devices that are any machine itself."""
        named = {torch for row in self.devices if row.how == "host" for torch in row.torch}
        return tuple(release for release in self.releases if release.torch in named)

    def python_of(self, torch: str) -> str:
        """The Python on which a release is tested; of a release that is not, the Python of the usual one."""
        found = (release.python for release in self.releases if release.torch == torch)
        return next(found, self.usual.python)


def load(path: Path | str = DATA) -> Data:
    """All rows of the data file.

    Raises:
        DevicesError: the file cannot be read.
        RowError: a row cannot be right.
    """
    found = _parsed(Path(path))
    releases, devices, jobs = _all(Release, found), _all(Device, found), _all(Job, found)
    _check_releases(releases)
    if not devices:
        raise DevicesError(f"{Path(path).name} has no row [[device]]")
    for device in devices:
        _check_device(device)
    for job in jobs:
        _check_job(job)
    _check_names([*devices, *jobs])
    return _joined(Data(releases, devices, jobs))


def _parsed(path: Path) -> Mapping[str, Any]:
    try:
        found: dict[str, Any] = _toml().loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DevicesError(f"{path.name}: {error.strerror or error}") from error
    except ValueError as error:
        raise DevicesError(f"{path.name} is no TOML: {error}") from error
    tables = ("release", "device", "job")
    if unknown := set(found) - set(tables):
        there = ", ".join(f"[[{table}]]" for table in tables)
        raise DevicesError(f"{path.name}: [[{min(unknown)}]] is no table of it; there are {there}")
    return found


def _joined(data: Data) -> Data:
    """The rows with the Python of each release that they name.

    Raises:
        RowError: a row names a release that is none.
    """
    known = ", ".join(release.torch for release in data.releases)
    named: list[tuple[Device | Job, str]] = [(row, torch) for row in data.devices for torch in row.torch]
    for row, torch in [*named, *((job, job.torch) for job in data.jobs if job.torch)]:
        there = any(torch == release.torch for release in data.releases)
        _check(there, row, "torch", torch, f"a release that has a row [[release]]: {known}")
    devices = [
        dataclasses.replace(row, python=tuple(data.python_of(torch) for torch in row.torch)) for row in data.devices
    ]
    jobs = [dataclasses.replace(row, python=data.python_of(row.torch)) for row in data.jobs]
    return dataclasses.replace(data, devices=tuple(devices), jobs=tuple(jobs))


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


def _all(kind: type[Row], found: Mapping[str, Any]) -> tuple[Row, ...]:
    """The rows of one table."""
    rows = _rows(found, kind.__name__.lower())
    return tuple(_row(kind, row, place) for place, row in enumerate(rows, 1))


def _row(kind: type[Row], row: Mapping[str, Any], place: int) -> Row:
    """One row, with its keys and their types checked."""
    where = f"[[{kind.__name__.lower()}]] {row.get('name') or f'number {place}'}"
    fields = {field.name: field for field in dataclasses.fields(kind) if not field.metadata.get("made")}
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


def _check_releases(rows: Sequence[Release]) -> None:
    for row in rows:
        _check(_RELEASE.fullmatch(row.torch), row, "torch", row.torch, "a release, such as 2.13.0")
        _check(_PYTHON.fullmatch(row.python), row, "python", row.python, "a version, such as 3.11")
        for pin in row.pins:
            _check(_PIN.fullmatch(pin), row, "pins", pin, "pins, such as setuptools==81.0.0")
    numbers = [tuple(map(int, row.torch.split("."))) for row in rows]
    if numbers != sorted(set(numbers)):
        raise RowError(f"[[release]]: {', '.join(row.torch for row in rows)}: each once, from the oldest to the newest")
    if (usual := sum(row.usual for row in rows)) != 1:
        raise RowError(f"[[release]]: {usual} of {len(rows)} rows have usual = true; the one that CI installs must")


def _check_names(rows: Sequence[Device | Job]) -> None:
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise RowError(f"name = {name!r}: {names.count(name)} rows have this name; give each one of its own")


def _check_device(row: Device) -> None:
    _check_place(row.name, row.title, row.runner, row.index)
    _check(row.how in HOW, row, "how", row.how, f"one of {', '.join(HOW)}")
    if row.how != "hardware":
        _check(row.torch, row, "torch", [], "releases: only a job on hardware takes what the machine has")
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
    _check(re.match(r"ci/[\w.-]+\.sh\b", row.run), row, "run", row.run, "a script in ci/, with its words")


def _check_place(name: str, title: str, runner: Sequence[str], index: str) -> None:
    for key, right, what in (
        ("name", _NAME.fullmatch(name), "small letters, digits, - and ."),
        ("title", title, "a text"),
        ("runner", runner and all(map(_WORD.fullmatch, runner)), "labels of a runner"),
        ("index", not index or index.startswith("https://"), "an address that begins with https://"),
    ):
        if not right:
            value = {"name": name, "title": title, "runner": list(runner), "index": index}[key]
            raise RowError(f"row {name}: {key} = {value!r}: {what} must stand there")


def _check(right: object, row: Release | Device | Job, key: str, value: object, what: str) -> None:
    if not right:
        raise RowError(f"row {row.name}: {key} = {value!r}: it must be {what}")
