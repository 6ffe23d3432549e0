"""Ports files, in processes where there are many, and writes results; :mod:`xamp.port.find` finds them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import re
import stat
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from xamp.errors import StateError, XampError
from xamp.port.other.kinds import Kind, kind_of
from xamp.port.rule import Finding, Grade
from xamp.port.source import MissingLibCST, Unreadable

if TYPE_CHECKING:
    from xamp.port.engine import Ported

__all__ = ["Outcome", "is_dirty", "port_all", "port_file", "write"]

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
        stays: the other lines that name a device, with the reason why each stays.
    """

    path: str
    before: bytes = b""
    after: bytes = b""
    findings: tuple[Finding, ...] = ()
    error: str = ""
    stays: tuple[Finding, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether porting changes it."""
        return not self.error and self.before != self.after

    def count(self, grade: Grade) -> int:
        """The number of findings of a grade."""
        return sum(finding.grade is grade for finding in self.findings)


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


def port_file(
    path: str,
    level: str | None = None,
    exports: Sequence[str] = (),
    is_named: bool = False,
    own: Collection[str] = (),
) -> Outcome:
    """Port one file; do not write it. An error becomes part of the outcome, so that no file stops the others.

    Args:
        path: the file.
        level: ``--add-amp``'s level; None: no AMP is added.
        exports: names that other files take from it.
        is_named: the call names it, so it is taken for Python where nothing says what it is.
        own: names of modules that stand beside it.
    """
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
        after, ported = _port(path, data, level, exports, is_named, own)
    except Unreadable as error:
        return Outcome(path, data, data, error=str(error))
    except RecursionError:
        return Outcome(path, data, data, error="the code is nested too deeply to be read. Exclude the file.")
    except XampError:
        raise  # LibCST is missing, or a rule of another package cannot be loaded: it holds for every file
    except Exception as error:
        text = f"a fault of xamp port: {type(error).__name__}: {error}. The file stays as it is; please report it."
        return Outcome(path, data, data, error=text)
    return Outcome(path, data, after, ported.findings, stays=ported.stays)


def _port(
    path: str, data: bytes, level: str | None, exports: Sequence[str], is_named: bool, own: Collection[str]
) -> tuple[bytes, Ported]:
    from xamp.port import engine, notebook
    from xamp.port.other.port import port_other

    kind = kind_of(path, data[:4096])
    if kind is Kind.NOTEBOOK:
        return notebook.port_notebook(data, _adding(level))
    if kind is Kind.PYTHON or (kind is Kind.OTHER and is_named):
        return engine.port_bytes(data, last=_adding(level), exports=exports, own=own)
    return port_other(path, data, own)


def _adding(level: str | None) -> Callable[..., None] | None:
    if level is None:
        return None
    from xamp.port.add_amp import AddAmp

    return AddAmp(level)


def port_all(
    paths: Sequence[str],
    jobs: int = 1,
    level: str | None = None,
    done: Callable[[Outcome], None] | None = None,
    named: Collection[str] = (),
) -> list[Outcome]:
    """Port files, in processes where that pays. The order is that of ``paths``.

    Args:
        paths: the files.
        jobs: processes.
        level: see :func:`port_file`.
        done: is called for each outcome, as they come.
        named: those of ``paths`` that the call names itself; see :func:`port_file`.

    Raises:
        MissingLibCST: LibCST is not installed.
    """
    outcomes: dict[str, Outcome] = {}
    exporting = exporters(paths)

    def keep(outcome: Outcome) -> None:
        outcomes[outcome.path] = outcome
        if done is not None:
            done(outcome)

    own = _modules(paths, named)
    calls = {path: (path, level, _names(path, exporting), path in named, own) for path in paths}
    if jobs < 2 or len(paths) < 16:
        for call in calls.values():
            keep(port_file(*call))
        return [outcomes[path] for path in paths]
    for path, outcome in _in_processes(calls, jobs):
        keep(outcome if outcome is not None else _alone(calls[path]))
    return [outcomes[path] for path in paths]


def _names(path: str, exporting: frozenset[str]) -> tuple[str, ...]:
    return ("amp",) if path in exporting else ()


def _modules(paths: Sequence[str], named: Collection[str]) -> frozenset[str]:
    """The modules and packages that stand in the folders of a call, or in ``src`` there."""
    found = set()
    for folder in filter(os.path.isdir, named):
        inside = (os.path.relpath(path, folder).split(os.sep) for path in paths if path.endswith(".py"))
        found |= {(parts[1] if parts[0] == "src" and len(parts) > 1 else parts[0]) for parts in inside}
    return frozenset(name.removesuffix(".py") for name in found)


_Call: TypeAlias = tuple[str, str | None, tuple[str, ...], bool, frozenset[str]]  # the arguments of port_file


def _in_processes(calls: dict[str, _Call], jobs: int) -> Iterator[tuple[str, Outcome | None]]:
    """Outcomes as they come; None for files of a pool that broke."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {pool.submit(port_file, *call): path for path, call in calls.items()}
        for future in concurrent.futures.as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except concurrent.futures.process.BrokenProcessPool:
                yield waiting[future], None


def _alone(call: _Call) -> Outcome:
    """Port a file in a process that may end: a file that ends it is told of."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(port_file, *call).result()
        except concurrent.futures.process.BrokenProcessPool:
            return Outcome(call[0], error="ended the process that read it. Exclude the file, and please report it.")


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
