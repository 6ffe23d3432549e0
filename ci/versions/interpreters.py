"""Finds a Python of a version on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["NoInterpreter", "find", "variable"]

_ASK = "import ensurepip, sys, venv; print('{}.{}'.format(*sys.version_info[:2]))"


class NoInterpreter(LookupError):
    """There is no Python of that version here. The message says how to name one."""


def variable(version: str) -> str:
    """The variable that names a Python of a version, such as PYTHON3_10."""
    return f"PYTHON{version.replace('.', '_')}"


def find(version: str, environ: Mapping[str, str] | None = None) -> str:
    """The path of a Python of a version, such as 3.10, with which environments can be made.

    Each that may be one is asked: what pyenv puts on the PATH under such a name fails where that version is not
    selected, and a Python may be there without the modules that make environments.

    Args:
        version: the version.
        environ: the variables (those of this process).

    Raises:
        NoInterpreter: none is found, or the one that the variable names is another one.
    """
    environ = os.environ if environ is None else environ
    named = environ.get(variable(version), "")
    if named:
        if _version(named) != version:
            told = _version(named) or "not there, or without the modules venv and ensurepip"
            raise NoInterpreter(f"{variable(version)}={named}: it must be a Python {version}, and is {told}")
        return named
    for path in dict.fromkeys(_candidates(version, environ)):
        if _version(path) == version:
            return path
    raise NoInterpreter(f"there is no Python {version} here; name one: {variable(version)}=/path/to/python{version}")


def _candidates(version: str, environ: Mapping[str, str]) -> Iterator[str]:
    folders = [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from (str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True))
    yield from (str(folder / f"python{version}") for folder in folders)
    yield from (str(folder / name) for folder in folders for name in ("python3", "python"))
    yield sys.executable


def _version(path: str) -> str:
    """The version that a Python says it has; empty if it is not there, or lacks what makes environments."""
    try:
        done = subprocess.run([path, "-c", _ASK], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
