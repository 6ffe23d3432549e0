"""Finds the files of a call, ports each in a process of its own where there are many, and writes results."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import multiprocessing
import os
import pathlib
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

from xamp.errors import PolicyError, StateError
from xamp.port.rule import Finding, Grade
from xamp.port.source import MissingLibCST, Unreadable

__all__ = ["Outcome", "find", "is_dirty", "port_all", "port_file", "write"]

_SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".tox",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "build",
    "dist",
    ".mypy_cache",
}
_ENDINGS = (".py", ".pyw", ".ipynb")
_LARGEST = 64 * 2**20  # bytes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one file.

    Attributes:
        path: as the call names it.
        before: its bytes; empty where it could not be read.
        after: its bytes after porting.
        findings: what rules said.
        error: why it could not be ported; empty where it could.
    """

    path: str
    before: bytes = b""
    after: bytes = b""
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def is_changed(self) -> bool:
        """Whether porting changes it."""
        return not self.error and self.before != self.after

    def count(self, grade: Grade) -> int:
        """The number of findings of a grade."""
        return sum(finding.grade is grade for finding in self.findings)


def find(
    paths: Sequence[str], include: Sequence[str] = (), exclude: Sequence[str] = (), root: str | None = None
) -> Iterator[str]:
    """Yield each file to port, once, in the order of names.

    Args:
        paths: files and folders. A file is taken whatever its ending.
        include: patterns; of the files in folders only those that match one. Empty: all Python files and notebooks.
        exclude: patterns of files and folders to leave out, also where a call names them, as hooks do.
        root: a folder that the patterns may start at; the working folder, and the one that is searched, are others.

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
        for file in _below(path, exclude, [path, *tops]):
            if _matches(file, path, include) if include else file.endswith(_ENDINGS):
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


def _below(folder: str, exclude: Sequence[str], tops: Sequence[str]) -> Iterator[str]:
    """The files below a folder. Links to folders are not followed, so that a loop of links ends."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in _SKIPPED or any(_matches(entry.path, top, exclude) for top in tops):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, exclude, tops)
        elif not os.path.isdir(entry.path) and os.path.exists(entry.path) and stat.S_ISREG(os.stat(entry.path).st_mode):
            yield entry.path


def _matches(path: str, top: str, patterns: Iterable[str]) -> bool:
    inside = pathlib.PurePath(os.path.relpath(path, top)).as_posix()
    name = os.path.basename(path)
    return any(
        fnmatch.fnmatch(inside, pattern)
        or fnmatch.fnmatch(name, pattern)
        or fnmatch.fnmatch(inside, f"{pattern.rstrip('/')}/*")
        for pattern in patterns
    )


_TAKES_AMP = re.compile(
    rb"^[ \t]*from[ \t]+([.\w]+)[ \t]+import\b(?:[ \t]*\([^)]*?\bamp\b|[^\n#]*?\bamp\b|[ \t]*\*)"
    rb"|\b(\w+)\.amp\.(?:initialize|scale_loss|master_params|state_dict)",
    re.M,
)


_ALIAS = re.compile(rb"\b([\w.]+)[ \t]+as[ \t]+(\w+)")


def exporters(paths: Sequence[str]) -> frozenset[str]:
    """The files from which another one of ``paths`` takes the name ``amp``."""
    modules: set[str] = set()
    for path in paths:
        try:
            if not path.endswith(".py") or not os.path.isfile(path) or os.path.getsize(path) > _LARGEST:
                continue
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            continue
        if b"amp" not in data and b"*" not in data:
            continue
        here = os.path.basename(os.path.dirname(os.path.abspath(path)))
        names = [found[1] or found[2] for found in _TAKES_AMP.finditer(data)]
        names += [name for name, alias in _ALIAS.findall(data) if alias in names]
        modules.update(name.decode("utf-8", "replace").rpartition(".")[2] or here for name in names)
    return frozenset(path for path in paths if _module(path) in modules)


def _module(path: str) -> str:
    """The name by which other files import a file: its own, or its folder's for ``__init__.py``."""
    stem = os.path.splitext(os.path.basename(path))[0]
    return os.path.basename(os.path.dirname(os.path.abspath(path))) if stem == "__init__" else stem


def port_file(path: str, level: str | None = None, exports: Sequence[str] = ()) -> Outcome:
    """Port one file; do not write it. An error becomes part of the outcome.

    Args:
        path: the file.
        level: ``--add-amp``'s level; None: no AMP is added.
        exports: names that other files take from it.
    """
    from xamp.port import engine, notebook

    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return Outcome(path, error="is no regular file")
        if os.stat(path).st_size > _LARGEST:
            return Outcome(path, error=f"has {os.stat(path).st_size:,} bytes; the porter takes up to {_LARGEST:,}")
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        return Outcome(path, error=f"cannot be read: {error.strerror}")
    try:
        if path.endswith(".ipynb"):
            after, ported = notebook.port_notebook(data, _adding(level))
        else:
            after, ported = engine.port_bytes(data, last=_adding(level), exports=exports)
    except Unreadable as error:
        return Outcome(path, data, data, error=str(error))
    except RecursionError:
        return Outcome(path, data, data, error="the code is nested too deeply to be read. Exclude the file.")
    return Outcome(path, data, after, ported.findings)


def _adding(level: str | None) -> Callable[..., None] | None:
    if level is None:
        return None
    from xamp.port.add_amp import AddAmp

    return AddAmp(level)


def port_all(
    paths: Sequence[str], jobs: int = 1, level: str | None = None, done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Port files, in processes where that pays. The order is that of ``paths``.

    Args:
        paths: the files.
        jobs: processes.
        level: see :func:`port_file`.
        done: is called for each outcome, as they come.

    Raises:
        MissingLibCST: LibCST is not installed.
    """
    outcomes: dict[str, Outcome] = {}
    exporting = exporters(paths)

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.path] = outcome
        if done is not None:
            done(outcome)

    if jobs < 2 or len(paths) < 16:
        for path in paths:
            keep(port_file(path, level, _names(path, exporting)))
        return [outcomes[path] for path in paths]
    for path, outcome in _in_processes(paths, jobs, level, exporting):
        keep(outcome if outcome is not None else _alone(path, level, _names(path, exporting)))
    return [outcomes[path] for path in paths]


def _names(path: str, exporting: frozenset[str]) -> tuple[str, ...]:
    return ("amp",) if path in exporting else ()


def _in_processes(
    paths: Sequence[str], jobs: int, level: str | None, exporting: frozenset[str]
) -> Iterator[tuple[str, Outcome | None]]:
    """Outcomes as they come; None for files of a pool that broke."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(port_file, path, level, _names(path, exporting)): path for path in paths}
        for future in concurrent.futures.as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except concurrent.futures.process.BrokenProcessPool:
                yield waiting[future], None


def _alone(path: str, level: str | None, exports: Sequence[str]) -> Outcome:
    """Port a file in a process that may end: a file that ends it is told of."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(port_file, path, level, exports).result()
        except concurrent.futures.process.BrokenProcessPool:
            return Outcome(path, error="ended the process that read it. Exclude the file, and please report it.")


def is_dirty(path: str) -> bool:
    """Whether the file stands in a git repository and has changes that are not committed, or is not known to git."""
    folder, name = os.path.split(os.path.abspath(path))
    command = ["git", "-C", folder, "status", "--porcelain", "--ignored", "--", f":(literal){name}"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # without git there is no tree to be dirty
    return found.returncode == 0 and bool(found.stdout.strip())


def write(outcome: Outcome) -> None:
    """Write a ported file: all of it or nothing, with its mode.

    Raises:
        StateError: the file has changed since it was read, or cannot be written.
    """
    target = os.path.realpath(outcome.path)
    folder = os.path.dirname(target)
    try:
        with open(target, "rb") as file:
            if file.read() != outcome.before:
                raise StateError(
                    f"{outcome.path}: has changed while it was being ported; it is left as it is. Run again."
                )
        about = os.stat(target)
        handle, temporary = tempfile.mkstemp(prefix=".xamp-port-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(outcome.after)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, stat.S_IMODE(about.st_mode))
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise StateError(f"{outcome.path}: cannot be written: {error.strerror}. It is left as it is.") from error


def check_libcst() -> None:
    """Say early that LibCST is missing.

    Raises:
        MissingLibCST: it is.
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise MissingLibCST(
            f"xamp port needs LibCST, which is not there: {error}. Run: pip install xamp[port]"
        ) from error
