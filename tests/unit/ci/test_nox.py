"""noxfile.py: the pipeline's weekly jobs are its sessions; what each calls, and that a torch that is there stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ci_scripts import ROOT
from gathering import cases

from ci.devices import load, pins

nox = pytest.importorskip("nox", reason="the environments of other releases of torch have none")
from nox.command import CommandFailed  # noqa: E402
from nox.registry import get  # noqa: E402

import noxfile  # noqa: E402

LAST = load().releases[-1]
NEWER = [
    ("2.14.1, 2.15.0", ""),
    ("2.15.0+cpu", ""),
    ("2.15.0rc3", ""),
    ("2.16.0.dev20270101+cpu, 2.15.1", "2.16.0.dev20270101"),
    ("2.16.0rc1, 2.16.0, 2.15.0", "2.16.0"),
    ("2.15.0.post1", "2.15.0.post1"),
]


class Session:
    """One that runs nothing: commands by their words, and what each is said to print."""

    def __init__(self, bin: Path, *posargs: str, backend: str = "virtualenv", prints: str = "") -> None:
        self.bin, self.posargs, self.venv_backend, self.prints = str(bin), posargs, backend, prints
        self.ran: list[str] = []
        self.said: list[str] = []
        self.refused = "no such word"
        self.log = self.warn = self.said.append

    def run(self, *words: str, silent: bool = False, **options: Any) -> str:
        self.ran.append(" ".join([f"{name}={value}" for name, value in options.get("env", {}).items()] + [*words]))
        if self.refused in words:
            raise CommandFailed("no")
        return self.prints if silent else ""

    run_install = run

    def skip(self, text: str) -> None:
        raise LookupError(text)

    error = skip


def call(name: str, session: Session) -> list[str]:
    """Call a session; what it ran."""
    get()[name].func(session)
    return session.ran


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the Python of an environment is, in a folder of environments."""
    monkeypatch.setattr(nox.options, "envdir", str(tmp_path))
    monkeypatch.setattr(noxfile, "NOTHING_INSTALLED", False)
    folder = tmp_path / f"versions-{LAST.torch.replace('.', '-')}" / "bin"
    folder.mkdir(parents=True)
    return folder


def test_the_weekly_jobs_are_sessions() -> None:
    found = get()
    for job in load().jobs:
        if job.nightly:
            assert job.run == f"ci/nightly.sh {job.name}"
            assert job.name in found
    jobs = {job.name: job for job in load().jobs}
    for release in load().whole:
        session, job = found[f"versions-{release.torch}"], jobs[f"versions-{release.torch}"]
        assert session.python == release.python
        assert job.torch == release.torch
    assert {name for name, session in found.items() if not session.default} == {"smoke"}


def test_each_calls_scripts_that_are_there(place: Path) -> None:
    for name, session in get().items():
        if session.python is False:
            for words in call(name, Session(place)):
                assert (ROOT / words.split()[0]).is_file()
                assert all((ROOT / word.partition("::")[0]).exists() for word in words.split() if "/" in word)


def test_one_measures_all_that_commits_run(place: Path) -> None:
    (words,) = (words.split() for words in call("coverage", Session(place)))
    assert "--cov" in words
    assert words[-1] == "tests"
    assert not [word for word in words if word.startswith(("--tier", "-m", "--cov-fail"))]


def test_all_that_runs_on_a_release(place: Path) -> None:
    python = str(place / "python")
    install, demo, leaves, tests = call(f"versions-{LAST.torch}", Session(place, prints="Would install xamp-0.1.0\n"))
    assert install.startswith(f"{python} -m pip install ")
    assert f" --constraint {place.parent}/pins.txt torch=={LAST.torch} " in install
    assert all(name in install for name in ("hypothesis", "pytest-xdist", "scikit-learn", "rich"))
    assert (place.parent / "pins.txt").read_text() == pins(LAST.torch)
    assert demo == f"XAMP_NO_VENV=1 PYTHON={python} XAMP_DEVICE=cpu ci/demo.sh"
    assert leaves == f"{python} -m pip install --no-build-isolation --dry-run .[torch]"
    assert tests.startswith(f"XAMP_NO_VENV=1 PYTHON={python} ci/test.sh --device=cpu -n ")
    assert tests.endswith(" tests/unit tests/conformance tests/distributed")
    _, tests = call(f"versions-{LAST.torch}", Session(place, "--tier=quick"))
    assert tests.endswith(" --tier=quick tests/unit tests/conformance")
    with pytest.raises(LookupError, match="does not leave what is there as it was: Would install torch-3 "):
        call(f"versions-{LAST.torch}", Session(place, prints="Would install torch-3 xamp-0.1.0\n"))


def test_a_torch_that_is_there_stays(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON", "/opt/python")
    session = Session(place, "-x", backend="none", prints=f"{LAST.torch}+vendor\n")
    assert not [words for words in call(f"versions-{LAST.torch}", session) if " pip " in words]
    with pytest.raises(LookupError, match=r"this Python has torch 2\.1\.0\+vendor, and nothing is installed"):
        call(f"versions-{LAST.torch}", Session(place, backend="none", prints="2.1.0+vendor\n"))
    with pytest.raises(LookupError, match="nothing is installed"):
        call("newest", Session(place, backend="none"))


def test_a_smoke_of_what_is_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "python").touch()
    session = Session(place)
    _, tests = call("smoke", session)
    assert f"PYTHON={place}/python ci/test.sh --device=cpu tests/conformance/" in tests
    oldest = load().whole[0].torch
    told = f"torch {oldest} is left out: ci/nightly.sh versions-{oldest} --install-only makes its environment"
    assert session.said == [told]
    monkeypatch.setattr(noxfile, "NOTHING_INSTALLED", True)
    assert call("smoke", Session(place)) == [tests]


def test_which_is_newer() -> None:
    with cases() as case:
        for versions, found in NEWER:
            with case(versions):
                assert noxfile.newer(f"torch (2)\nAvailable versions: {versions}\n", "2.15.0") == found
    with pytest.raises(CommandFailed, match="which versions of torch the index has: no index answers"):
        noxfile.newer("no index answers\n", "2.15.0")


def test_the_newest_torch(place: Path) -> None:
    session = Session(place, prints=f"Available versions: {LAST.torch}+cpu, 2.14.1")
    assert len(call("newest", session)) == 1
    assert session.said == [
        f"torch {LAST.torch} is in ci/devices.toml, and the index has none that is newer: nothing to do"
    ]
    session = Session(place, prints="Available versions: 2.99.0rc1")
    session.refused = "--constraint"
    _, pinned, loose, tests = call("newest", session)
    assert " torch==2.99.0rc1 " in pinned
    assert pinned.replace(f"--constraint {place.parent}/pins.txt ", "") == loose
    assert tests.endswith(" --tier=quick tests/unit tests/conformance")
    assert session.said[-1].startswith("torch 2.99.0rc1 is not in ci/devices.toml yet")


def test_ci_run_ends_with_the_tests() -> None:
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert lines[-2:] == ["ci/test.sh --quick </dev/null", "ci/test.sh --slow </dev/null"]
    assert any(line.endswith("&& ci/nightly.sh smoke") for line in lines)
