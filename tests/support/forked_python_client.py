"""Runs where a command names the executable of :mod:`forked_python`: sends the command to the server, and ends as it.

It imports little, since each command pays for it.
"""

import json
import os
import resource
import signal
import socket
import sys

_FORWARDED = (signal.SIGABRT, signal.SIGTERM)


def main(real: str, folder: str, words: list[str]) -> None:
    if (code := _ask(folder, words)) is None:
        os.execv(real, [real, *words])
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _ask(folder: str, words: list[str]) -> int | None:
    """How the command ended; None where it needs an interpreter of its own."""
    if _open() != [0, 1, 2]:  # it takes over, or lacks, what no other process can give it
        return None
    here = os.getcwd()
    asked = {"words": words, "env": dict(os.environ), "cwd": here}
    os.chdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect("socket")
            data = json.dumps(asked).encode() + b"\n"
            sent = socket.send_fds(server, [data], [0, 1, 2])
            while sent < len(data):
                sent += server.send(data[sent:])
            for number in _FORWARDED:
                signal.signal(number, lambda number, _: server.send(bytes([number])))
            answer = server.recv(4096)
    finally:
        os.chdir(here)
    return json.loads(answer).get("code", None) if answer else -signal.SIGKILL


def _open() -> list[int]:
    """The files that are open."""
    found = []
    for number in range(256):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found


main(sys.argv[1], sys.argv[2], sys.argv[3:])
