"""The executable whose processes are forked: each command ends as under Python itself, or is run by it.

Covers: tests/support/forked_python.py, tests/support/forked_python_server.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked_python import python
from site_packages import plain_environment

TORCH = "import sys; print('torch' in sys.modules)"
COMMANDS = {
    "words": ["-c", "import sys; print(sys.argv, input(), sys.path); sys.exit(300)", "--a", "-c", ""],
    "error": ["-W", "error", "-c", "import warnings\nwarnings.warn('old', DeprecationWarning)"],
    "no module": ["-m", "no_such_module"],
    "handlers": ["-c", "import atexit, sys; atexit.register(print, 'end'); sys.stdout.write('no line')"],
    "signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "options": ["-I", "-c", "import sys; print(sys.flags)"],
}


def run(executable: str, words: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    where = {"env": plain_environment(folder, **variables), "cwd": folder}
    done = subprocess.run([executable, *words], input="said\n", capture_output=True, text=True, check=False, **where)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr.replace(executable, "python")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_as_under_python(name: str, tmp_path: Path) -> None:
    assert run(python(), COMMANDS[name], tmp_path) == run(sys.executable, COMMANDS[name], tmp_path)


def test_what_a_fork_would_miss_gets_an_interpreter_of_its_own(tmp_path: Path) -> None:
    assert run(python(), ["-c", TORCH], tmp_path)[1] == f"{python() != sys.executable}\n"
    assert run(python(), ["-c", TORCH], tmp_path, PYTHONOPTIMIZE="0")[1] == "False\n"
    (tmp_path / "sitecustomize.py").touch()
    assert run(python(), ["-c", TORCH], tmp_path)[1] == "False\n"
