"""The parts: what each runs, and the content of which its result is true. Each takes less than an hour on two cores."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence

from ci.devices_data import load
from ci.stages.stage import Stage, Step, pytest_step
from ci.versions.newest import UNTESTED_FAILS
from ci.versions.stages import stage

__all__ = ["Part", "of_releases", "parts"]

_LIMIT = 3500.0  # seconds
_CORE = ("xamp/", "backends/", "setup.cfg", "pyproject.toml", "ci/constraints/ci.txt")
_TESTS = ("tests/conftest.py", "tests/support/", "tests/ledger.toml")
_COMPILED = ("xamp/onepass/", "xamp/plans/", "ci/kernels/", "ci/kernels.sh", "ci/constraints/ci.txt")
_TRITONS = ("3.3.1", "3.6.0", "newest")
_KERNELS = ("backends/npu/emulation/", "tests/emulated/inside/", "tests/emulated/test_inside.py")


@dataclasses.dataclass(frozen=True)
class Part:
    """A stage, and what it says something about.

    Attributes:
        stage: the stage.
        content: files and folders, as :func:`ci.nightly.content.hash_of` takes them.
        about: what the result says besides, such as the version of torch.
    """

    stage: Stage
    content: Sequence[str]
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parts(jobs: int) -> list[Part]:
    """All parts, in order. ``jobs`` workers share the tests of each."""
    return [
        _tests("kernels", "the operators that an emulated card computes", jobs, _KERNELS, "-m", "kernels"),
        _tests("emulated-910b2", "all tests on an emulated 910B2", jobs, _emulated(), "-k", "Ascend910B2"),
        _tests("emulated-910a", "all tests on an emulated 910A", jobs, _emulated(), "-k", "Ascend910A"),
        _tests("emulated-rest", "other chips, commands and scripts", jobs, _emulated(), "-k", "not 910A and not 910B2"),
        _tests("ranks", "four processes", jobs, (*_CORE, *_TESTS, "tests/distributed/"), "-m", "thorough"),
        _tests("faults", "every point at which a fault is injected", jobs, (*_CORE, *_TESTS, "tests/faults/")),
        _tests("thorough", "all cases of those that have a sample", jobs, _rooms(), "-m", "thorough"),
        _command("cards", "the kernels compiled for other cards", "ci/kernels.sh sm_80 sm_89 sm_100", _COMPILED),
        _tritons(),
        _command("standin", "the suite on a card's gaps", "ci/device.sh standin", (*_CORE, "tests/outside/")),
        _mutants(),
        _libraries(),
        *of_releases(jobs),
        _newest(),
        _coverage(jobs),
    ]


def of_releases(jobs: int, *, quick: bool = False) -> list[Part]:
    """A part for each release of torch on which all tests run."""
    content = (*_rooms(), "tests/distributed/", "examples/", "ci/versions/", "ci/devices.toml")
    return [
        Part(stage(release, jobs, quick=quick), content, {"torch": release.torch, "python": release.python})
        for release in load().whole
    ]


def _newest() -> Part:
    """What fails on a torch that is out and not in the table yet is told, and is no failure."""
    says = {UNTESTED_FAILS: "tests fail on a torch that is not in ci/devices.toml yet, see results/newest.json"}
    step = Step("newest", ["ci/versions.sh", "newest"], accepts=(0, UNTESTED_FAILS), says=says)
    what = "the newest torch of the index"
    return Part(Stage("newest", what, _LIMIT, [step], anew=True), (*_rooms(), "ci/versions/"))


def _emulated() -> Sequence[str]:
    return (*_CORE, *_TESTS, "tests/emulated/")


def _rooms() -> Sequence[str]:
    return (*_CORE, *_TESTS, "tests/unit/", "tests/conformance/")


def _tests(name: str, what: str, jobs: int, content: Sequence[str], *words: str) -> Part:
    folders = [place for place in content if place.startswith("tests/") and place not in _TESTS]
    files = [place for place in folders if place.endswith(".py")] or folders
    step = pytest_step(["--all", *words, *files], jobs, dist="loadfile")
    return Part(Stage(name, what, _LIMIT, [step]), content)


def _command(name: str, what: str, command: str, content: Sequence[str]) -> Part:
    return Part(Stage(name, what, _LIMIT, [Step(name, command.split())]), content)


def _tritons() -> Part:
    """The Triton of each tested torch that has another one than the pinned, and the newest."""
    steps = [Step(f"triton-{one}", ["ci/kernels.sh", "--triton", one, "sm_90", "gfx942"]) for one in _TRITONS]
    return Part(Stage("tritons", "the kernels compiled by other Tritons", _LIMIT, steps), _COMPILED)


def _mutants() -> Part:
    step = Step("mutants", ["ci/mutants.sh"])
    return Part(Stage("mutants", "faults that are made from the code", _LIMIT, [step]), (*_rooms(), "ci/mutants.toml"))


def _libraries() -> Part:
    step = Step("libraries", ["ci/test.sh", "--libraries", "-p", "ci.stages.keep"], accepts=(0, 1, 5), tests=True)
    content = (*_CORE, *_TESTS, "tests/libraries/", "ci/constraints/libraries.txt")
    return Part(Stage("libraries", "other projects' libraries", _LIMIT, [step]), content)


def _coverage(jobs: int) -> Part:
    """Tests that passed before are not run again, and what they reached stays: each run adds to it."""
    coverage = [sys.executable, "-m", "coverage"]
    words = ["-p", "pytest_cov", "--cov", "--cov-append", "--cov-report=", "--cov-fail-under=0", "tests"]
    steps = [
        Step("forget", [*coverage, "erase"]),
        pytest_step(words, jobs, dist="loadfile"),
        Step("report", [*coverage, "report"], says={2: "the coverage is below the floor of pyproject.toml"}),
    ]
    return Part(Stage("coverage", "the lines that tests reach", _LIMIT, steps), (*_rooms(), "tests/"))
