"""Rewrite training scripts that name CUDA, Apex or Ascend, so that they run on every device.

Beside Python and notebooks it reads the shell scripts, configurations, lists of packages and other texts of a folder.
Without --write it prints a diff. Rewrites that are certain are silent; the others leave a comment TODO(xamp), or a line
here. Exit code 1 where something cannot be ported or read and, with --check, where anything is to port. Nothing of the
scripts is executed or imported. Settings can stand in pyproject.toml, in the table [tool.xamp.port].
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xamp.errors import PolicyError, StateError, XampError

if TYPE_CHECKING:
    from xamp.port.files import Outcome
    from xamp.port.settings import Settings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``xamp port``."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a file, a notebook, or a folder")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--write", action="store_true", help="write the files, in place of printing a diff")
    mode.add_argument("--check", action="store_true", help="print what is to port; exit code 1 where anything is")
    mode.add_argument("--explain", metavar="RULE", help="say what a rule does; with 'all', list the rules")
    parser.add_argument(
        "--force", action="store_true", help="with --write: also files with changes that git does not have yet"
    )
    parser.add_argument("--report", metavar="FILE", help="write a report: .json, .html or .sarif")
    parser.add_argument(
        "--include", action="append", default=[], metavar="PATTERN", help="take only such files of folders"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave out such files and folders"
    )
    parser.add_argument(
        "--add-amp", metavar="LEVEL", help="put initialize and scale_loss into scripts that train in fp32"
    )
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="processes (default: one for each processor)")


def run(args: argparse.Namespace) -> int:
    """Port, and print what was found. See the module for the exit code."""
    with _whatever_fits():
        try:
            if args.explain is not None:
                return _explain(args.explain)
            return _port(args)
        except XampError as error:
            print(f"xamp port: {error}", file=sys.stderr)
            return 2


def _port(args: argparse.Namespace) -> int:
    files: Any = importlib.import_module("xamp.port.files")
    report: Any = importlib.import_module("xamp.port.report")
    if not args.paths:
        raise PolicyError("xamp port: no PATH. Name files or folders: xamp port train.py")
    if args.add_amp is not None:
        _check_level(args.add_amp)
    if args.report and os.path.splitext(args.report)[1].lower() not in report.ENDINGS:
        report.render(args.report, ())
    settings: Settings = importlib.import_module("xamp.port.settings").read(args.paths[0])
    files.check_libcst()
    importlib.import_module("xamp.port.rules").load()
    root = os.path.dirname(settings.path) if settings.path else None
    exclude = [*settings.exclude, *args.exclude]
    left_out: list[str] = []
    include = args.include or settings.include
    found = list(importlib.import_module("xamp.port.find").find(args.paths, include, exclude, root, left_out))
    jobs = args.jobs or settings.jobs or os.cpu_count() or 1
    with _progress(len(found)) as step:
        outcomes = files.port_all(found, jobs, args.add_amp, step, args.paths)
    code = _write(files, outcomes, args.force) if args.write else 0
    _say(report, outcomes, args, left_out)
    if args.report:
        text = report.render(args.report, outcomes)
        try:
            with open(args.report, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except OSError as error:
            raise StateError(f"--report {args.report}: cannot be written: {error.strerror}.") from error
    return max(code, _code(outcomes, args.check))


def _check_level(level: str) -> None:
    policy: Any = importlib.import_module("xamp.policy")
    policy.parse_level(level)


def _code(outcomes: Sequence[Outcome], check: bool) -> int:
    grades: Any = importlib.import_module("xamp.port.rule").Grade
    for outcome in outcomes:
        if outcome.error or outcome.count(grades.UNSUPPORTED) or (check and outcome.is_changed):
            return 1
    return 0


def _write(files: Any, outcomes: Sequence[Outcome], force: bool) -> int:
    """Write what changed. Where one file may not be written, none is."""
    changed = [outcome for outcome in outcomes if outcome.is_changed]
    if not force and (dirty := [outcome.path for outcome in changed if files.is_dirty(outcome.path)]):
        raise StateError(
            f"--write: {', '.join(dirty[:5])}{' and more' if len(dirty) > 5 else ''} would be rewritten and "
            f"git does not "
            "have the present state. Nothing is written. Commit first, or give --force."
        )
    failed = 0
    for outcome in changed:
        try:
            files.write(outcome)
        except StateError as error:
            print(f"xamp port: {error}", file=sys.stderr)
            failed = 1
    return failed


def _say(report: Any, outcomes: Sequence[Outcome], args: argparse.Namespace, left_out: Sequence[str]) -> None:
    for outcome in outcomes:
        if outcome.error:
            print(f"{outcome.path}: {outcome.error}", file=sys.stderr)
            continue
        if outcome.is_changed and not args.write:
            _show(f"would port {outcome.path}\n" if args.check else report.diff(outcome))
        for finding, lines in report.grouped(outcome.findings):
            where = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
            print(f"{outcome.path}:{where}: {finding.grade.value}: {finding.text} [{finding.rule}]", file=sys.stderr)
            print(report.caret(finding), file=sys.stderr)
    if left_out:
        print(f"left out: {', '.join(left_out)}. Name a folder to port it.", file=sys.stderr)
    if stay := sum(len(outcome.stays) for outcome in outcomes):
        print(f"{stay} more places name a device and stay; --report lists them with the reasons.", file=sys.stderr)
    changed = sum(outcome.is_changed for outcome in outcomes)
    failed = sum(bool(outcome.error) for outcome in outcomes)
    done = "ported" if args.write else "to port"
    print(f"{report.counted(len(outcomes))}: {changed} {done}, {failed} not readable.", file=sys.stderr)


def _show(text: str) -> None:
    """Write to stdout the very bytes of a file, whatever the terminal's encoding."""
    sys.stdout.flush()
    try:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
    except (AttributeError, UnicodeEncodeError):  # a stdout that takes no bytes, or a path with a lone surrogate
        print(text, end="")


def _explain(name: str) -> int:
    rules: Any = importlib.import_module("xamp.port.rules")
    pages: Any = importlib.import_module("xamp.port.explain")
    found = rules.load()
    if name == "all":
        print(pages.listing(found))
        return 0
    print(pages.text(found, name))
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on a terminal, where rich is installed and there are many files."""
    if total < 16 or not sys.stderr.isatty():
        yield None
        return
    try:
        progress: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console")
    except ImportError:
        yield None
        return
    with progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("porting", total=total)
        yield lambda _: bar.advance(task)


@contextlib.contextmanager
def _whatever_fits() -> Iterator[None]:
    """Scripts and paths may hold what the terminal's encoding does not."""
    kept = [(stream, getattr(stream, "errors", None)) for stream in (sys.stdout, sys.stderr)]
    for stream, _ in kept:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for stream, errors in kept:
            if hasattr(stream, "reconfigure") and errors:
                stream.reconfigure(errors=errors)


def _jobs(text: str) -> int:
    value = int(text)
    if not 0 < value <= 1024:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 1024, not {text!r}")
    return value
