"""Forks a process for each command of :mod:`forked_python`, and tells each how its process ended.

It starts with the environment of the whole run, and ends when its standard input does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import json
import linecache
import os
import re
import runpy
import selectors
import shlex
import signal
import socket
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PATH, _FILTERS, _ENVIRONMENT = sys.path[1:], [*warnings.filters], os.environ.copy()  # as Python starts here

import forking  # noqa: E402

_IMPORTED = ("torch", "torch._dynamo", "pytest")  # the first step of an optimizer imports dynamo
_HERE = Path(__file__).resolve()
_CLIENT = _HERE.with_name("forked_python_client.py")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_READ_AT_START = re.compile(
    r"PYTHON(?!PATH$|DONTWRITEBYTECODE$|UNBUFFERED$).+"
    rf"|(PY)?TORCH(?!INDUCTOR_CACHE_DIR$|{_AUTOLOAD[5:]}$|_NCCL_|ELASTIC_).*"
    r"|[A-Z]*OMP_(?!NUM_THREADS$).*|MKL_.*|.*(TF32|FPMATH|CPU_ISA|CPU_CAPABILITY|WORKSPACE_CONFIG).*"
)
"""Variables that Python reads as it starts, or torch as it is imported."""
_CAN_BE_SET: dict[str, list[tuple[str, ...]]] = {
    "-W": [("error",), ("ignore",), ("default",)],
    "-X": [("faulthandler",)],
    "-u": [()],
}
"""Options of Python, with their words, that have the same effect later."""
_WITH_WORD = {"-W", "-X"}


def _serve(folder: Path) -> Callable[[], int]:
    """Fork a process for each command. Returns in these, with what the command has to do, and exits in the server."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: no process needs to look through it, nor copy its pages
    if not forking.may_fork():
        sys.exit()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket")  # within the folder: a path of more than a hundred bytes is refused
    listening.listen(64)
    words = shlex.join([sys.executable, "-I", "-S", str(_CLIENT), sys.executable, str(folder)])
    (folder / "python").write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    (folder / "python").chmod(0o755)
    os.write(1, b"ready\n")
    return _Server(listening, folder / "python").serve()


class _Server:
    """Waits for three things at once: a new command, the end of a process, and a command that got a signal."""

    def __init__(self, listening: socket.socket, stand_in: Path) -> None:
        self._listening, self._stand_in = listening, stand_in
        self._running: dict[int, socket.socket] = {}
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends the tests, which end this
        self._waiting = selectors.DefaultSelector()
        for each in (sys.stdin, listening, self._woken):
            self._waiting.register(each, selectors.EVENT_READ)

    def serve(self) -> Callable[[], int]:
        while True:
            for key, _ in self._waiting.select():
                if key.fileobj is sys.stdin:
                    for pid in self._running:
                        _kill(pid)
                    sys.exit()
                elif key.fileobj is self._listening:
                    if (work := self._begin(self._listening.accept()[0])) is not None:
                        return work
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._note_ends()
                else:
                    self._pass_on(key.fileobj)

    def _pass_on(self, command: Any) -> None:
        """Send on the signal that a command got, or kill what it runs if it was killed."""
        pid = next(pid for pid, each in self._running.items() if each is command)
        if numbers := command.recv(64):
            with contextlib.suppress(OSError):
                os.kill(pid, numbers[-1])
        else:
            self._waiting.unregister(command)
            _kill(pid)

    def _begin(self, command: socket.socket) -> Callable[[], int] | None:
        asked, streams = _read(command)
        if asked is None or is_new(asked):
            command.sendall(b'{"new": true}')
            command.close()
            pid = -1
        elif pid := os.fork():
            self._waiting.register(command, selectors.EVENT_READ)
            self._running[pid] = command
        else:
            for each in (command, *self._running.values(), self._listening, self._woken, self._wake):
                each.close()
            self._waiting.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            return _become(asked, streams, str(self._stand_in))
        for stream in streams:
            os.close(stream)
        return None

    def _note_ends(self) -> None:
        while self._running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            command = self._running.pop(pid)
            with contextlib.suppress(KeyError):
                self._waiting.unregister(command)
            with contextlib.suppress(OSError), command:
                command.sendall(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())


def _read(command: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    data, streams, *_ = socket.recv_fds(command, 1 << 16, 3)
    while not data.endswith(b"\n"):
        if not (more := command.recv(1 << 16)):
            return None, streams
        data += more
    return json.loads(data), streams


def _kill(pid: int) -> None:
    """Kill a process and all that it started; it leads a group."""
    for kill in (os.killpg, os.kill):  # it may not lead it yet
        with contextlib.suppress(OSError):
            kill(pid, signal.SIGKILL)


def is_new(asked: dict[str, Any]) -> bool:
    """Whether a command needs an interpreter of its own.

    It has other variables that are read at the start, an option of Python that cannot be set later, or folders on its
    path with a module that Python or torch imports as it starts.
    """
    options, rest = _parse(asked["words"])
    odd = [option for option, *words in options if tuple(words) not in _CAN_BE_SET.get(option, ())]
    if odd or not rest or not (rest[0] in ("-c", "-m") or Path(asked["cwd"], rest[0]).is_file()):
        return True
    loads = asked["env"].get(_AUTOLOAD) != "0"
    if _read_at_start(asked["env"]) != _read_at_start(_ENVIRONMENT) or (not loads and _extensions()):
        return True
    folders = {*_entries(asked), _first_entry(asked, rest)} - {"", *_PATH}
    return any(_shadows(folder) or (loads and _extensions(folder)) for folder in folders if os.path.isdir(folder))


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    names = {name for name in environment if _READ_AT_START.fullmatch(name)} - {*forking.SETTINGS}
    return {name: environment[name] for name in names}


def _parse(words: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The options of Python with their words, and the rest, from -c, -m or a script on."""
    options: list[tuple[str, ...]] = []
    rest = [*words]
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        count = 2 if rest[0] in _WITH_WORD else 1
        options.append(tuple(rest[:count]))
        rest = rest[count:]
    return options, rest


def _first_entry(asked: dict[str, Any], rest: Sequence[str]) -> str:
    """What Python puts before everything on the path."""
    if rest[0] == "-c":
        return ""
    folder: str = asked["cwd"]
    return folder if rest[0] == "-m" else os.path.dirname(os.path.realpath(os.path.join(folder, rest[0])))


def _entries(asked: dict[str, Any]) -> list[str]:
    """What the command adds to the path."""
    entries = asked["env"].get("PYTHONPATH", "").split(os.pathsep)
    return [os.path.join(asked["cwd"], entry) for entry in entries if entry]


def _shadows(folder: str) -> bool:
    """Whether a folder has a module that is imported here already, or runs as Python starts."""
    imported = {name.partition(".")[0] for name in sys.modules} - {"__main__", "forking"}
    with os.scandir(folder) as entries:
        modules = [each.name for each in entries if each.name.endswith((".py", ".pyc", ".so")) or _is_package(each)]
    there = {name.partition(".")[0] for name in modules}
    return bool(there & {*imported, "sitecustomize", "usercustomize"})


def _is_package(entry: os.DirEntry[str]) -> bool:
    """Whether a folder comes before modules of its name elsewhere on the path; one without this file comes last."""
    return os.path.exists(os.path.join(entry.path, "__init__.py"))


def _extensions(*folder: str) -> bool:
    """Whether torch finds extensions there that it loads as it is imported, or on the path of this process."""
    found = importlib.metadata.distributions(path=[*folder]) if folder else importlib.metadata.distributions()
    return any(point.group == "torch.backends" for each in found for point in _points(each))


def _points(distribution: importlib.metadata.Distribution) -> Iterable[importlib.metadata.EntryPoint]:
    try:
        return distribution.entry_points
    except ValueError:  # the file is damaged; torch does not read it either
        return ()


# --- in a process that was forked


def _become(asked: dict[str, Any], streams: Sequence[int], stand_in: str) -> Callable[[], int]:
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    if "COVERAGE_PROCESS_START" not in os.environ:
        import measuring

        measuring.stop_here()
    options, rest = _parse(asked["words"])
    _set(options)
    _find_modules(asked, rest)
    sys.executable = stand_in
    sys.orig_argv = [stand_in, *asked["words"]]
    sys.argv = [*rest[int(rest[0] == "-m") :]] if rest[0] != "-c" else ["-c", *rest[2:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if rest[0] == "-m":
        return functools.partial(_run, lambda: runpy._run_module_as_main(rest[1]))  # type: ignore[attr-defined]
    if rest[0] == "-c":
        if sys.version_info >= (3, 13):  # from there on tracebacks show the lines of such a command
            linecache.cache["<string>"] = (len(rest[1]), None, rest[1].splitlines(keepends=True), "<string>")
        return functools.partial(_run, lambda: exec(compile(rest[1], "<string>", "exec"), vars(main)))
    script = Path(asked["cwd"], rest[0])
    main.__file__ = str(script)
    return functools.partial(_run, lambda: exec(compile(script.read_bytes(), script, "exec"), vars(main)))


def _set(options: Sequence[tuple[str, ...]]) -> None:
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if ("-u",) in options or os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if ("-X", "faulthandler") in options:
        import faulthandler

        faulthandler.enable()
    # What an import adds to the filters stands before those of the command line, and these before Python's own.
    filters: Any = warnings.filters
    added = [each for each in filters if each not in _FILTERS]
    filters[:] = _FILTERS
    for option, *words in options:
        if option == "-W":
            sys.warnoptions.append(*words)
            warnings.simplefilter(*words)  # type: ignore[arg-type]
    filters[:0] = added


def _find_modules(asked: dict[str, Any], rest: Sequence[str]) -> None:
    sys.path[:] = [_first_entry(asked, rest), *_entries(asked), *_PATH]
    for name in ("forking", "measuring"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def _run(work: Callable[[], object]) -> int:
    """Do the work, and end as Python does, without taking apart what is imported, which takes longer than most work."""
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error.with_traceback(_own(error.__traceback__)), error.__traceback__)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return code & 0xFF


def _own(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The part of a traceback that is the command's own."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (str(_HERE), runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    os._exit(_serve(Path(sys.argv[1]))())
