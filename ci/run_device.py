"""Runs the conformance suite, or a command, on one device of ci/devices.toml. ci/device.sh calls it in its environment.

The result of the suite, as ``xamp conformance --json`` writes it, goes to ``NAME-pythonX.Y-torchX.Y.Z.json`` in the
folder XAMP_RESULTS. A key ``run`` is added to it: which device, how, when and by whom. It holds no host's name and no
path. With ``--there`` nothing runs: the exit code says whether the device is there.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci.devices import find
from ci.devices_data import DATA, ROOT, Device, DevicesError

_PIP = "-m pip install --quiet --no-deps --no-build-isolation --no-index --no-compile --disable-pip-version-check"
_THERE = """
import sys
from xamp.errors import XampError
from xamp.registry.registry import resolve
try:
    resolve("auto", sys.argv[1])
except XampError as error:
    sys.exit(f"xamp: {error}")
"""
BY = ("project", "contributor")


class NotThere(DevicesError):
    """The device is not there, or not as its row has it. The message says what is missing."""


def versions() -> tuple[str, str]:
    """Of Python, and of torch without the name of its build."""
    return "{}.{}".format(*sys.version_info[:2]), importlib.metadata.version("torch").partition("+")[0]


def check_versions(wanted: str) -> None:
    """Insists on the version of torch that was asked for, if one was.

    Raises:
        NotThere: there is another one.
    """
    found = versions()[1]
    if wanted and found != wanted:
        raise NotThere(
            f"XAMP_TORCH={wanted}: this environment has torch {found}, which was there before and is kept. Take an"
            " environment without torch, or leave XAMP_TORCH away."
        )


def check_build(row: Device) -> None:
    """Insists on the build of torch that the row needs, if it needs one.

    Raises:
        NotThere: torch is built for something else.
    """
    if not row.build:
        return
    import torch

    builds = {"cuda": ("CUDA", torch.version.cuda), "hip": ("ROCm", torch.version.hip)}
    name, version = builds[row.build]
    if not version:
        there = next((name for name, version in builds.values() if version), "the CPU alone")
        raise NotThere(
            f"{row.name} is not there: torch {torch.__version__} is built for {there}, not for {name}.\n"
            f"It needs: {row.needs}."
        )


def check_there(row: Device, environment: Mapping[str, str]) -> None:
    """Insists that the backend of the device can be used.

    Raises:
        NotThere: it cannot.
    """
    check_build(row)
    words = in_device(row, ["-c", _THERE, row.type])
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NotThere(f"{row.name} is not there: {reason[0]}\nIt needs: {row.needs}.")


def in_device(row: Device, words: Sequence[str]) -> list[str]:
    """The command that runs Python with ``words`` where the device is."""
    return [*emulated(row), sys.executable, *words]


def emulated(row: Device) -> list[str]:
    """What stands before a command, so that the device is emulated; nothing for other devices."""
    if not row.emulate:
        return []
    return [sys.executable, "-m", "xamp", "emulate", row.emulate, "--devices", str(row.count), "--"]


def suite(row: Device, result: Path, words: Sequence[str]) -> list[str]:
    """The command that runs the conformance suite."""
    require = [f"--require={','.join(row.require)}"] if row.require else []
    return in_device(row, ["-m", "xamp", "conformance", "--device", row.type, *require, "--json", str(result), *words])


def surroundings(row: Device, site: Path) -> dict[str, str]:
    """The variables of the command: this checkout on the path, and before it what brings a third party's device."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    for package in row.packages:
        install(ROOT / package, site)
    if row.packages:
        folders.insert(0, str(site))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def install(package: Path, site: Path) -> None:
    """Installs a package of this checkout into ``site``, from a copy, because building leaves files behind.

    Raises:
        NotThere: pip fails.
    """
    import shutil

    source = site.parent / "source" / package.name
    shutil.copytree(package, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [sys.executable, *_PIP.split(), "--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotThere(f"pip cannot install {package.relative_to(ROOT)}:\n{done.stderr.strip()}")


def stamped(found: Mapping[str, Any], row: Device, by: str, when: datetime.datetime) -> dict[str, Any]:
    """A result with the key ``run``."""
    about = {"device": row.name, "how": row.how, "when": when.strftime("%Y-%m-%dT%H:%MZ"), "by": by}
    return {**found, "run": about}


def run_suite(row: Device, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> int:
    """Runs the suite and, where the row says so, the tests; returns the exit code."""
    by = os.environ.get("XAMP_BY", BY[1])
    if by not in BY:
        raise DevicesError(f"XAMP_BY={by!r}: it must be one of {', '.join(BY)}")
    check_build(row)
    folder.mkdir(parents=True, exist_ok=True)
    result = folder / "{}-python{}-torch{}.json".format(row.name, *versions())
    result.unlink(missing_ok=True)  # what an earlier run left says nothing of this one
    started = datetime.datetime.now(datetime.timezone.utc)
    code = subprocess.run(suite(row, result, words), env=environment, check=False).returncode
    if not result.is_file():
        raise NotThere(f"{row.name}: the suite did not run, see above. It needs: {row.needs}.")
    found = stamped(json.loads(result.read_text(encoding="utf-8")), row, by, started)
    result.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"== {result.name} is written", flush=True)
    if row.tests and not words:
        tests = in_device(row, ["-m", "pytest", "-m", "device", "--require", row.type, "--device", row.type])
        code = subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode or code
    return code


def run_command(row: Device, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command where the device is, and is the one that xamp takes; returns its exit code."""
    check_there(row, environment)
    folder = str(Path(sys.executable).parent)
    found = {**environment, "XAMP_DEVICE": row.type, "PATH": os.pathsep.join([folder, environment.get("PATH", "")])}
    return subprocess.run([*emulated(row), *words], env=found, check=False).returncode


def main(words: Sequence[str]) -> int:
    """Runs what is asked for; returns the exit code: 3 where the device is not there, 2 where the call is wrong."""
    try:
        name, *rest = words
        row = find(name, os.environ.get("XAMP_DEVICES", DATA))
        if not isinstance(row, Device):
            raise DevicesError(f"{name} is a job, which runs {row.run}")
        check_versions(os.environ.get("XAMP_TORCH", ""))
        with tempfile.TemporaryDirectory() as work:
            environment = surroundings(row, Path(work) / "site")
            if rest == ["--there"]:
                check_there(row, environment)
                return 0
            if rest[:1] == ["--"]:
                if not rest[1:]:
                    raise DevicesError(f"no command stands after --: ci/device.sh {name} -- python train.py")
                return run_command(row, rest[1:], environment)
            return run_suite(row, rest, environment, Path(os.environ.get("XAMP_RESULTS", "results")).absolute())
    except DevicesError as error:
        print(f"ci/device.sh: {error}", file=sys.stderr)
        return 3 if isinstance(error, NotThere) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
