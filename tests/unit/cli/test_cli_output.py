"""Commands whose output is closed, full or not read to its end, and whose words are empty.

Covers: xamp.cli._output, xamp.__main__.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from site_packages import plain_environment

from xamp.cli import main, policy

COMMANDS = {
    "policy": ["policy", "show", "cpu.json"],
    "version": ["--version"],
    "help": ["conformance", "--help"],
}


def run(shell: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = plain_environment(PYTHON=sys.executable, OMP_NUM_THREADS="1")
    command = ["bash", "-c", f'set -o pipefail; "$PYTHON" -m xamp "$@" {shell}', "-", *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a device that was saved, to show which takes no torch."""
    (tmp_path / "cpu.json").write_text(json.dumps(policy.show("cpu", "native")))
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_closed_output_is_no_error(name: str, folder: Path) -> None:
    done = run(">&-", folder, *COMMANDS[name])
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_output_is_said_in_one_line(folder: Path) -> None:
    done = run("> /dev/full", folder, *COMMANDS["policy"])
    assert done.returncode == 2
    assert done.stderr == f"xamp: the output cannot be written: {os.strerror(errno.ENOSPC)}\n"


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    done = run("| true", tmp_path, "conformance", "--help")
    assert done.returncode in (0, 141)  # it may have written all before
    assert done.stderr == ""


def test_an_output_that_breaks_inside_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from xamp.cli import port

    def stopped(_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def other(_: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "No such file", "x.py")

    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        monkeypatch.setattr(port, "run", stopped)
        assert main(["port", "x.py"]) == 141
        monkeypatch.setattr(port, "run", full)
        assert main(["port", "x.py"]) == 2
        monkeypatch.undo()
    assert "the output cannot be written: No space left" in capsys.readouterr().err
    monkeypatch.setattr(port, "run", other)
    with pytest.raises(FileNotFoundError):
        main(["port", "x.py"])


@pytest.mark.parametrize(
    "words",
    [
        ["conformance", "--device", ""],
        ["conformance", "--device", " "],
        ["conformance", "--require", ""],
        ["conformance", "--require", " , "],
        ["conformance", "--clause", ""],
        ["conformance", "--backend", ""],
        ["run", "--device", "", "x.py"],
    ],
    ids=" ".join,
)
def test_an_empty_word_is_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert f"argument {words[1]}: is empty: name something, or leave the option out" in capsys.readouterr().err
