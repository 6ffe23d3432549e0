"""A script under ``xamp run`` sees what it sees under ``python``, and ends as it ends there.

Covers: xamp.run.script.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked_python import python

from xamp.cli import main

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Writes a script and runs it in this process."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # a process group adds the rank to tracebacks

    def run(text: str, *words: str, options: tuple[str, ...] = ()) -> int:
        script = tmp_path / "script.py"
        script.write_text(text, encoding="utf-8")
        return main(["run", "--device", "cpu", *options, str(script), *words])

    return run


SEEN = """
import __main__, os, sys
here = os.path.dirname(os.path.abspath(sys.argv[0]))
print(__name__, os.path.basename(__file__), sys.argv[1:], sys.path[0] == here, __spec__, __package__)
print(__main__.__dict__ is globals(), sorted(name for name in globals() if name.startswith("__")))
"""


def test_it_sees_what_it_sees_under_python(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    assert run(SEEN, "--device", "x", "-m", "y", "--") == 0
    seen = capsys.readouterr().out
    plain = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), "--device", "x", "-m", "y", "--"], capture_output=True, text=True
    )
    assert seen == plain.stdout != ""
    assert (sys.argv, list(sys.path), sys.modules["__main__"]) == before


THREADS = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(int).result()
threading.Thread(target=lambda: (time.sleep(0.2), print("done"))).start()
"""


BESIDE = """
import sys, threading
from xamp.cli import main
end = threading.Event()
other = threading.Thread(target=end.wait)
other.start()
code = main(["run", "--device", "cpu", sys.argv[1]])
print(code, other.is_alive(), flush=True)
end.set()
"""


def test_it_waits_for_the_scripts_threads_and_for_no_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(THREADS, encoding="utf-8")
    done = subprocess.run(
        [python(), "-c", BESIDE, str(script)], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "done\n0 True\n"


@pytest.mark.parametrize(
    ("text", "code"), [("pass", 0), ("import sys; sys.exit(7)", 7), ("raise SystemExit", None), ("exit('no')", "no")]
)
def test_it_exits_as_it_says(text: str, code: object, run: Run) -> None:
    if code == 0:
        assert run(text) == 0
        return
    with pytest.raises(SystemExit) as stopped:
        run(text)
    assert stopped.value.code == code


def test_a_traceback_shows_the_script_only(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("def f():\n    raise KeyError('mine')\nf()\n") == 1
    shown = capsys.readouterr().err
    plain = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True).stderr
    assert shown == plain != ""
    assert isinstance(sys.last_value, KeyError)


def test_a_syntax_error_is_shown_as_python_shows_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("x = 1\nprint 'old'\n") == 1
    shown = capsys.readouterr().err
    assert 'script.py", line 2' in shown
    assert "the script's age: this is Python 2" in shown


def test_a_missing_script_and_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--device", "cpu", "/nowhere/train.py"])
    assert stopped.value.code == 2
    assert "can't open file '/nowhere/train.py'" in capsys.readouterr().err
    assert main(["run", "--device", "cpu"]) == 2
    assert "no script given" in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_DEVICE", "cpu")
    assert main(["run", "--device", "quipu", "train.py"]) == 2
    assert "quipu" in capsys.readouterr().err


def test_a_module(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "train.py").write_text(
        "import sys, torch\nprint(__name__, __package__, __spec__.name, sys.argv[1:], torch.ones(1).cuda().device)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--device", "cpu", "-m", "pack.train", "-x", "--device", "1"]) == 0
    assert capsys.readouterr().out == "__main__ pack pack.train ['-x', '--device', '1'] cpu\n"


TRAINS = """
import apex, torch
from apex import amp
model = torch.nn.Linear(3, 1).cuda()
for _ in range(4):
    model(torch.ones(2, 3).cuda(non_blocking=True))
model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O2", verbosity=0)
print(apex.amp.scale_loss is amp.scale_loss)
print(torch.cuda.is_available())
"""


def test_the_report_lists_what_to_port(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # whatever this machine has
    assert run(TRAINS) == 0
    said = capsys.readouterr()
    assert said.out == "True\nFalse\n"
    lines = [line.split() for line in said.err.splitlines()]
    assert ["4", "Tensor.cuda()", "script.py:6", "->", ".to(xamp.device())"] in lines
    assert ["1", "Module.cuda()", "script.py:4", "->", ".to(xamp.device())"] in lines
    assert ["1", "torch.cuda.is_available()", "->", "False", "script.py:9"] in lines


REFUSES = "import torch\nassert torch.cuda.is_available(), 'needs a GPU'\nprint('ran')\n"


def test_a_script_that_refuses_is_told_how(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # whatever this machine has
    assert run(REFUSES) == 1
    said = capsys.readouterr().err
    assert "AssertionError: needs a GPU" in said
    assert "told the truth. If it stopped for that: --pretend-cuda" in said
    assert run(REFUSES, options=("--pretend-cuda",)) == 0
    said_then = capsys.readouterr()
    assert said_then.out == "ran\n"
    assert "pretended, because of --pretend-cuda" in said_then.err
    assert not torch.cuda.is_available()


AGED = """
import torch
label = torch.full((3,), 1, device="cuda")
torch.nn.BCEWithLogitsLoss()(torch.zeros(3, device="cuda"), label)
"""


def test_a_fault_of_age_is_shown_and_explained(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(AGED) == 1
    said = capsys.readouterr().err
    assert "RuntimeError" in said
    assert "the script's age: until torch 1.6, torch.full() of an int made a float tensor" in said


SPAWNS = """
import torch, torch.multiprocessing as mp
def work(rank):
    torch.zeros(2).cuda(rank)
if __name__ == "__main__":
    work(0)
    mp.spawn(work, nprocs=1)
"""


@pytest.mark.slow
def test_processes_that_it_spawns_are_redirected_and_counted(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(SPAWNS) == 0
    lines = [line.split()[:2] for line in capfd.readouterr().err.splitlines()]
    assert ["2", "Tensor.cuda()"] in lines


EXITS = """
import atexit, sys, threading, time, torch
atexit.register(lambda: print(torch.ones(1).cuda().device, flush=True))
threading.Thread(target=lambda: (time.sleep(0.3), print(torch.ones(1).cuda().device, flush=True))).start()
sys.exit(5)
"""


@pytest.mark.slow
def test_the_command_lasts_until_threads_and_exit_handlers_have_ended(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(EXITS)
    done = subprocess.run(
        [python(), "-m", "xamp", "run", "--device", "cpu", str(script)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (5, "cpu\ncpu\n")
    assert "Tensor.cuda()" in done.stderr
