"""torch.compile, export, fx and TorchScript on a model under a policy: right or a typed error, never silently fp32.

Covers: xamp.casting.forward, xamp.casting.region, xamp.sessions.lowering.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import compiling
import pytest
import torch
from containers import Prefixed, Sparse, leaves, shape
from gathering import cases
from lanes import Lane, needs_dtype
from managed_models import INSIDE, LEVELS, Net, batch, net, ran_in, start
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import xamp
from xamp.errors import StateError, UnsupportedPolicy

SCRIPT_LEVELS = ("O0", "O1", "O4")

jit = pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    compiling.forget()
    yield
    compiling.forget()


def agrees(compiled: Any, eager: nn.Module, level: str, lane: Lane) -> None:
    """Twice the same, in the level's dtype, and what the eager model gives."""
    expected, hidden = eager(batch(lane))
    for _ in range(2):
        out, inside = compiled(batch(lane))
        assert out.dtype == torch.float32
        assert ran_in(inside) == INSIDE[level]
        torch.testing.assert_close(inside, hidden, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def sealed(lane: Lane) -> Net:
    """In evaluation mode, so that each call gives the same."""
    return net(lane).eval()


# ---------------------------------------------------------------- torch.compile


@pytest.mark.drawn(16)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["compile", "itself"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_model_is_one_graph_under_the_policy(
    level: str, before: bool, how: str, compiler: str, lane: Lane
) -> None:
    def compiled(model: Any) -> Any:
        if how == "compile":
            return torch.compile(model, fullgraph=True, backend=compiler)
        model.compile(fullgraph=True, backend=compiler)
        return model

    model: Any = sealed(lane)
    if before:
        model = compiled(model)
        assert ran_in(model(batch(lane))[1]) == torch.float32  # compiled for fp32 already
    assert start(model, level, lane) is model
    agrees(model if before else compiled(model), start(sealed(lane), level, lane), level, lane)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_compiled_forward_leaves_the_users_own_autocast_as_it_was(level: str, lane: Lane) -> None:
    other = torch.bfloat16 if INSIDE[level] == torch.float16 else torch.float16
    needs_dtype(lane, other)
    compiled: Any = torch.compile(start(sealed(lane), level, lane), fullgraph=True, backend="eager")
    x = batch(lane)
    with torch.autocast(lane.device.type, dtype=other):
        assert ran_in(compiled(x)[1]) == INSIDE[level]
        assert (x @ x.T).dtype == other
    assert (x @ x.T).dtype == torch.float32


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    inside: torch.Tensor


class Named(NamedTuple):
    first: Any
    second: Any = None


@dataclasses.dataclass
class Held:
    first: Any
    second: Any = None


TUPLES: dict[str, Callable[[Any], Any]] = {
    "in a dict": lambda v: {"y": v, "past": (v, v)},
    "in a list": lambda v: [(v, v)],
    "in a tuple": lambda v: ((v, v), (v, (v, None))),
    "in a dict of dicts": lambda v: {"a": {"b": v, "c": (v,)}},
    "in a dataclass, with a list": lambda v: Held(([v, (v,)], v)),
    "in a named tuple": lambda v: Named((v, v), Named(v)),
    "a named tuple": lambda v: [Named(v, v), (Named(v), v)],
    "a result of torch": lambda v: (torch.max(v, 0), v),
    "in an OrderedDict": lambda v: collections.OrderedDict(a=v, b=(v, v)),
    "in a defaultdict": lambda v: collections.defaultdict(list, {"a": (v, v)}),
    "in a UserDict": lambda v: collections.UserDict({"a": (v, v)}),
    "in part": lambda v: {"a": (v.double(), 3, None, v.shape), "b": (v, v.double()), "c": ()},
}


class Tupled(nn.Module):
    """Takes and returns one of :data:`TUPLES`."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.make = make

    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        return self.make(self.inner(x)), state


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((level, {}) for level in LEVELS),
    ("O2", {"cast_model_outputs": False}),
    ("O5", {"cast_model_inputs": (Result,)}),
    ("O4", {"op_policy": "portable"}),
]
TUPLED = [
    pytest.param(*setting, make, id=f"{name}-{'-'.join(map(str, setting))}")
    for at, (name, make) in enumerate(TUPLES.items())
    for place, setting in enumerate(SETTINGS)
    if (at + place) % 3 == 0
]
"""Every third pair: a container has three settings, a setting four containers. All 108 pairs take 2 minutes."""


@pytest.mark.drawn(12)
@pytest.mark.parametrize(("level", "arguments", "make"), TUPLED)
def test_a_tuple_in_a_container_goes_through_one_graph(
    level: str, make: Callable[[Any], Any], arguments: dict[str, Any], lane: Lane
) -> None:
    model = start(Tupled(make).to(lane.device), level, lane, **arguments)
    counted = CompileCounterWithBackend("eager")
    compiled: Any = torch.compile(model, fullgraph=True, backend=counted)
    state = make(batch(lane))
    for keywords in ({"state": state}, {"state": {"inner": state}}):
        eager = model(batch(lane), **keywords)
        for _ in range(2):
            result = compiled(batch(lane), **keywords)
            assert shape(result) == shape(eager)
            for new, old in zip(leaves(result), leaves(eager), strict=True):
                if isinstance(old, torch.Tensor):
                    assert (new.dtype, new.tolist()) == (old.dtype, old.tolist())
                else:
                    assert new == old
    assert counted.frame_count == 2


@dataclasses.dataclass
class Counting:
    """Counts how often it is made, and has a field that is set late."""

    first: Any
    made: int = dataclasses.field(init=False, default=0)
    late: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.first = self.first * 2
        self.made += 1


@dataclasses.dataclass(init=False)
class OwnInit:
    first: Any

    def __init__(self, both: Any) -> None:
        self.first = both + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    first: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    first: Any
    count: int = 3


class Attributes(dict[str, Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Locked(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("locked")


def counting(value: Any) -> Any:
    made = Counting(value)
    made.late, made.made = value + 1, made.made + 4
    return made


RESULTS: dict[str, Callable[[Any], Any]] = {
    "__post_init__ and late fields": counting,
    "own __init__": OwnInit,
    "frozen": Frozen,
    "slots": Slotted,
    "a dict that refuses": lambda v: Locked(a=v),
    "a named tuple": lambda v: Named(v, 3),
    "a named tuple with an own __iter__": Sparse,
    "a dict with own items()": lambda v: Prefixed(x=v),
    "a dict in a dataclass": lambda v: Held({"a": v}, [v]),
}
TWICE: dict[str, Callable[[Any], Any]] = {"shared list": lambda v: (lambda c: [c, c])([v])}
WITH_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {"a dict that is its attributes": lambda v: Attributes(a=v)}


def values(result: Any) -> Any:
    """All that a result holds, with tensors as numbers."""
    if isinstance(result, torch.Tensor):
        return result.double().flatten().tolist(), result.dtype
    if isinstance(result, (list, tuple)):
        items = [result[at] for at in range(len(result))]
        return type(result), [values(item) for item in items], [item is result[0] for item in items]
    if isinstance(result, dict):
        return type(result), {key: values(item) for key, item in result.items()}
    if dataclasses.is_dataclass(result):
        names = [*getattr(result, "__slots__", ()), *getattr(result, "__dict__", ())]
        return type(result), {name: values(getattr(result, name)) for name in names}
    return result


@pytest.mark.parametrize("level", LEVELS)
def test_a_result_is_what_it_is_without_the_compiler(level: str, lane: Lane) -> None:
    compare_results(RESULTS, level, lane, fullgraph=True)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_what_stands_twice_in_a_result_stays_one(level: str, lane: Lane) -> None:
    compare_results(TWICE, level, lane, fullgraph=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_result_has_the_attributes_that_it_has_without_the_compiler(level: str, lane: Lane) -> None:
    compare_results(WITH_ATTRIBUTES, level, lane, fullgraph=False)


def compare_results(makers: dict[str, Any], level: str, lane: Lane, *, fullgraph: bool) -> None:
    with cases() as case:
        for name, make in makers.items():
            with case(name):
                torch._dynamo.reset()
                model = start(Tupled(make).to(lane.device), level, lane)
                compiled: Any = torch.compile(model, backend="eager", fullgraph=fullgraph)
                state = make(batch(lane))
                found, wanted = compiled(batch(lane), state), model(batch(lane), state)
                assert values(found) == values(wanted)
                if isinstance(found[0], Attributes):
                    assert vars(found[0]) is found[0]


def with_extra(value: Any) -> Any:
    made: Any = Held(value)
    made.extra = (value, 1)
    return made


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_attributes_of_a_dataclass_are_in_a_compiled_result(level: str, lane: Lane) -> None:
    model = start(Tupled(with_extra).to(lane.device), level, lane)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    found = compiled(batch(lane))
    assert values(found) == values(model(batch(lane)))
    assert found[0].extra[0].dtype is torch.float32


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_an_object_that_the_compiler_does_not_look_into_is_said_once(
    level: str, lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    model = start(Tupled(lambda v: collections.deque([v])).to(lane.device), level, lane)
    with caplog.at_level("WARNING", "xamp"):
        for size in (1, 2):
            compiled: Any = torch.compile(model, backend="eager")
            found = compiled(batch(lane).repeat(size, 1))
            assert found[0][0].dtype is torch.bfloat16
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "Tupled.forward returns a deque, which xamp does not look into"
    ]


# ---------------------------------------------------------------- export and fx


@jit
@pytest.mark.parametrize("level", LEVELS)
def test_an_exported_and_a_traced_program_compute_as_the_model_does(level: str, lane: Lane) -> None:
    model = start(sealed(lane), level, lane)
    agrees(torch.export.export(model, (batch(lane),)).module(), model, level, lane)
    agrees(torch.jit.trace(model, (batch(lane),)), model, level, lane)


class Plainest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inner(x)
        return hidden, hidden.double()


@pytest.mark.parametrize("level", LEVELS)
def test_a_symbolic_trace_raises_rather_than_lose_the_policy(level: str, lane: Lane) -> None:
    with pytest.raises(StateError, match=r"symbolic_trace on a model that xamp\.initialize manages.*torch\.export"):
        torch.fx.symbolic_trace(start(Plainest().to(lane.device), level, lane))
    # torch hands xamp's wrapper a proxy for its *args where forward has keyword-only arguments: torch's own error
    with pytest.raises((StateError, torch.fx.proxy.TraceError)):
        torch.fx.symbolic_trace(start(sealed(lane), level, lane))


@pytest.mark.parametrize("level", LEVELS)
def test_a_graph_module_is_taken(level: str, lane: Lane) -> None:
    traced = torch.fx.symbolic_trace(sealed(lane))
    model = start(traced, level, lane)
    assert model is traced
    agrees(model, start(sealed(lane), level, lane), level, lane)
    try:
        model.recompile()
    except StateError:
        return  # a typed error is right too
    agrees(model, start(sealed(lane), level, lane), level, lane)


# ---------------------------------------------------------------- TorchScript


class Scriptable(Net):
    """TorchScript takes no keyword-only arguments."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden = self.inner(x)
        return self.head(self.norm(hidden)), hidden.double()


def scripted(lane: Lane) -> nn.Module:
    torch.manual_seed(1)
    made: nn.Module = torch.jit.script(Scriptable().eval().to(lane.device))
    return made


def traced(lane: Lane) -> nn.Module:
    made: nn.Module = torch.jit.trace(sealed(lane), (batch(lane),))
    return made


@jit
@pytest.mark.parametrize("make", [scripted, traced, lambda lane: nn.Sequential(scripted(lane))])
@pytest.mark.parametrize("level", SCRIPT_LEVELS)
def test_a_script_module_runs_under_the_policy(level: str, make: Callable[[Lane], nn.Module], lane: Lane) -> None:
    model = make(lane)
    assert start(model, level, lane) is model
    agrees(model, start(sealed(lane), level, lane), level, lane)
    xamp.session(model).close()
    assert ran_in(model(batch(lane))[1]) == torch.float32


@jit
@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_script_module_whose_parameters_would_be_cast_is_refused(
    level: str, make: Callable[[Lane], nn.Module], lane: Lane
) -> None:
    with pytest.raises(UnsupportedPolicy, match=r"is a ScriptModule, whose parameters cannot be cast.*O0, O1, O4"):
        start(make(lane), level, lane)


@jit
@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("level", SCRIPT_LEVELS)
def test_a_deepcopy_of_a_script_module_runs_under_the_policy(
    level: str, make: Callable[[Lane], nn.Module], lane: Lane
) -> None:
    model = start(make(lane), level, lane)
    twin = copy.deepcopy(copy.deepcopy(model))
    assert ran_in(twin(batch(lane))[1]) == INSIDE[level]
    xamp.session(model).close()
    assert ran_in(model(batch(lane))[1]) == torch.float32
    assert ran_in(twin(batch(lane))[1]) == INSIDE[level]
    assert ran_in(copy.deepcopy(model)(batch(lane))[1]) == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_shallow_copy_of_a_graph_module_keeps_its_policy(level: str) -> None:
    torch.manual_seed(0)
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    xamp.initialize(model, level=level, verbosity=0)
    x = torch.randn(5, 3)
    copied = copy.copy(model)
    assert torch.equal(copied(x), model(x))
    assert copied(x).dtype == torch.float32
    again = copy.deepcopy(copied)
    assert torch.equal(again(x), model(x))
