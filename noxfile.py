"""What takes too long for each commit, as sessions of nox: ``ci/nightly.sh`` installs nox and calls it.

    ci/nightly.sh                        all, of which each takes less than an hour; some hours on two cores
    ci/nightly.sh faults versions-2.8.0  these; --list says which there are
    .venv/bin/nox --tag versions         the same without the script: each tested release of torch

Most call a script of ci/, which finds or makes the environment: a torch that is there stays. A release of torch has an
environment of its own, with that torch and what CI pins beside it, in ``XAMP_VERSIONS`` (xamp-versions in the user's
cache): all checkouts share them. ``XAMP_NO_VENV=1 ci/nightly.sh`` makes none, and runs with the Python that is there.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import sys
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))
from ci.devices import ROOT, Release, load, pins

RELEASES = load().whole
NOTHING_INSTALLED = os.environ.get("XAMP_NO_VENV") == "1"
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_EXTRAS = ("demo", "project-tests", "kernels")
_ROOMS = ("tests/unit", "tests/conformance")
_SHARED = ("-n", os.environ.get("XAMP_TEST_WORKERS", "2"), "--dist=loadfile", "--no-loadscope-reorder")
_SUITE = "tests/conformance/test_conformance.py::TestCpu::test_"
_SMOKE = (
    *(_SUITE + name for name in ("effective", "trains_like_eager", "resume_is_bit_identical", "grad_scaler")),
    "tests/unit/scaling/test_step_compiled.py::test_a_step_has_the_bits_of_the_eager_one",
    "tests/unit/casting/test_autocast.py",
    "tests/unit/apex/test_apex_state.py",
    "tests/unit/apex/test_apex_o1_functions.py",
)

nox.options.envdir = os.path.abspath(os.environ.get("XAMP_VERSIONS") or _CACHE / "xamp-versions")
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
if NOTHING_INSTALLED:
    nox.options.force_venv_backend = "none"


SCRIPTS = {
    "kernels": ("Operators of an emulated card.", "ci/test.sh --all -m kernels tests/emulated/test_inside.py"),
    "emulated-910b2": ("All tests on an emulated 910B2.", "ci/test.sh --all -k Ascend910B2 tests/emulated"),
    "emulated-910a": ("All tests on an emulated 910A.", "ci/test.sh --all -k Ascend910A tests/emulated"),
    "emulated-rest": ("Other chips, commands, scripts.", "ci/test.sh --all -k 'not 910A and not 910B2' tests/emulated"),
    "ranks": ("Four processes.", "ci/test.sh --all -m 'thorough or drawn' tests/distributed"),
    "faults": ("Every point at which a fault is injected.", "ci/test.sh --all tests/faults"),
    "thorough": ("All cases of each test.", "ci/test.sh --all -m 'thorough or drawn' tests/unit tests/conformance"),
    "cards": ("The kernels compiled for other cards.", "ci/kernels.sh sm_80 sm_89 sm_100"),
    **{  # that other releases of torch bring than the pinned one, and the newest
        f"triton-{each}": (f"The kernels compiled by Triton {each}.", f"ci/kernels.sh --triton {each} sm_90 gfx942")
        for each in ("3.3.1", "3.6.0", "newest")
    },
    "standin": ("The conformance suite on a card's gaps.", "ci/device.sh standin"),
    "mutants": ("Faults that are made from the code.", "ci/mutants.sh"),
    # with a word of ours it writes no tests/libraries/results.json
    "libraries": ("Other projects' libraries.", "ci/test.sh --libraries -q"),
    "coverage": (
        "The lines that tests reach, and the floor of pyproject.toml.",
        f"ci/test.sh -p pytest_cov {' '.join(_SHARED)} --cov --cov-report=term-missing:skip-covered tests",
    ),
}


for _name, (_what, _command) in SCRIPTS.items():

    def _call(session: nox.Session, command: str = _command) -> None:
        session.run(*shlex.split(command))

    _call.__doc__ = _what
    nox.session(python=False, name=_name)(_call)


def _on(release: Release) -> None:
    """Add the session of a release of torch."""

    @nox.session(name=f"versions-{release.torch}", python=release.python, tags=["versions"])
    def versions(session: nox.Session) -> None:
        """All tests on this torch, the demo, and that pip leaves torch as it was; words after -- go to the tests."""
        python = _with_torch(session, release.torch)
        if not session.posargs:
            session.run("ci/demo.sh", env={"XAMP_NO_VENV": "1", "PYTHON": python, "XAMP_DEVICE": "cpu"}, external=True)
            _leaves_torch(session, python)
        # Ranks take no tier: each of their tests is slow.
        places = _ROOMS if session.posargs else (*_ROOMS, "tests/distributed")
        _test(session, python, *_SHARED, *session.posargs, *places)


for _release in RELEASES:
    _on(_release)


@nox.session(python=False, default=False)
def smoke(session: nox.Session) -> None:
    """Some tests of everything on the oldest and the newest torch, where their environments are there."""
    for release in (RELEASES[0], RELEASES[-1]):
        name = f"versions-{release.torch}"
        python = Path(str(nox.options.envdir), name.replace(".", "-"), "bin", "python")
        if python.exists():
            _install(session, str(python), release.torch)
            _test(session, str(python), *_SMOKE)
        else:
            session.log(f"torch {release.torch} is left out: ci/nightly.sh {name} --install-only makes its environment")


def requirements(torch: str) -> list[str]:
    """What goes into the environment of a release; xamp does not, so that all checkouts can use it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = [setup["options.extras_require"][extra].strip().splitlines() for extra in _EXTRAS]
    return [f"torch=={torch}", *dict.fromkeys(line for lines in extras for line in lines)]


def _with_torch(session: nox.Session, torch: str) -> str:
    """The Python of a release's environment; one that is there already must have that torch, and stays as it is."""
    if session.venv_backend != "none":
        python = str(Path(session.bin, "python"))
        _install(session, python, torch)
        return python
    python, ask = os.environ.get("PYTHON", sys.executable), "import torch; print(torch.__version__)"
    there = str(session.run(python, "-W", "ignore", "-c", ask, silent=True)).strip()
    if there.partition("+")[0] != torch:
        session.skip(f"this Python has torch {there}, and nothing is installed")
    return python


def _install(session: nox.Session, python: str, torch: str) -> None:
    """Complete an environment. Where nothing is missing pip asks no index."""
    if not NOTHING_INSTALLED:
        file = Path(python).parent.parent / "pins.txt"
        file.write_text(pins(torch), encoding="utf-8")
        words = ["--disable-pip-version-check", "--quiet", "--constraint", str(file), *requirements(torch)]
        session.run_install(python, "-m", "pip", "install", *words, external=True)


def _test(session: nox.Session, python: str, *words: str) -> None:
    """Tests on the CPU. Those that this machine's devices have besides say nothing about a release of torch."""
    session.run("ci/test.sh", "--device=cpu", *words, env={"XAMP_NO_VENV": "1", "PYTHON": python}, external=True)


def _leaves_torch(session: nox.Session, python: str) -> None:
    """Fail if ``pip install '.[torch]'`` would change more than xamp."""
    words = ["--no-build-isolation", "--dry-run", ".[torch]"]
    told = session.run(python, "-m", "pip", "install", *words, silent=True, external=True)
    packages = re.search(r"^Would install (.*)$", str(told), re.MULTILINE)
    if told and (packages is None or not re.fullmatch(r"xamp-\S+", packages[1])):
        session.error(f"pip install '.[torch]' does not leave what is there as it was: {told}")
