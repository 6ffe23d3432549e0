"""The stages of a run: what each of them calls, and what it needs. The most valuable ones come first."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["FILE", "Plan", "Stage", "Step", "is_there", "stages"]

FILE = "{file}"
"""In a command: the file into which it writes what it found, as JSON."""
_BENCHMARKS = ("step", "models", "bandwidth", "syncs", "memory", "forward", "scaler", "trace", "portable")
_ON_THE_HOST = ("import", "instructions", "apex", "ops")
_OTHER_ROOMS = ("--ignore=tests/libraries", "--ignore=tests/packaging", "--ignore=tests/emulated")
_PLUGINS = {"xdist": "xdist", "hypothesispytest": "_hypothesis_pytestplugin"}
"""Plugins of pytest, by name, with their modules. Others that are installed take no part: ``runner.surroundings``."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a stage.

    Attributes:
        name: tells it from the stage's others.
        command: its words; :data:`FILE` stands for a file.
        needs: modules without which it is left out.
        accepts: exit codes that are no failure.
        says: what an exit code means, for the table.
    """

    name: str
    command: Sequence[str]
    needs: Sequence[str] = ()
    accepts: Sequence[int] = (0,)
    says: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Commands that belong together.

    Attributes:
        name: how it is called.
        what: what it does, in a few words.
        limit: seconds it may take on a card.
        steps: its commands, in order.
        tests: whether its commands write each test's outcome into the log.
        lacks: why it is left out; empty: it is not.
    """

    name: str
    what: str
    limit: float
    steps: Sequence[Step]
    tests: bool = False
    lacks: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run is for.

    Attributes:
        about: the machine, as :func:`ci.gpu.machine.ask` describes it.
        jobs: how many processes share tests.
        picture: where the picture goes.
        log: the file of the log.
        apex: the folder that has the real Apex's package; empty: there is none.
        rehearse: small parts of everything.
    """

    about: Mapping[str, Any]
    jobs: int
    picture: Path
    log: Path
    apex: str = ""
    rehearse: bool = False


def stages(plan: Plan) -> list[Stage]:
    """All stages, in order."""
    kind = plan.about["type"]
    facts = Step("facts", [*_python("xamp.testing.facts"), "--device", kind, "--json", FILE], ["xamp.testing.facts"])
    pictures = Step("ratios", [*_python("ci.gpu.pictures"), str(plan.log), str(plan.picture)], ["matplotlib"])
    doctor = Step("doctor", [*_python("ci.gpu.machine"), kind, FILE])
    return [
        Stage("doctor", "xamp doctor, and what the machine is", 90, [doctor]),
        _conformance(plan),
        _tests(plan, "device", "the tests marked device, on it", True, ["tests", *_OTHER_ROOMS]),
        _tests(plan, "tests", "the other tests, with the device in sight", False, ["tests", *_OTHER_ROOMS]),
        _libraries(plan),
        _benchmarks(plan),
        _apex(plan),
        Stage("facts", "the device's gaps and manners", 120, [facts]),
        Stage("pictures", "ratios as a picture", 60, [pictures]),
    ]


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def _conformance(plan: Plan) -> Stage:
    clauses = ["levels.effective", "probe.product"] if plan.rehearse else []
    command = [*_python("ci.gpu.clauses"), plan.about["type"], str(plan.jobs), *clauses]
    step = Step("suite", command, ["pytest"], accepts=(0, 1))
    return Stage("conformance", "the conformance suite", 420, [step], tests=True)


def _tests(plan: Plan, name: str, what: str, marked: bool, where: Sequence[str]) -> Stage:
    backend = plan.about["backend"]
    chosen = ["-m", "device", "--device", backend, "--require", backend] if marked else ["-m", "not device"]
    if plan.rehearse:
        where = ["tests/unit/accel/test_accel.py"] if marked else ["tests/unit/registry"]
    return Stage(name, what, 460, [_pytest(plan, [*chosen, *where])], tests=True)


def _libraries(plan: Plan) -> Stage:
    where = ["tests/libraries/test_pytorch_optimizer.py", "tests/libraries/test_onnx.py"]
    chosen = where if plan.rehearse else ["--all", "tests/libraries"]
    return Stage("libraries", "other projects' libraries", 300, [_pytest(plan, chosen)], tests=True)


def _pytest(plan: Plan, words: Sequence[str]) -> Step:
    names = ["ci.gpu.keep", *(name for name, module in _PLUGINS.items() if is_there(module))]
    plugins = [word for name in names for word in ("-p", name)]
    workers = ["-n", str(plan.jobs), "--dist=worksteal"] if "xdist" in names and plan.jobs > 1 else []
    says = {2: "interrupted, or a file cannot be imported", 4: "pytest does not know an option"}
    # 5: nothing was left to do.
    return Step("tests", [*_python("pytest"), *plugins, *workers, "-q", *words], ["pytest"], (0, 1, 5), says)


def _benchmarks(plan: Plan) -> Stage:
    names = ("syncs", "step") if plan.rehearse else (*_BENCHMARKS, *_ON_THE_HOST)
    options = ["--device", plan.about["type"], "--json", FILE, *(["--quick", "--rounds", "3"] if plan.rehearse else [])]
    accepts = (0, 1) if plan.rehearse else (0,)  # so few rounds say nothing about a bound
    says = {1: "a bound was missed, or it failed"}
    steps = [Step(name, [*_python("benchmarks"), name, *options], accepts=accepts, says=says) for name in names]
    return Stage("benchmarks", "times and bytes, one at a time", 470, steps)


def _apex(plan: Plan) -> Stage:
    """In a rehearsal without an Apex, xamp.apex is beside itself."""
    source = plan.apex or ("xamp" if plan.rehearse else "")
    lacks = "" if source else "XAMP_APEX names no folder with the real Apex"
    options = ["--steps", "4", "--sample", "40"] if plan.rehearse else []
    command = [*_python("ci.gpu.sides_compare"), source, plan.about["type"], FILE, *options]
    step = Step("sides", command, says={1: "they differ, see the log"})
    return Stage("apex", "one script under the real Apex and under xamp.apex", 300, [step], lacks=lacks)


def is_there(module: str) -> bool:
    """Whether a module can be imported, by its name."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it
        return False
