"""The executable whose processes are forked: each command ends as under Python itself, or is run by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import python
from site_packages import distribution, plain_environment

TORCH = "import sys; print('torch' in sys.modules)"
SAYS = "import sys; print(sys.argv, input()); print('x', file=sys.stderr); sys.exit({code})"
SCRIPT = "import os, sys, __main__\nprint(sys.argv, __name__, __file__, sys.path[0], __main__.__dict__ is globals())\n"
COMMANDS = {
    "words": ["-c", SAYS.format(code=0), "--a", "-c", ""],
    "code": ["-c", SAYS.format(code=300)],
    "text": ["-c", SAYS.format(code="'bad'")],
    "nothing": ["-c", SAYS.format(code=None)],
    "error": ["-c", "def f():\n    1 / 0\nf()"],
    "warning": ["-W", "error", "-c", "import warnings\nwarnings.warn('old', DeprecationWarning)"],
    "ignored": ["-W", "ignore", "-c", "import warnings\nwarnings.warn('old')"],
    "filters": ["-W", "error", "-c", "import sys, warnings\nprint(sys.warnoptions, warnings.filters[-6:])"],
    "path": ["-c", "import sys; print(sys.path)"],
    "script": ["script.py", "-x"],
    "module": ["-m", "script", "-x"],
    "package": ["-m", "pack.part", "-x"],
    "no module": ["-m", "no_such_module"],
    "threads": ["-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print(1))).start()"],
    "handlers": ["-c", "import atexit, sys; atexit.register(print, 'end'); sys.stdout.write('no line')"],
    "leaves": ["-c", "import os; print('lost'); os._exit(9)"],
    "signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "kill": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    "crash": ["-c", "import ctypes; ctypes.string_at(0)"],
    "folder": ["-c", "import os; print(os.getcwd(), os.environ['MINE'], os.environ.get('HOME'))"],
    "options": ["-I", "-c", "import sys; print(sys.flags)"],
    "children": ["-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(2)'], check=True)"],
}


def run(executable: str, words: list[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    environment = plain_environment(folder, **variables)
    done = subprocess.run(
        [executable, *words], env=environment, cwd=folder, input="said\n", capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr.replace(executable, "python")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").touch()
    (folder / "pack" / "part.py").write_text(SCRIPT)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_as_under_python(name: str, folder: Path) -> None:
    found = run(python(), COMMANDS[name], folder, MINE="1")
    wanted = run(sys.executable, COMMANDS[name], folder, MINE="1")
    assert found == wanted


def test_torch_is_imported_already_and_xamp_is_not() -> None:
    forks = python() != sys.executable
    code, said, _ = run(python(), ["-c", f"{TORCH}; print('xamp' in sys.modules)"], Path.cwd())
    assert (code, said) == (0, f"{forks}\nFalse\n")


NEW = {
    "a torch of one's own": {"torch/__init__.py": ""},
    "what runs as Python starts": {"sitecustomize.py": ""},
    "a module of Python's own": {"json.py": ""},
}


@pytest.mark.parametrize("files", NEW.values(), ids=NEW)
def test_what_a_fork_would_miss_gets_an_interpreter_of_its_own(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run(python(), ["-c", TORCH], tmp_path)[1] == "False\n"


def test_a_folder_that_is_no_package_hides_nothing(tmp_path: Path) -> None:
    """The site of docs/ is built into one that is called as a module of Python."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()
    assert run(python(), ["-c", TORCH], tmp_path)[1] == f"{python() != sys.executable}\n"


@pytest.mark.parametrize("name", ["TORCH_SHOW_CPP_STACKTRACES", "PYTHONOPTIMIZE", "NVIDIA_TF32_OVERRIDE"])
def test_a_variable_that_is_read_at_the_start_gets_one_too(name: str, tmp_path: Path) -> None:
    assert run(python(), ["-c", TORCH], tmp_path, **{name: "0"})[1] == "False\n"


def test_an_extension_of_torch_gets_one_too(tmp_path: Path) -> None:
    distribution(tmp_path, "quipu", "quipu = quipu:start", "torch.backends", quipu="def start(): pass")
    assert run(python(), ["-c", TORCH], tmp_path)[1] == "False\n"
    without = run(python(), ["-c", TORCH], tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert without[1] == run(python(), ["-c", TORCH], tmp_path.parent)[1]


def test_what_is_killed_ends_with_all_that_it_started(tmp_path: Path) -> None:
    sleeps = "import os, sys, time; open(sys.argv[1], 'a').write(f'{os.getpid()}\\n'); time.sleep(1e6)"
    code = f"import os, sys\nos.fork()\nexec({sleeps!r})"
    pids = tmp_path / "pids"
    process = subprocess.Popen([python(), "-c", code, str(pids)], start_new_session=True)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in map(int, pids.read_text().split()):
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split():
            time.sleep(0.01)
