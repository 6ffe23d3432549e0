"""What runs on each release: the tests, two ranks, the demo, and that ``pip install .`` leaves torch as it was."""

from __future__ import annotations

import sys

from ci.devices_data import Release
from ci.stages.stage import Stage, Step, pytest_step
from ci.versions import interpreters
from ci.versions.environments import Environment

__all__ = ["name_of", "quick_tests", "smoke", "stage"]

_LIMIT = 3500.0  # seconds
_SUITE = "tests/conformance/test_conformance.py::TestCpu::test_"
_SMOKE = (
    *(_SUITE + name for name in ("effective", "trains_like_eager", "resume_is_bit_identical", "grad_scaler")),
    "tests/unit/scaling/test_step_compiled.py::test_a_step_has_the_bits_of_the_eager_one",
    "tests/unit/casting/test_autocast.py",
    "tests/unit/apex/test_apex_state.py",
    "tests/unit/apex/test_apex_o1_functions.py",
)
_RANKS = ("tests/distributed/test_ddp.py", "tests/distributed/test_decide.py")


def name_of(torch: str, quick: bool = False) -> str:
    """How the stage of a release is called."""
    return f"versions-{torch}{'-quick' if quick else ''}"


def stage(release: Release, jobs: int, *, quick: bool = False) -> Stage:
    """All that runs on a release, by ``jobs`` workers; with ``quick`` the tests that take a moment."""
    there = Environment(release.torch, release.python)
    tests = ["--tier=quick"] if quick else []
    ranks = _RANKS if quick else ("tests/distributed",)
    make = [sys.executable, "-m", "ci.versions", "make", there.torch]
    demo = ["env", "XAMP_NO_VENV=1", "XAMP_DEVICE=cpu", f"PYTHON={there.interpreter}", "ci/demo.sh"]
    steps = [
        Step("make", make, vital=True),
        _compiled(there),
        _pytest(there, "tests", jobs, *tests, "tests/unit", "tests/conformance"),
        _pytest(there, "ranks", jobs, *ranks),
        Step("demo", demo),
        Step("install", [sys.executable, "-m", "ci.versions.untouched", there.interpreter]),
    ]
    what = f"torch {release.torch} on Python {release.python}"
    return Stage(name_of(release.torch, quick), what, _LIMIT, steps, lacks=_lacks(there))


def smoke(there: Environment) -> Stage:
    """Some tests of everything: levels, a compiled step, a checkpoint, GradScaler, autocast, xamp.apex."""
    what = f"some tests on torch {there.torch}"
    return Stage(f"smoke-{there.torch}", what, 300.0, [_pytest(there, "tests", 1, *_SMOKE)])


def quick_tests(there: Environment, jobs: int, name: str) -> Stage:
    """The tests that take a moment, in an environment that is made before."""
    steps = [_compiled(there), _pytest(there, "tests", jobs, "--tier=quick", "tests/unit", "tests/conformance")]
    return Stage(name, f"torch {there.torch} on Python {there.python}", _LIMIT, steps)


def _compiled(there: Environment) -> Step:
    """What comes before tests: else each of the processes that they start may compile xamp, which takes 0.25 s."""
    places = ["xamp", "backends", "tests/support"]
    return Step("compile", [there.interpreter, "-m", "compileall", "-qq", *places], accepts=(0, 1))


def _pytest(there: Environment, name: str, jobs: int, *words: str) -> Step:
    """Tests on the CPU. Those that this machine's devices have besides say nothing about a release of torch."""
    return pytest_step(["--device=cpu", *words], jobs, name, "loadfile", there.interpreter)


def _lacks(there: Environment) -> str:
    """Why an environment cannot be had; empty if it is there, or can be made."""
    if not there.why_not():
        return ""
    try:
        interpreters.find(there.python)
    except interpreters.NoInterpreter as error:
        return str(error)
    return ""
