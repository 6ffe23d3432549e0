"""The stages of a run: what each of them calls, and what it needs. The most valuable ones come first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.gpu.stage import FILE, Stage, Step, pytest_step, python

__all__ = ["Plan", "stages"]

_FIGURES = ("kernels", "bandwidth", "step", "memory", "apex-optimizers", "one-pass-host")
_MODELS = ("models",)
_MORE = ("syncs", "forward", "scaler", "trace", "portable", "import", "instructions", "apex", "ops")
_HIDDEN = ("env", *(f"{name}_VISIBLE_DEVICES=" for name in ("CUDA", "HIP", "ASCEND_RT")), "ZE_AFFINITY_MASK=")
_OTHER_ROOMS = ("--ignore=tests/libraries", "--ignore=tests/packaging", "--ignore=tests/emulated")


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
    facts = Step("facts", [*python("xamp.testing.facts"), "--device", kind, "--json", FILE], ["xamp.testing.facts"])
    pictures = Step("ratios", [*python("ci.gpu.pictures"), str(plan.log), str(plan.picture)], ["matplotlib"])
    doctor = Step("doctor", [*python("ci.gpu.machine"), kind, FILE])
    return [
        Stage("doctor", "xamp doctor, and what the machine is", 30, [doctor]),
        _benchmarks(plan, "figures", "kernels, steps and bytes, one at a time", 420, _FIGURES),
        _benchmarks(plan, "models", "steps of whole models", 300, _MODELS),
        _fp8(plan),
        _conformance(plan),
        _tests(plan, "device", "the tests marked device, on it", True, ["tests", *_OTHER_ROOMS]),
        _apex(plan),
        _libraries(plan),
        _benchmarks(plan, "benchmarks", "the other times", 120, _MORE),
        _tests(plan, "tests", "the other tests, with the device hidden", False, ["tests", *_OTHER_ROOMS]),
        Stage("facts", "the device's gaps and manners", 60, [facts]),
        Stage("pictures", "ratios as a picture", 30, [pictures]),
    ]


def _fp8(plan: Plan) -> Stage:
    widths = ["64"] if plan.rehearse else ["2048", "4096", "8192"]
    step = Step("widths", [*python("xamp"), "doctor", "--json", "--fp8", *widths], says={2: "the device has no fp8"})
    return Stage("fp8", "linear layers in fp8 over bf16, by width", 120, [step])


def _conformance(plan: Plan) -> Stage:
    clauses = ["levels.effective", "probe.product"] if plan.rehearse else []
    command = [*python("ci.gpu.clauses"), plan.about["type"], str(plan.jobs), *clauses]
    step = Step("suite", command, ["pytest"], accepts=(0, 1), tests=True)
    return Stage("conformance", "the conformance suite", 300, [step])


def _tests(plan: Plan, name: str, what: str, marked: bool, where: Sequence[str]) -> Stage:
    backend = plan.about["backend"]
    chosen = ["-m", "device", "--device", backend, "--require", backend] if marked else ["-m", "not device"]
    if plan.rehearse:
        where = ["tests/unit/accel/test_accel.py"] if marked else ["tests/unit/registry"]
    step = pytest_step([*chosen, *where], plan.jobs)
    if not marked:  # they ask for no device, and Triton's interpreter must see none
        step = dataclasses.replace(step, command=[*_HIDDEN, *step.command])
    return Stage(name, what, 370 if marked else 180, [step])


def _libraries(plan: Plan) -> Stage:
    where = ["tests/libraries/test_pytorch_optimizer.py", "tests/libraries/test_onnx.py"]
    chosen = where if plan.rehearse else ["--all", "tests/libraries"]
    return Stage("libraries", "other projects' libraries", 150, [pytest_step(chosen, plan.jobs)])


def _benchmarks(plan: Plan, stage: str, what: str, limit: float, names: Sequence[str]) -> Stage:
    """Each is a command of its own: one whose form does not run stops itself, with the reason, and no other.

    A rehearsal walks them all, with few rounds and small sizes.
    """
    options = ["--device", plan.about["type"], "--json", FILE, *(["--quick", "--rounds", "3"] if plan.rehearse else [])]
    accepts = (0, 1) if plan.rehearse else (0,)  # so few rounds say nothing about a bound
    says = {} if plan.rehearse else {1: "a bound was missed, or it failed"}
    steps = [Step(name, [*python("benchmarks"), name, *options], accepts=accepts, says=says) for name in names]
    return Stage(stage, what, limit, steps)


def _apex(plan: Plan) -> Stage:
    """In a rehearsal without an Apex, xamp.apex is beside itself."""
    source = plan.apex or ("xamp" if plan.rehearse else "")
    lacks = "" if source else "XAMP_APEX names no folder with the real Apex"
    options = ["--steps", "4", "--sample", "40"] if plan.rehearse else []
    command = [*python("ci.gpu.sides_compare"), source, plan.about["type"], FILE, *options]
    step = Step("sides", command, says={1: "they differ, see the log"})
    return Stage("apex", "one script under the real Apex and under xamp.apex", 200, [step], lacks=lacks)
