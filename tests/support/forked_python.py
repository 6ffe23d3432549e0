"""A Python that starts in a tenth of the time: its processes are forked from one that has imported torch.

``[python(), "-c", ...]`` stands in a command where ``[sys.executable, "-c", ...]`` would: arguments, environment,
folder, standard streams and exit code are those of the command, and who kills it kills what it runs. A command that a
fork cannot do right is run by ``sys.executable`` itself: ``is_new`` of ``forked_python_server.py`` says which. So is
each where processes cannot be forked, or a device was started by the imports.

A test that asks what an import brings, or how Python starts, takes ``sys.executable``: here torch is imported already.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import forking

__all__ = ["python"]

_SERVER = Path(__file__).resolve().with_name("forked_python_server.py")
_ENVIRONMENT = os.environ.copy()  # of the whole run: a test changes its own, also whether it is measured


@functools.cache
def python() -> str:
    """The path of the executable; that of this Python where no process can be forked from one that imported torch."""
    if not (hasattr(os, "fork") and hasattr(socket, "send_fds")):
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="xamp-python-"))
    server = subprocess.Popen(
        [sys.executable, _SERVER, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**{name: value for name, value in _ENVIRONMENT.items() if name != "PYTHONPATH"}, **forking.SETTINGS},
        cwd=folder,
    )
    assert server.stdout is not None
    ready = server.stdout.readline().strip() == b"ready"
    atexit.register(_end, server, folder)
    return str(folder / "python") if ready else sys.executable


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.communicate()  # closes its standard input, which ends it
    shutil.rmtree(folder, ignore_errors=True)
