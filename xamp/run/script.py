"""Runs a script or a module as ``python`` does: ``__main__``, ``sys.argv``, the path, tracebacks and exit codes."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import io
import os
import runpy
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures.thread import _threads_queues as _threads_of_executors

from xamp.apex import _install
from xamp.run import ages, launch
from xamp.run.launch import Settings
from xamp.run.redirect import Redirection

__all__ = ["run"]

_FILE = os.path.normcase(__file__)
_kept: list[types.ModuleType] = []


def run(name: str, words: Sequence[str], *, module: bool, settings: Settings, own_process: bool = False) -> int:
    """Run a script or a module, with everything redirected, and report at the end.

    Args:
        name: the script's path, or the module's name with ``module=True``.
        words: its arguments.
        module: whether ``name`` is a module.
        settings: what is redirected.
        own_process: leave everything in place until the process ends, for threads and exit handlers of the script.

    Returns:
        The exit code that Python would give.

    Raises:
        BackendUnavailable: the device asked for is not there.
        SystemExit: the script raised it; Python turns it into an exit code.
    """
    with contextlib.ExitStack() as stack:
        if settings.folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xamp-run-"))
            settings = Settings(settings.pretend, settings.prefer, folder)
        redirection = Redirection(settings)
        stack.callback(_finish, redirection)
        redirection.start()
        launch.importable()
        if module and name in launch.LAUNCHERS:
            words = launch.launcher_words(name, words, settings)
        if own_process:
            atexit.register(stack.pop_all().close)
            return _as_main(name, words, module, redirection)
        with _restored():
            before = set(threading.enumerate())
            try:
                return _as_main(name, words, module, redirection)
            finally:
                _wait_for_threads(before)


def _as_main(name: str, words: Sequence[str], module: bool, redirection: Redirection) -> int:
    sys.argv = [name, *words]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    try:
        if module:
            sys.path[:1] = [os.getcwd()]
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            _run_file(name, main, redirection)
    except SystemExit as stop:
        _hint_at_refusal(redirection, stop.code)
        raise
    except BaseException as error:
        return _show(error, redirection)
    return 0


def _run_file(name: str, main: types.ModuleType, redirection: Redirection) -> None:
    path = os.path.abspath(name)
    if os.path.isdir(path):
        sys.path[:1] = [path]
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"xamp run: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.path[:1] = [os.path.dirname(path)]
    redirection.expect(source)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __package__=None, __annotations__={})
    main.__spec__ = None
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _show(error: BaseException, redirection: Redirection) -> int:
    """Print the traceback as Python does, without the frames of this module; then what may be behind the error."""
    shown = _from_script(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
    error.__traceback__ = shown
    sys.excepthook(type(error), error, shown)
    for line in ages.explain(error):
        print(f"xamp run: {line}", file=sys.stderr)
    _hint_at_refusal(redirection, error)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _from_script(error: BaseException) -> types.TracebackType | None:
    found = error.__traceback__
    while found is not None and _is_own(found):
        found = found.tb_next
    return found


def _is_own(found: types.TracebackType) -> bool:
    name = found.tb_frame.f_code.co_filename
    return os.path.normcase(name) == _FILE or name == "<frozen runpy>" or name == runpy.__file__


def _hint_at_refusal(redirection: Redirection, why: object) -> None:
    """Say what a script that stops may have stopped for: that CUDA is not there, or that there is no apex.amp."""
    if why in (None, 0):
        return
    if redirection.report.rows("told") and not redirection.settings.pretend:
        asked = ", ".join(sorted({row.what.partition("(")[0] for row in redirection.report.rows("told")}))
        print(
            f"xamp run: the script asked {asked} and was told the truth. If it stopped for that: --pretend-cuda",
            file=sys.stderr,
        )
    counted = any("device_count" in row.what for row in redirection.report.rows("told"))
    if isinstance(why, ZeroDivisionError) and counted:
        print(
            "xamp run: torch.cuda.device_count() is 0 here. If the script divided by it: --pretend-cuda",
            file=sys.stderr,
        )
    answers, real = _install.choice()
    if answers is False and real is not None and not real.has_amp:
        print(
            "xamp run: the installed apex has no apex.amp. To use xamp.apex in its place: --prefer xamp",
            file=sys.stderr,
        )


def _finish(redirection: Redirection) -> None:
    redirection.stop()
    redirection.report.collect()
    text = redirection.report.text()
    if text and os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _wait_for_threads(before: set[threading.Thread]) -> None:
    """Wait, as Python does at its end, for the threads that the script has started: those that are not in ``before``.

    Not for those of an executor that nobody has shut down: they end when Python does.
    """
    for thread in threading.enumerate():
        if thread not in before and not thread.daemon and thread not in _threads_of_executors:
            thread.join()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restore what a script's run changes in this process.

    The script's module is kept: to let go of process groups and their models while Python runs on can wait for ever.
    """
    argv, path, main = sys.argv, sys.path[:], sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        _kept.append(sys.modules["__main__"])
        sys.modules["__main__"] = main
