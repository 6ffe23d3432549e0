"""Finds the files of a call."""

from __future__ import annotations

import fnmatch
import os
import pathlib
import stat
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from xamp.errors import PolicyError
from xamp.port.other.kinds import is_wanted

__all__ = ["find"]

# Never read, and not worth a word.
_SILENT = {".git", ".hg", ".svn", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}
_INSTALLED = {
    ".tox": "made by tox",
    ".nox": "made by nox",
    "node_modules": "installed packages",
    ".ipynb_checkpoints": "copies that Jupyter keeps",
}
# Folders of these names hold sources in some projects, and what a build made in others.
_BUILT = ("build", "dist")


def find(
    paths: Sequence[str],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    root: str | None = None,
    left_out: list[str] | None = None,
) -> Iterator[str]:
    """Yield each file to port, once, in the order of names.

    Args:
        paths: files and folders. A file is taken whatever its ending.
        include: patterns; of the files in folders only those that match one. Empty: Python files, notebooks, and
            other texts that name CUDA.
        exclude: patterns of files and folders to leave out, also where a call names them, as hooks do.
        root: a folder that the patterns may start at; the working folder, and the one that is searched, are others.
        left_out: gets each folder that was not read and no pattern names, with the reason.

    Raises:
        PolicyError: a path does not exist.
    """
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if not os.path.exists(path):
            kind = "a link that leads nowhere" if os.path.islink(path) else "no such file or folder"
            raise PolicyError(f"xamp port {path!r}: {kind}. Name files or folders.")
        tops = [top for top in (os.curdir, root) if top is not None]
        if any(_leads_out(path, top, exclude) for top in tops):
            continue
        if not os.path.isdir(path):
            yield from _once(path, seen)
            continue
        for file in _below(path, exclude, [path, *tops], [] if left_out is None else left_out):
            if _matches(file, path, include) if include else is_wanted(file):
                yield from _once(file, seen)


def _once(path: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    found = os.stat(path)
    if (found.st_dev, found.st_ino) not in seen:
        seen.add((found.st_dev, found.st_ino))
        yield path


def _leads_out(path: str, top: str, exclude: Sequence[str]) -> bool:
    """Whether a pattern leaves out a file, or a folder around it, that stands below ``top``."""
    inside = pathlib.PurePath(os.path.relpath(path, top))
    if os.path.isabs(inside) or ".." in inside.parts:
        return _matches(path, os.path.dirname(path) or os.curdir, exclude)
    above = [each for each in (inside, *inside.parents) if each.parts]
    return any(_matches(os.path.join(top, each), top, exclude) for each in above)


def _below(folder: str, exclude: Sequence[str], tops: Sequence[str], left_out: list[str]) -> Iterator[str]:
    """The files below a folder. Links to folders are not followed, so that a loop of links ends."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in _SILENT or any(_matches(entry.path, top, exclude) for top in tops):
            continue
        if entry.is_dir(follow_symlinks=False):
            if why := _why_not(entry.path, entry.name):
                left_out.append(f"{entry.path} ({why})")
                continue
            yield from _below(entry.path, exclude, tops, left_out)
        elif not os.path.isdir(entry.path) and os.path.exists(entry.path) and stat.S_ISREG(os.stat(entry.path).st_mode):
            yield entry.path


def _why_not(path: str, name: str) -> str:
    """Why a folder is not read; empty where it is."""
    if name in _INSTALLED:
        return _INSTALLED[name]
    if any(os.path.exists(os.path.join(path, each)) for each in ("pyvenv.cfg", "conda-meta")):
        return "an environment of Python"
    if name not in _BUILT:
        return ""
    if _git(path, "check-ignore", "-q") is not None:
        return "git ignores it"
    beside = os.path.dirname(path) or os.curdir
    is_project = any(os.path.exists(os.path.join(beside, each)) for each in ("setup.py", "pyproject.toml"))
    made = any(each == "lib" or each.startswith(("bdist.", "lib.", "temp.")) for each in os.listdir(path))
    return "a build made it" if is_project and made and not _git(path, "ls-files") else ""


def _git(path: str, *words: str) -> bytes | None:
    """What git answers about a folder; None where it fails, or is not there."""
    folder, name = os.path.split(os.path.abspath(path))
    command = ["git", "-C", folder, *words, "--", name]
    try:
        done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _matches(path: str, top: str, patterns: Iterable[str]) -> bool:
    inside = pathlib.PurePath(os.path.relpath(path, top)).as_posix()
    name = os.path.basename(path)
    return any(
        fnmatch.fnmatch(inside, pattern)
        or fnmatch.fnmatch(name, pattern)
        or fnmatch.fnmatch(inside, f"{pattern.rstrip('/')}/*")
        for pattern in patterns
    )
