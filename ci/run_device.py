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
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ci.devices import DATA, ROOT, Device, DevicesError, find

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


def check_torch(row: Device, wanted: str) -> None:
    """Insists on the version of torch that was asked for, if one was, and on the build that the row needs."""
    found = importlib.metadata.version("torch").partition("+")[0]
    if wanted and found != wanted:
        raise NotThere(
            f"XAMP_TORCH={wanted}: this environment has torch {found}, which was there before and is kept. Take an"
            " environment without torch, or leave XAMP_TORCH away."
        )
    if row.build:
        from torch import version

        if not getattr(version, row.build):
            raise NotThere(f"{row.name} is not there: torch {version.__version__} is built for something else.")


def check_there(row: Device, environment: Mapping[str, str]) -> None:
    """Insists that the backend of the device can be used."""
    words = [*emulated(row), sys.executable, "-c", _THERE, row.type]
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise NotThere(f"{row.name} is not there: {done.stderr.strip().rpartition(chr(10))[2]}")


def emulated(row: Device) -> list[str]:
    """What stands before a command, so that the device is emulated; nothing for other devices."""
    command = [sys.executable, "-m", "xamp", "emulate", row.emulate, f"--devices={row.count}", "--"]
    return command if row.emulate else []


def surroundings(row: Device, work: Path) -> dict[str, str]:
    """The variables of commands: this checkout on the path, and before it what brings a third party's device.

    That is installed from a copy, because building leaves files behind.
    """
    for package in row.packages:
        source = work / "source" / Path(package).name
        shutil.copytree(ROOT / package, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
        command = [sys.executable, *_PIP.split(), "--target", str(work / "site"), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotThere(f"pip cannot install {package}:\n{done.stderr.strip()}")
    folders = [*([str(work / "site")] if row.packages else []), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run_suite(row: Device, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the suite and, where the row says so, the tests; returns the exit code."""
    by, folder = os.environ.get("XAMP_BY", BY[1]), Path(os.environ.get("XAMP_RESULTS", "results")).absolute()
    if by not in BY:
        raise DevicesError(f"XAMP_BY={by!r}: it must be one of {', '.join(BY)}")
    folder.mkdir(parents=True, exist_ok=True)
    torch, python = importlib.metadata.version("torch").partition("+")[0], "{}.{}".format(*sys.version_info[:2])
    result = folder / f"{row.name}-python{python}-torch{torch}.json"
    result.unlink(missing_ok=True)  # what an earlier run left says nothing of this one
    when = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
    within = [*emulated(row), sys.executable, "-m"]
    require = [f"--require={','.join(row.require)}"] if row.require else []
    suite = [*within, "xamp", "conformance", "--device", row.type, *require, "--json", str(result), *words]
    code = subprocess.run(suite, env=environment, check=False).returncode
    if not result.is_file():
        raise NotThere(f"{row.name}: the suite did not run, see above.")
    about = {"device": row.name, "how": row.how, "when": when, "by": by}
    found = {**json.loads(result.read_text(encoding="utf-8")), "run": about}
    result.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"== {result.name} is written", flush=True)
    if row.tests and not words:
        tests = [*within, "pytest", "-m", "device", "--require", row.type, "--device", row.type]
        code = subprocess.run(tests, env=environment, cwd=ROOT, check=False).returncode or code
    return code


def run_command(row: Device, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command where the device is, and is the one that xamp takes; returns its exit code."""
    if not words:
        raise DevicesError(f"no command stands after --: ci/device.sh {row.name} -- python train.py")
    check_there(row, environment)
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    found = {**environment, "XAMP_DEVICE": row.type, "PATH": path}
    return subprocess.run([*emulated(row), *words], env=found, check=False).returncode


def main(name: str, *words: str) -> int:
    """Runs what is asked for; returns the exit code: 3 where the device is not there, 2 where the call is wrong."""
    needs = ""
    try:
        row = find(name, os.environ.get("XAMP_DEVICES", DATA))
        if not isinstance(row, Device):
            raise DevicesError(f"{name} is a job, which runs {row.run}")
        needs = row.needs
        check_torch(row, os.environ.get("XAMP_TORCH", ""))
        with tempfile.TemporaryDirectory() as work:
            environment = surroundings(row, Path(work))
            if words == ("--there",):
                check_there(row, environment)
                return 0
            if words[:1] == ("--",):
                return run_command(row, words[1:], environment)
            return run_suite(row, words, environment)
    except NotThere as error:
        print(f"ci/device.sh: {error}\nIt needs: {needs}.", file=sys.stderr)
        return 3
    except DevicesError as error:
        print(f"ci/device.sh: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
