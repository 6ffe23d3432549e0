"""noxfile.py: the pipeline's weekly jobs are its sessions; what each calls, and that a torch that is there stays.

Covers: noxfile.py.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT

from ci.devices import load, pins

nox = pytest.importorskip("nox", reason="the environments of other releases of torch have none")
from nox.registry import get  # noqa: E402

import noxfile  # noqa: E402

LAST = load().releases[-1]


class Session:
    """One that runs nothing: commands by their words, and what each is said to print."""

    def __init__(self, bin: Path, *posargs: str, backend: str = "virtualenv", prints: str = "") -> None:
        self.bin, self.posargs, self.venv_backend, self.prints = str(bin), posargs, backend, prints
        self.ran: list[str] = []
        self.log = self.warn = lambda text: None

    def run(self, *words: str, silent: bool = False, **options: Any) -> str:
        self.ran.append(" ".join([f"{name}={value}" for name, value in options.get("env", {}).items()] + [*words]))
        return self.prints if silent else ""

    run_install = run

    def skip(self, text: str) -> None:
        raise LookupError(text)

    error = skip


def call(name: str, session: Session) -> list[str]:
    """Call a session; what it ran."""
    get()[name].func(session)
    return session.ran


def test_the_weekly_jobs_are_sessions_and_call_what_is_there() -> None:
    found = get()
    for job in (job for job in load().jobs if job.nightly):
        assert job.run == f"ci/nightly.sh {job.name}"
        assert job.name in found
    for release in load().whole:
        assert found[f"versions-{release.torch}"].python == release.python
    for _, command in noxfile.SCRIPTS.values():
        assert all((ROOT / word.partition("::")[0]).exists() for word in shlex.split(command) if "/" in word)
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["ci/test.sh --quick </dev/null", "ci/test.sh --slow </dev/null"]


def test_all_that_runs_on_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noxfile, "NOTHING_INSTALLED", False)
    python, name = str(tmp_path / "bin" / "python"), f"versions-{LAST.torch}"
    install, demo, leaves, tests = call(name, Session(tmp_path / "bin", prints="Would install xamp-0.1.0\n"))
    assert install.startswith(f"{python} -m pip install ")
    assert f" --constraint {tmp_path}/pins.txt torch=={LAST.torch} " in install
    assert (tmp_path / "pins.txt").read_text() == pins(LAST.torch)
    assert demo == f"XAMP_NO_VENV=1 PYTHON={python} XAMP_DEVICE=cpu ci/demo.sh"
    assert leaves == f"{python} -m pip install --no-build-isolation --dry-run .[torch]"
    assert tests.endswith(" tests/unit tests/conformance tests/distributed")
    with pytest.raises(LookupError, match="does not leave what is there as it was: Would install torch-3 "):
        call(name, Session(tmp_path / "bin", prints="Would install torch-3 xamp-0.1.0\n"))
    there = Session(tmp_path / "bin", "-x", backend="none", prints=f"{LAST.torch}+vendor\n")
    assert not [words for words in call(name, there) if " pip " in words]
    with pytest.raises(LookupError, match=r"this Python has torch 2\.1\.0\+vendor, and nothing is installed"):
        call(name, Session(tmp_path / "bin", backend="none", prints="2.1.0+vendor\n"))
