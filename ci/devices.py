"""The devices that xamp is tested on, the releases of torch, and the jobs that are not about one device.

    python ci/devices.py names       every device and job, a line each
    python ci/devices.py devices     every device, and how it is there
    python ci/devices.py pins 2.8.0  what is installed beside that torch: ci/constraints/ci.txt, as far as it fits
    python ci/devices.py script NAME    what a job runs; nothing for a device
    python ci/devices.py matrix      the jobs of the pipeline, as JSON; --github hands them to its later jobs

All of it is read from ci/devices.toml, whose head explains the keys; this needs nothing but Python.

In xamp's own pipeline every row that is ready gets its jobs; so do rows of hardware that XAMP_HARDWARE names. A job for
which there is no runner would wait for a day. A pull request gets no hardware, because anyone's code would run there.
Jobs for the night get theirs where the clock or a person starts the pipeline, and not for a commit. Another project's
pipeline says what it wants, and gets exactly that:

    XAMP_ONLY       names of rows, such as "cpu ascend-910b2 cuda"
    XAMP_TORCH      releases of torch for jobs that are not on hardware; without it the one that CI pins
    XAMP_PYTHON     versions of Python for them; without it the one on which each release is tested
    XAMP_RUNNERS    JSON: the labels of runners by the name of a row, such as {"cuda": ["self-hosted", "gpu"]}
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["DATA", "PINS", "ROOT", "Device", "DevicesError", "Job", "Release", "find", "load", "pins", "plan"]

ROOT = Path(__file__).resolve().parent.parent
DATA, PINS = ROOT / "ci" / "devices.toml", ROOT / "ci" / "constraints" / "ci.txt"
HOW = ("host", "emulated", "third-party", "hardware")


class DevicesError(ValueError):
    """The data file cannot be right, or names no such device. The message says what is wrong and what can be named."""


@dataclasses.dataclass(frozen=True)
class Release:
    """A row ``[[release]]``: a release of torch, and the Python on which it is tested."""

    torch: str
    python: str
    usual: bool = False
    pins: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Device:
    """A row ``[[device]]``. The head of the data file says what each key means."""

    name: str
    title: str
    how: str
    runner: Sequence[str]
    torch: Sequence[str]
    require: Sequence[str]
    needs: str
    note: str
    device: str = ""
    emulate: str = ""
    count: int = 1
    packages: Sequence[str] = ()
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
    runner: Sequence[str]
    run: str
    torch: str = ""
    index: str = ""
    nightly: bool = False


class Data(NamedTuple):
    """All rows, each in the order of the file."""

    releases: list[Release]
    devices: list[Device]
    jobs: list[Job]

    @property
    def named(self) -> list[Device | Job]:
        """All rows that have a name: the devices, then the jobs."""
        return [*self.devices, *self.jobs]

    @property
    def usual(self) -> Release:
        """The release on which each commit is tested."""
        return next(release for release in self.releases if release.usual)

    @property
    def whole(self) -> list[Release]:
        """The releases on which all tests run, from the oldest: those of the devices that are any machine itself."""
        named = {torch for row in self.devices if row.how == "host" for torch in row.torch}
        return [release for release in self.releases if release.torch in named]

    def python_of(self, torch: str) -> str:
        """The Python on which a release is tested; of a release that is not, the Python of the usual one."""
        return next((each.python for each in self.releases if each.torch == torch), self.usual.python)


def load(path: Path | str = DATA) -> Data:
    """All rows of the data file. Raises DevicesError where it cannot be right."""
    try:
        found = _toml().loads(Path(path).read_text(encoding="utf-8"))
        rows: list[Any] = [
            [kind(**row) for row in found.pop(kind.__name__.lower(), ())] for kind in (Release, Device, Job)
        ]
        data = Data(*rows)
        wrong = [f"{', '.join(found)} is no table of it"] if found else list(_wrong(data))
    except (OSError, ValueError, TypeError) as error:  # a key that is missing, or none: the message names it
        wrong = [str(error)]
    if wrong:
        raise DevicesError(f"{Path(path).name}: {'; '.join(wrong)}")
    return data


def _toml() -> Any:
    """Python's reader of TOML; before 3.11 the same one from the environment, or the copy in pip."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise DevicesError("nothing here reads TOML: take Python 3.11 or newer, or pip install tomli")


def _wrong(data: Data) -> Iterator[str]:
    """What cannot be right."""
    known, names = [release.torch for release in data.releases], [row.name for row in data.named]
    if not data.devices or [release.usual for release in data.releases].count(True) != 1:
        yield "there must be a [[device]], and one [[release]] with usual = true"
    for row in data.named:
        if names.count(row.name) > 1 or not re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*", row.name):
            yield f"name = {row.name!r}: each row has one of its own, of small letters, digits, - and ."
        for torch in [row.torch] if isinstance(row.torch, str) else row.torch:
            if torch and torch not in known:
                yield f"{row.name}: torch = {torch!r}: it must be one that has a row [[release]]"
        if not row.runner or isinstance(row.runner, str):
            yield f"{row.name}: runner must be a list of labels"
    for device in data.devices:
        if device.how not in HOW:
            yield f"{device.name}: how is one of {', '.join(HOW)}"


def find(name: str, path: Path | str = DATA) -> Device | Job:
    """The device or job of that name. Raises DevicesError, which lists them, where there is none."""
    rows = {row.name: row for row in load(path).named}
    if name not in rows:
        raise DevicesError(f"{name!r} is no device or job of {Path(path).name}: there are {', '.join(rows)}")
    return rows[name]


def pins(torch: str, path: Path | str = DATA, constraints: Path = PINS) -> str:
    """The constraints for pip beside a release of torch: those of CI, with that torch and what its row has instead."""
    instead = [pin for release in load(path).releases if release.torch == torch for pin in release.pins]
    changed = {pin.partition("==")[0]: pin for pin in (f"torch=={torch}", *instead)}
    lines = constraints.read_text(encoding="utf-8").splitlines()
    if f"torch=={torch}" not in lines:
        changed.setdefault("triton", "")  # each release of torch names the one that fits it
    kept = [line for line in lines if re.split(r"[=<>;\s]", line)[0] not in changed]
    return "\n".join([*filter(None, changed.values()), *kept]) + "\n"


def plan(path: Path | str, variables: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The pipeline's jobs: ``devices``, one for each device and release, and ``jobs`` that are not about one device."""
    data = load(path)
    rows = {row.name: row for row in data.devices}
    known = [row.name for row in data.devices if row.how == "hardware"]
    event = variables.get("GITHUB_EVENT_NAME", "")
    only, hardware = _words(variables, "XAMP_ONLY", rows), _words(variables, "XAMP_HARDWARE", known)
    if only:
        runners = _runners(variables, rows)
        torchs = _words(variables, "XAMP_TORCH") or [data.usual.torch]
        pythons = _words(variables, "XAMP_PYTHON")
        pairs = [(python, torch) for torch in torchs for python in pythons or [data.python_of(torch)]]
        chosen = [dataclasses.replace(rows[each], runner=runners.get(each, rows[each].runner)) for each in only]
        made = [_job(row, *pair) for row in chosen for pair in (pairs if row.how != "hardware" else [("", "")])]
        return {"devices": made, "jobs": []}
    there = [row for row in data.devices if row.how != "hardware"]
    if not event.startswith("pull_request"):
        there += [row for row in data.devices if row.how == "hardware" and (row.ready or row.name in hardware)]
    made = [_job(row, data.python_of(torch) if torch else "", torch) for row in there for torch in row.torch or [""]]
    by_commit = event not in ("", "schedule", "workflow_dispatch")
    jobs = [_job(row, data.python_of(row.torch)) for row in data.jobs if not (row.nightly and by_commit)]
    return {"devices": made, "jobs": jobs}


def _words(variables: Mapping[str, str], name: str, known: Sequence[str] | Mapping[str, Device] = ()) -> list[str]:
    """The words of a variable, with spaces or commas between them, each once; of ``known``, if that is given."""
    found = list(dict.fromkeys(re.findall(r"[^\s,]+", variables.get(name, ""))))
    for word in found if known else ():
        if word not in known:
            raise DevicesError(f"{name} names {word!r}: there are {', '.join(known)}")
    return found


def _runners(variables: Mapping[str, str], known: Mapping[str, Device]) -> dict[str, list[str]]:
    given = variables.get("XAMP_RUNNERS", "").strip() or "{}"
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(given)
        if all(each in known and labels and isinstance(labels, list) for each, labels in found.items()):
            return dict(found)
    raise DevicesError(f'XAMP_RUNNERS={given}: it must be JSON, labels by name of a row: {{"cuda": ["gpu"]}}')


def _job(row: Device | Job, python: str, torch: str = "") -> dict[str, Any]:
    versions = [f"{name} {version}" for name, version in (("Python", python), ("torch", torch)) if version]
    return {
        "name": row.name,
        "title": ", ".join([row.name, *versions]) if isinstance(row, Device) else row.name,
        "runner": list(row.runner),
        "python": python,
        "torch": torch,
        "index": row.index,
        "result": "-".join(filter(None, (row.name, python, torch))),
    }


def _matrix(path: str, *, github: bool) -> str:
    """The jobs as JSON; with ``github`` they are also written to the file that GITHUB_OUTPUT names."""
    found = plan(path, os.environ)
    if github and not os.environ.get("GITHUB_OUTPUT"):
        raise DevicesError("--github is for a step of GitHub Actions, where GITHUB_OUTPUT names a file")
    if github:
        with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
            file.writelines(f"{name}={json.dumps(rows)}\n" for name, rows in found.items())
    return json.dumps(found, indent=2)


def _line(row: Device | Job) -> str:
    return f"{row.name:14} {row.title}" + (f" ({row.how})" if isinstance(row, Device) and row.how != "host" else "")


def main(words: Sequence[str]) -> int:
    """Runs a command; returns the exit status: 2 where the data, a name or the call is wrong."""
    path = os.environ.get("XAMP_DEVICES", str(DATA))
    try:
        match words:
            case ["names"]:
                print(*map(_line, load(path).named), sep="\n")
            case ["devices"]:
                print(*(f"{row.name} {row.how}" for row in load(path).devices), sep="\n")
            case ["pins", torch]:
                print(pins(torch, path), end="")
            case ["script", name]:
                print(getattr(find(name, path), "run", ""))
            case ["matrix", *options] if options in ([], ["--github"]):
                print(_matrix(path, github=bool(options)))
            case _:
                raise DevicesError((__doc__ or "").partition("\n\n")[2].partition("\n\n")[0])
    except DevicesError as error:
        print(f"ci/devices.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
