"""``xamp --help``, completion in shells, colours and progress.

Covers: xamp.cli, xamp.cli._help, xamp.cli.completion.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from xamp.cli import _conformance_text, _parser, main
from xamp.cli._help import EXAMPLES, GROUPS
from xamp.testing.run import Result


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def test_the_help_lists_every_command_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 or max(lines, key=len).startswith("Mixed precision")
    modules = {p.stem for p in Path(_conformance_text.__file__).parent.glob("[a-z]*.py")}
    assert set(commands()) == modules == {name for group in GROUPS.values() for name in group}
    for name in commands():
        assert sum(line.startswith(f"  {name} ") and not line.startswith(f"  {name}  xamp") for line in lines) == 1


def test_the_examples_are_right() -> None:
    for example in EXAMPLES:
        _parser().parse_args(shlex.split(example)[1:])


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "your script:" in capsys.readouterr().err


def completed(script: str, line: str) -> list[str]:
    """What bash offers after ``line``; the last word is what was begun."""
    words = line.split(" ")
    code = f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n_xamp\n"
    bash = shutil.which("bash") or "bash"
    done = subprocess.run(
        [bash, "--norc", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "xamp do") == ["doctor"]
    assert set(commands()) <= set(completed(script, "xamp "))
    assert completed(script, "xamp policy s") == ["show"]
    assert completed(script, "xamp policy show --op") == ["--op-policy"]
    assert {"portable", "native"} <= set(completed(script, "xamp policy show cuda --op-policy "))
    assert completed(script, "xamp completion z") == ["zsh"]
    assert completed(script, "xamp conformance --ju") == ["--junit"]
    assert completed(script, "xamp nonsense --ju") == []


def options() -> Iterator[tuple[str, str]]:
    for name, parser in commands().items():
        for action in parser._actions:
            yield from ((name, option) for option in action.option_strings)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_all_words(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, option in options():
        mark = f'"xamp {name}") found="' if shell == "zsh" else f"__fish_seen_subcommand_from {name}"
        lines = [line for line in script.splitlines() if mark in line]
        assert lines, (name, shell)
        word = option if shell == "zsh" else f"-l {option[2:]} " if option[:2] == "--" else f"-s {option[1:]} "
        assert any(word in line for line in lines), (name, option)
    if found := shutil.which(shell):
        (tmp_path / "script").write_text(script, encoding="utf-8")
        assert subprocess.run([found, "-n", str(tmp_path / "script")], check=False).returncode == 0


def result(clause: str) -> Result:
    return Result(lane="cpu", clause=clause, outcome="passed", reason="", text="", seconds=1.0)


def test_progress_in_a_pipe_says_what_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr("xamp.cli._conformance_text.time.monotonic", lambda: now[0])
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI services set it; it asks for colours, not for a bar
    with _conformance_text.Progress() as progress:
        progress.begin({("cpu", "probe"): 3})
        for clause in ("probe.a", "probe.b", "probe.c"):
            progress.start("cpu", clause)
            now[0] += 15.0
            progress.end(result(clause))
    err = capsys.readouterr().err
    assert err.splitlines() == ["cpu  probe.c: 2 of 3 done after 30 s", "cpu  probe        3 passed in 3 s"]


def test_no_color(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    words = ["conformance", "--device", "cpu", "--clause", "probe.seed"]
    assert main(words) == 0
    assert "\x1b[32m" in capsys.readouterr().out  # green
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "passed" in out
    assert "\x1b[3" not in out + err  # 30 to 37 are colours; bold and dim are none
