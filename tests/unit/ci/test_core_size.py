"""How large the core may be: what a person can hold in the head. :mod:`core_shape` counts; each count can fail.

Covers: tests/support/core_shape.py.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from core_shape import (
    ROOT,
    Code,
    circles,
    foreign_writes,
    is_in,
    mere_setters,
    naming,
    read_package,
    with_its_own,
    writing_questions,
)

MOST_ATTRIBUTES = 14
MOST_LINES = 23_529  # of the core without kernels and fp8; the counts of concepts bind, this one keeps it from growing
KERNEL_LINES = 2_100  # loaded where a step in one pass is asked for, and by xamp.apex's optimizers
FP8 = [
    *("sessions/fp8_layers", "casting/fp8_linear", "casting/fp8_regions", "values/recipes", "torch_compat/scaled"),
    *(
        "registry/fp8_trials",
        "registry/fp8_widths",
        "torch_compat/torch_private/turns",
        "torch_compat/torch_private/fp8",
    ),
]
"""What is loaded only where fp8 is asked for. It has a bound of its own."""
FP8_LINES = 1_221
MOST_MODULES_LOADED, MOST_LINES_LOADED = 105, 17_200
TOOLS = ("cli", "debug", "doctor", "port", "run", "op_dtypes", "testing")
ABOVE = {"apex", "averages", "integrations", "backends", "__main__", *TOOLS}
"""What stands above the core: other interfaces, tools, and the backends, which are plugins. All else is the core."""
KERNELS = ["xamp.onepass", "xamp.plans"]
STEP = ["xamp.scaling"]
WRITERS = [f"xamp.{name}" for name in ("scaling", "sessions", "apex", "integrations", "debug", "averages", "testing")]
"""What has objects of the step in its hands."""
MODES = {
    "captured graphs": r"(?i)captur|graph|replay",
    "the compiler": r"(?i)compil|dynamo|traced",
    "the overflow flag of a chip": r"(?i)by_flag|flag_?watch|overflow_flag|read_flag$|chip|saturat|run_watched",
    "gradients that FSDP hides": r"(?i)hidden|unreduced",
}


@functools.cache
def package() -> Code:
    return read_package()


@functools.cache
def core() -> list[str]:
    """The packages and modules of the core."""
    parts = {name.split(".")[1] for name in package().modules if "." in name}
    return sorted(f"xamp.{part}" for part in parts - ABOVE)


def crowded(code: Code, packages: list[str]) -> dict[str, list[str]]:
    """The classes of ``packages`` that have too many attributes, with these."""
    chosen = [name for name in code.classes if is_in(name, packages) and not code.is_frozen_record(name)]
    assert chosen
    return {name: sorted(found) for name in chosen if len(found := code.attributes(name)) > MOST_ATTRIBUTES}


def spread(code: Code, pattern: str) -> dict[str, list[str]]:
    """The modules that name a mode, if they are more than two."""
    found = naming(code, with_its_own(code, *STEP), pattern)
    return found if len(found) > 2 else {}


def test_no_class_has_more_attributes_than_a_reader_can_hold() -> None:
    assert crowded(package(), [name for name in core() if name not in KERNELS]) == {}


def test_nobody_else_writes_the_attributes_of_the_step() -> None:
    assert foreign_writes(package(), STEP, WRITERS) == []


def test_no_method_of_the_step_is_an_assignment_for_others() -> None:
    assert mere_setters(package(), STEP) == []


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_named_in_two_files(mode: str) -> None:
    assert naming(package(), with_its_own(package(), *STEP), MODES[mode]), "the pattern finds nothing"
    assert spread(package(), MODES[mode]) == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(package(), core()) == []


def test_questions_do_not_write() -> None:
    assert writing_questions(package(), ["xamp"]) == []


def _files(name: str) -> list[Path]:
    top = ROOT / "xamp" / name.split(".")[1]
    return list(top.rglob("*.py")) if top.is_dir() else [top.with_suffix(".py")]


def _lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def test_the_core_by_the_honest_sum() -> None:
    files = [file for name in core() for file in _files(name)]
    parts = {"kernels": [file for name in KERNELS for file in _files(name)]}
    parts["fp8"] = [ROOT / "xamp" / f"{name}.py" for name in FP8]
    parts["all else"] = [file for file in files if file not in [*parts["kernels"], *parts["fp8"]]]
    lines = {part: sum(map(_lines, found)) for part, found in parts.items()}
    assert lines["kernels"] <= KERNEL_LINES
    assert lines["fp8"] <= FP8_LINES
    assert lines["all else"] <= MOST_LINES


def test_apex_keeps_its_measure() -> None:
    files = [path.read_text(encoding="utf-8").splitlines() for path in (ROOT / "xamp" / "apex").rglob("*.py")]
    assert 0 < len(files) <= 60
    assert sum(map(len, files)) <= 8_240


PLAIN_TRAINING = """
import json, sys
import torch
import xamp

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = xamp.initialize(model, optimizer, "O2", init_scale=64.0, verbosity=0)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).float().mean()
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
assert xamp.session(model).stats.applied == 3
print(json.dumps({n: m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "xamp"}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, str]:
    """The modules of xamp that a plain training loads, with their files."""
    run = subprocess.run([sys.executable, "-c", PLAIN_TRAINING], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    assert "xamp.scaling.engine" in found
    return found


def test_a_plain_training_loads_little_and_nothing_that_is_to_be_asked_for(loaded: dict[str, str]) -> None:
    fp8 = [f"xamp.{name.replace('/', '.')}" for name in FP8]
    assert not [name for name in loaded if is_in(name, [*KERNELS, *fp8, "xamp.accel"])]
    assert len(loaded) <= MOST_MODULES_LOADED
    assert sum(_lines(Path(file)) for file in loaded.values()) <= MOST_LINES_LOADED


# ---------------------------------------------------------------- each count can fail


STATE = "class State:\n    def __init__(self):\n        self.fresh = True\n"
STEP_OF = "def step(state: State) -> None:\n    "
WRITES = {
    **{STEP_OF + text: True for text in ("state.fresh = 1", "del state.fresh", "setattr(state, 'fresh', 1)")},
    "def step(state) -> None:\n    state.fresh += 1": True,  # nothing says what it is
    "def step(loop: Loop) -> None:\n    loop.fresh = 1": False,
    "def make() -> State: ...\ndef step() -> None:\n    loop = make()\n    loop.fresh = 1": True,
    "class Own:\n    def step(self) -> None:\n        self.fresh = 1": False,
    "class Derived(State):\n    def step(self) -> None:\n        self.fresh = 1": True,
}


def test_a_write_from_outside_is_found() -> None:
    head = "from xamp.scaling.state import State\nclass Loop: ...\n"
    for function, is_foreign in WRITES.items():
        code = Code({"xamp.scaling.state": STATE, "xamp.sessions.step": head + function})
        assert bool(foreign_writes(code, STEP, ["xamp.sessions"])) is is_foreign, function
    for body, is_found in {"self.fresh = value": True, "self.fresh = value + 1": False}.items():
        code = Code({"xamp.scaling.state": f"class State:\n    def use(self, value):\n        {body}\n"})
        assert bool(mere_setters(code, STEP)) is is_found, body


QUESTIONS = dict.fromkeys(["self.seen = True", "self.flag.zero_()", "self.known.append(1)", "self.note()"], True)
QUESTIONS |= {"found = []\n        found.append(1)\n        return found": False, "return self.seen": False}


def test_a_question_that_writes_is_found() -> None:
    for body, writes in QUESTIONS.items():
        source = f"class A:\n    def note(self):\n        self.seen = True\n    def is_new(self):\n        {body}\n"
        assert bool(writing_questions(Code({"xamp.a": source}), ["xamp.a"])) is writes, body
