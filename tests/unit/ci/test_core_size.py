"""How large the core may be: what a person can hold in the head. :mod:`core_shape` counts; each count can fail."""

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
    identifiers,
    is_in,
    mere_setters,
    naming,
    read_package,
    with_its_own,
    writing_questions,
)

MOST_ATTRIBUTES = 14
MOST_LINES = 23_540  # of the core without kernels and fp8; the counts of concepts bind, this one keeps it from growing
KERNEL_LINES = 2_100  # loaded where a step in one pass is asked for, and by xamp.apex's optimizers
FP8 = [
    *("sessions/fp8_layers", "casting/fp8_linear", "casting/fp8_regions", "values/recipes", "torch_compat/scaled"),
    *("registry/fp8_trials", "registry/fp8_widths", "torch_compat/torch_private/turns"),
]
"""What is loaded only where fp8 is asked for. It has a bound of its own."""
FP8_LINES = 1_145
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


# ---------------------------------------------------------------- the core as it is


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


def test_a_plain_training_loads_nothing_that_is_to_be_asked_for(loaded: dict[str, str]) -> None:
    fp8 = [f"xamp.{name.replace('/', '.')}" for name in FP8]
    assert not [name for name in loaded if is_in(name, [*KERNELS, *fp8, "xamp.accel"])]


def test_a_plain_training_loads_few_modules(loaded: dict[str, str]) -> None:
    assert len(loaded) <= MOST_MODULES_LOADED


def test_a_plain_training_loads_few_lines(loaded: dict[str, str]) -> None:
    texts = [Path(file).read_text(encoding="utf-8") for file in loaded.values()]
    assert sum(len(text.splitlines()) for text in texts) <= MOST_LINES_LOADED


# ---------------------------------------------------------------- each count can fail


def test_attributes_are_counted() -> None:
    names = [f"a{index}" for index in range(MOST_ATTRIBUTES)]
    body = "".join(f"        self.{name} = 0\n" for name in names)
    code = Code(
        {
            "xamp.base": f"class Base:\n    def __init__(self):\n{body}",
            "xamp.many": "from xamp.base import Base\nclass Many(Base):\n    declared: int\n",
            "xamp.few": "from xamp.base import Base\nclass Few(Base):\n    def a(self): return self.b\n",
            "xamp.record": f"class Record(NamedTuple):\n    {': int; '.join([*names, 'more'])}: int\n",
            "xamp.writing": f"class Writing(NamedTuple):\n    {': int; '.join(names)}: int\n"
            "    def write(self): object.__setattr__(self, 'more', 1)\n",
        }
    )
    assert set(crowded(code, ["xamp"])) == {"xamp.many.Many", "xamp.writing.Writing"}


STATE = "class State:\n    def __init__(self):\n        self.fresh = True\n"


@pytest.mark.parametrize(
    "statement",
    ["state.fresh = 1", "state.fresh += 1", "del state.fresh", "setattr(state, 'fresh', 1)", "x, state.fresh = 1, 2"],
)
def test_a_write_from_outside_is_found(statement: str) -> None:
    step = f"from xamp.scaling.state import State\ndef step(state: State) -> None:\n    {statement}\n"
    code = Code({"xamp.scaling.state": STATE, "xamp.sessions.step": step})
    found = foreign_writes(code, STEP, ["xamp.scaling", "xamp.sessions"])
    assert found == ["xamp.sessions.step.step: state.fresh"]


@pytest.mark.parametrize(
    ("function", "is_foreign"),
    [
        ("def step(state) -> None:\n    state.fresh = 1\n", True),  # nothing says what it is
        ("def step(loop: Loop) -> None:\n    loop.fresh = 1\n", False),
        ("def step() -> None:\n    loop = Loop()\n    loop.fresh = 1\n", False),
        ("def make() -> State: ...\ndef step() -> None:\n    loop = make()\n    loop.fresh = 1\n", True),
        ("class Own:\n    def step(self) -> None:\n        self.fresh = 1\n", False),
        ("class Derived(State):\n    def step(self) -> None:\n        self.fresh = 1\n", True),
    ],
)
def test_whose_attribute_is_written(function: str, is_foreign: bool) -> None:
    head = "from xamp.scaling.state import State\nclass Loop: ...\n"
    code = Code({"xamp.scaling.state": STATE, "xamp.sessions.step": head + function})
    assert bool(foreign_writes(code, STEP, ["xamp.sessions"])) is is_foreign


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("self.fresh = value", True),
        ("self.fresh, self.stale = value, value", True),
        ("'''Text.'''\n        self.fresh = value", True),
        ("self.fresh = value + 1", False),
        ("self.fresh = value\n        self.tell()", False),
    ],
)
def test_a_method_that_only_stores_is_found(body: str, is_found: bool) -> None:
    code = Code({"xamp.scaling.state": f"class State:\n    def use(self, value):\n        {body}\n"})
    assert mere_setters(code, STEP) == (["xamp.scaling.state.State.use"] if is_found else [])


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(capture): return 1", {"f", "capture"}),
        ("f(in_graph=True)", {"f", "in_graph"}),
        ("class Replays: ...", {"Replays"}),
        ("self.capture.is_running()", {"self", "capture", "is_running"}),
        ("from xamp.torch_compat.compiler import break_graphs\nbreak_graphs()", set()),
        ("from xamp.values import followers\nfollowers.refresh_graphs()", set()),
        ("import torch\ntorch.autograd.graph.increment_version(x)", {"autograd", "x"}),
        ("'a graph'  # is captured", set()),
    ],
)
def test_names_in_code(source: str, names: set[str]) -> None:
    assert identifiers(Code({"xamp.scaling.a": source}), "xamp.scaling.a") == names


def test_a_mode_in_three_files_is_found() -> None:
    source = {f"xamp.scaling.{name}": "def f(in_graph): ..." for name in ("a", "b")}
    assert spread(Code(source), MODES["captured graphs"]) == {}
    source["xamp.scaling.a"] += "\nfrom xamp.values import helper"
    source["xamp.values.helper"] = "def f(in_graph): ..."  # which nothing else imports
    assert len(spread(Code(source), MODES["captured graphs"])) == 3
    source["xamp.casting.b"] = "from xamp.values import helper"
    assert spread(Code(source), MODES["captured graphs"]) == {}


@pytest.mark.parametrize(
    "back",
    [
        "import xamp.a",
        "from xamp import a",
        "if TYPE_CHECKING:\n    from xamp.a import A",
        "def f():\n    import xamp.a",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    code = Code({"xamp.a": "from xamp.b import f", "xamp.b": "from xamp import c", "xamp.c": back})
    assert circles(code, ["xamp.a", "xamp.b", "xamp.c"]) == [["xamp.a", "xamp.b", "xamp.c"]]
    assert circles(code, ["xamp.a", "xamp.b"]) == []


@pytest.mark.parametrize(
    ("body", "writes"),
    [
        ("self.seen = True", True),
        ("del self.seen", True),
        ("self.flag.zero_()", True),
        ("self.known.append(1)", True),
        ("self.known[0] = 1", True),
        ("for p in self.params: p.grad = None", True),
        ("self.note()", True),
        ("found = []\n        found.append(1)\n        return found", False),
        ("own = torch.amp.GradScaler()\n        own.update()", False),
        ("shared = self.scalers.first()\n        shared.update()", True),
        ("return self.seen", False),
    ],
)
@pytest.mark.parametrize("name", ["is_new", "_has_any", "may_step", "check_all"])
def test_a_question_that_writes_is_found(name: str, body: str, writes: bool) -> None:
    source = f"class A:\n    def note(self):\n        self.seen = True\n    def {name}(self):\n        {body}\n"
    assert bool(writing_questions(Code({"xamp.a": source}), ["xamp.a"])) is writes
