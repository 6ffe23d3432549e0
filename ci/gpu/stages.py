"""The stages of a run: what each of them calls, and what it needs. The most valuable ones come first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["FILE", "MEASURED", "Plan", "Stage", "Step", "is_there", "stages"]

FILE = "{file}"
"""In a command: the file into which it writes what it found, as JSON."""
MEASURED = {
    "figures": ("kernels", "bandwidth", "step", "memory", "apex-optimizers", "one-pass-host"),
    "models": ("models",),
    "benchmarks": ("syncs", "forward", "scaler", "trace", "portable", "import", "instructions", "apex", "ops"),
}
"""The stages whose commands are benchmarks, with these."""
_PLUGINS = {"xdist": "xdist", "hypothesispytest": "_hypothesis_pytestplugin"}
_HIDDEN = ("env", *(f"{name}_VISIBLE_DEVICES=" for name in ("CUDA", "HIP", "ASCEND_RT")), "ZE_AFFINITY_MASK=")
_ROOMS = ("tests", "--ignore=tests/libraries", "--ignore=tests/packaging", "--ignore=tests/emulated")


class Step(NamedTuple):
    """One command of a stage.

    Attributes:
        command: its words; :data:`FILE` stands for a file. Else what it prints is what it found, if that is JSON.
        needs: a module without which it is left out.
        accepts: exit codes that are no failure.
        tests: it writes each test's outcome into the log, and leaves out those that passed when it is run again.
    """

    name: str
    command: Sequence[str]
    needs: str = "xamp"
    accepts: Sequence[int] = (0,)
    tests: bool = False


class Stage(NamedTuple):
    """Commands that belong together: name, what they do, seconds they may take on a card; why it is left out, if so."""

    name: str
    what: str
    limit: float
    steps: Sequence[Step]
    lacks: str = ""


class Plan(NamedTuple):
    """What a run is for. ``apex`` is the folder of the real Apex's package; ``rehearse``: small parts of everything."""

    about: Mapping[str, Any]
    jobs: int
    log: Path
    apex: str = ""
    rehearse: bool = False


def is_there(module: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(module) is not None


def stages(plan: Plan) -> list[Stage]:
    """All stages, in order. A rehearsal walks all benchmarks with few rounds, and puts xamp.apex beside itself."""
    python, kind, backend, small = [sys.executable, "-m"], plan.about["type"], plan.about["backend"], plan.rehearse
    widths = ["64"] if small else ["2048", "4096", "8192"]
    clauses = ["levels.effective", "probe.product"] if small else []
    marked = ["-m", "device", "--device", backend, "--require", backend]
    device = [*marked, *(["tests/unit/accel/test_accel.py"] if small else _ROOMS)]
    others = ["-m", "not device", *(["tests/unit/registry"] if small else _ROOMS)]
    library = ["tests/libraries/test_pytorch_optimizer.py", "tests/libraries/test_onnx.py"]
    apex = plan.apex or ("xamp" if small else "")
    sides = ["ci.gpu.sides", apex, kind, FILE, *(["40"] if small else [])]
    lacks = "" if apex else "XAMP_APEX names no folder with the real Apex"

    def one(name: str, what: str, limit: float, words: Sequence[str], lacks: str = "") -> Stage:
        return Stage(name, what, limit, [Step(name, [*python, *words])], lacks)

    def measured(name: str, what: str, limit: float) -> Stage:
        words = ["--device", kind, "--json", FILE, *(["--quick", "--rounds", "3"] if small else [])]
        accepts = (0, 1) if small else (0,)  # so few rounds say nothing about a bound
        steps = [Step(each, [*python, "benchmarks", each, *words], accepts=accepts) for each in MEASURED[name]]
        return Stage(name, what, limit, steps)

    def tests(name: str, what: str, limit: float, words: Sequence[str], before: Sequence[str] = ()) -> Stage:
        names = ["ci.gpu.keep", *(each for each, module in _PLUGINS.items() if is_there(module))]
        plugins = [word for each in names for word in ("-p", each)]
        workers = ["-n", str(plan.jobs), "--dist=worksteal"] if "xdist" in names and plan.jobs > 1 else []
        command = [*before, *python, "pytest", *plugins, *workers, "-q", *words]
        return Stage(name, what, limit, [Step(name, command, "pytest", (0, 1, 5), tests=True)])  # 5: nothing was left

    suite = Step("suite", [*python, "ci.gpu.keep", kind, str(plan.jobs), *clauses], "pytest", (0, 1), tests=True)
    return [
        one("doctor", "xamp doctor, and what the machine is", 30, ["xamp", "doctor", "--json"]),
        measured("figures", "kernels, steps and bytes, one at a time", 420),
        measured("models", "steps of whole models", 300),
        one("fp8", "linear layers in fp8 over bf16, by width", 120, ["xamp", "doctor", "--json", "--fp8", *widths]),
        Stage("conformance", "the conformance suite", 300, [suite]),
        tests("device", "the tests marked device, on it", 370, device),
        one("apex", "one script under the real Apex and under xamp.apex", 200, sides, lacks),
        tests("libraries", "other projects' libraries", 150, library if small else ["--all", "tests/libraries"]),
        measured("benchmarks", "the other times", 120),
        tests("tests", "the other tests, with the device hidden", 180, others, _HIDDEN),
        one("facts", "the device's gaps and manners", 60, ["xamp.testing.facts", "--device", kind, "--json", FILE]),
    ]
