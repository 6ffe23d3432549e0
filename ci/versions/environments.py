"""An environment for each release of torch, outside of the checkout: made once, and anew where what goes in changes.

They stand in ``XAMP_VERSIONS``, or else in a folder ``xamp-versions`` of the user's cache. All checkouts share them:
xamp itself is not installed. A link that stands in the place of an environment leads to one of the user's own. It is
used if its versions are the right ones, and never changed.
"""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ci.devices import pins
from ci.devices_data import ROOT
from ci.versions import interpreters

__all__ = ["FOLDER", "Environment", "NotMade", "folder", "make"]

FOLDER = "XAMP_VERSIONS"
_KEY = "xamp-key"
"""In an environment: the file that has the hash of what went in; empty while it is being made."""
_EXTRAS = ("demo", "project-tests", "kernels")
_VERSIONS = """
import importlib.metadata, sys
print("{}.{}".format(*sys.version_info[:2]), importlib.metadata.version("torch").partition("+")[0])
"""


class NotMade(RuntimeError):
    """An environment cannot be made. The message says why."""


def folder() -> Path:
    """Where the environments are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(FOLDER) or cache / "xamp-versions").absolute()


@dataclasses.dataclass(frozen=True)
class Environment:
    """An environment, whether or not it is there.

    Attributes:
        torch: the release of torch.
        python: the version of Python.
        name: of its folder.
        loose: it may be made without CI's pins, where they do not fit its torch.
    """

    torch: str
    python: str
    name: str = ""
    loose: bool = False

    @property
    def path(self) -> Path:
        """Its folder."""
        return folder() / (self.name or f"torch-{self.torch}-python-{self.python}")

    @property
    def interpreter(self) -> str:
        """Its Python."""
        return str(self.path / "bin" / "python")

    @property
    def requirements(self) -> list[str]:
        """What pip installs, in its words."""
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg", encoding="utf-8")
        extras = [setup["options.extras_require"][extra].strip().splitlines() for extra in _EXTRAS]
        return [f"torch=={self.torch}", *dict.fromkeys(line for lines in extras for line in lines)]

    @property
    def key(self) -> str:
        """A hash of what goes in."""
        content = [self.python, *self.requirements, pins(self.torch)]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()

    def why_not(self) -> str:
        """Why it cannot be used as it is; empty if it can."""
        if not os.path.lexists(self.path):
            return "it is not there"
        if self.path.is_symlink():
            found = _versions(self.interpreter)
            wanted = f"{self.python} {self.torch}"
            return "" if found == wanted else f"what it links to has Python and torch {found or 'that do not run'}"
        if not self.is_made_here:
            return "it was not made by ci/versions.sh"
        if (self.path / _KEY).read_text(encoding="utf-8") != self.key:
            return "what goes in has changed since it was made, or it was cut short"
        return "" if _versions(self.interpreter) else "it does not work any more"

    @property
    def is_made_here(self) -> bool:
        """Whether what stands in its place may be made anew."""
        return not self.path.is_symlink() and (self.path / _KEY).is_file()


def make(wanted: Environment) -> None:
    """Make an environment, unless it is there as it should be.

    Raises:
        NoInterpreter: there is no Python of its version.
        NotMade: something else stands in its place, or pip fails.
    """
    with _alone(wanted.path):
        if not (why := wanted.why_not()):
            print(f"== torch {wanted.torch}: {wanted.path} is there", flush=True)
            return
        if os.path.lexists(wanted.path) and not wanted.is_made_here:
            raise NotMade(f"{wanted.path}: {why}. Remove it, or name another folder: {FOLDER}=/path")
        python = interpreters.find(wanted.python)
        print(f"== torch {wanted.torch}: making {wanted.path}, since {why} (minutes)", flush=True)
        shutil.rmtree(wanted.path, ignore_errors=True)
        wanted.path.mkdir(parents=True)
        (wanted.path / _KEY).write_text("", encoding="utf-8")
        _call([python, "-m", "venv", str(wanted.path)])
        _install(wanted)
        (wanted.path / _KEY).write_text(wanted.key, encoding="utf-8")


def _install(wanted: Environment) -> None:
    file = wanted.path / "pins.txt"
    file.write_text(pins(wanted.torch), encoding="utf-8")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    pip = [wanted.interpreter, "-m", "pip", "install", "--disable-pip-version-check", *quiet]
    try:
        _call([*pip, "--constraint", str(file), *wanted.requirements])
    except NotMade:
        if not wanted.loose:
            raise
        print(f"== torch {wanted.torch}: the pins of CI do not fit it; installing without them", flush=True)
        _call([*pip, *wanted.requirements])


def _call(words: Sequence[str]) -> None:
    if code := subprocess.run(words, cwd="/", check=False).returncode:
        raise NotMade(f"{' '.join(words[1:4])} ... ended with code {code}, see above")


def _versions(python: str) -> str:
    """Of Python and torch, as an environment has them; empty if it does not run."""
    try:
        done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, check=False, cwd="/")
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process makes the same environment meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
