"""What a forward writes into its arguments is in the caller's objects afterwards, as it is without xamp.

Each program of :data:`PROGRAMS` runs on a plain fp32 model and on a managed one; what their arguments hold is compared.

Covers: xamp.casting.write_back, xamp.casting.inputs, xamp.values.containers.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from compiling import forget
from containers import AttributeDict, ClassifierOutput, Encoding, Locked, MyDict, MyList
from lanes import Lane
from managed_models import start
from torch import nn

from xamp.policy import levels_where

CAST = levels_where(lambda row: row.casts_parameters)


@dataclasses.dataclass
class State:
    step: int = 0
    h: Any = None
    memory: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fixed:
    h: Any
    log: list[Any]


@dataclasses.dataclass(slots=True)
class Slots:
    h: Any
    n: int = 0


class Pair(NamedTuple):
    h: Any
    log: list[Any]


class Tagged(tuple[Any, ...]):
    """A tuple with attributes."""


def tagged(*items: Any) -> Tagged:
    made: Any = Tagged(items)
    made.count = 0
    found: Tagged = made
    return found


def one() -> torch.Tensor:
    return torch.ones(4)


Program = tuple[Callable[[], dict[str, Any]], Callable[..., None]]


def program(make: Callable[[], dict[str, Any]], *lines: str) -> Program:
    """What a forward is given, and what it does to that: ``s`` and ``t``. Its result ``y`` comes before them."""
    found: dict[str, Any] = {}
    text = "\n    ".join(["def run(y, s, t=None):", *lines])
    exec(compile(text, __file__, "exec"), found)
    return make, found["run"]


def cyclic() -> dict[str, Any]:
    outer: dict[str, Any] = {"h": one(), "list": [one()]}
    outer["list"].append(outer)
    return {"s": outer}


PROGRAMS: dict[str, Program] = {
    "running_sum": program(
        lambda: {"s": {"sum": one(), "n": 0}}, 's["sum"] = s["sum"] + y.detach().float().sum(0)', 's["n"] += 1'
    ),
    "sum_in_place": program(lambda: {"s": {"sum": one(), "kept": one()}}, 's["sum"] += y.detach().sum(0)'),
    "append": program(lambda: {"s": [one()]}, "s.append(y.detach().float())"),
    "many_list_methods": program(
        lambda: {"s": [one(), 2, one()]},
        's.insert(0, "first")',
        "s.pop()",
        "s.reverse()",
        "s.extend([y.detach().float(), 7])",
        "s[1] = None",
    ),
    "reordered": program(lambda: {"s": [one(), one() * 2]}, "s.append(s.pop(0))"),
    "cleared": program(lambda: {"s": [one(), 1]}, "s.clear()"),
    "many_dict_methods": program(
        lambda: {"s": {"a": one(), "b": 1, "c": one()}},
        'if "b" in s: del s["b"]',
        's.pop("c", None)',
        "s.update(d=y.detach().float(), e=3)",
        's.setdefault("f", []).append(1)',
    ),
    "put_last": program(lambda: {"s": {"a": one(), "b": one() * 2}}, 's["a"] = s.pop("a")'),
    "nested": program(
        lambda: {"s": {"cache": {"k": [one()], "n": 0}, "h": one()}},
        's["cache"]["k"].append(y.detach().float())',
        's["cache"]["n"] = 5',
    ),
    "nested_replaced": program(
        lambda: {"s": {"cache": {"k": one()}}}, 's["cache"]["k"] = 1', 's["cache"] = {"new": [1]}'
    ),
    "shared": program(
        lambda: (lambda inner: {"s": {"one": inner, "other": inner, "h": one()}})([one()]),
        's["one"].append(1)',
        's["other"].append(2)',
        'assert s["one"] is s["other"]',
    ),
    "given_twice": program(
        lambda: (lambda inner: {"s": inner, "t": inner})({"h": one()}), 's["a"] = 1', 'assert t["a"] == 1', 't["b"] = 2'
    ),
    "copies_put_elsewhere": program(
        lambda: {"s": {"h": one(), "list": [one()]}},
        's["again"] = s["list"]',
        's["h2"] = s["h"]',
        's["new"] = [s["list"], {"h": s["h"]}]',
    ),
    "dataclass_of_a_dict": program(
        lambda: {"s": State(h=one())}, "s.step += 1", "s.memory[s.step] = y.detach().float()"
    ),
    "dataclass_replaced": program(
        lambda: {"s": State(h=one(), memory={"h": one()})}, "s.h = y.detach().float()", 's.memory["x"] = s.step'
    ),
    "frozen_dataclass_with_a_list": program(lambda: {"s": Fixed(one(), [one()])}, "s.log.append(y.detach().float())"),
    "dataclass_with_slots": program(lambda: {"s": Slots(one())}, "s.n += 1", "s.h = None"),
    "named_tuple_with_a_list": program(lambda: {"s": Pair(one(), [1])}, "s.log.append(y.detach().float())"),
    "tuple_of_containers": program(lambda: {"s": (one(), [one()], {"h": one()})}, "s[1].append(3)", 's[2]["n"] = 4'),
    "default_dict": program(lambda: {"s": defaultdict(list, h=one())}, 's["losses"].append(y.detach().float())'),
    "ordered_dict": program(lambda: {"s": OrderedDict(a=one(), b=1)}, 's["c"] = 2', 's["d"] = y.detach().float()'),
    "user_dict": program(lambda: {"s": UserDict({"h": one()})}, 's["n"] = y.detach().float()'),
    "user_dict_of_a_class": program(lambda: {"s": Encoding({"h": one()})}, 's["n"] = y.detach().float()'),
    "dict_of_a_class": program(lambda: {"s": MyDict(h=one())}, 's["n"] = y.detach().float()', 's.note = "written"'),
    "list_of_a_class": program(lambda: {"s": MyList([one()])}, "s.append(y.detach().float())", 's.note = "written"'),
    "dict_that_is_its_dict": program(lambda: {"s": AttributeDict(h=one())}, "s.n = y.detach().float()"),
    "model_output": program(
        lambda: {"s": ClassifierOutput(logits=one())},
        's["logits"] = y.detach().float()',
        "s.hidden_states = (y.detach().float(),)",
    ),
    "cache_that_is_written_in_place": program(
        lambda: {"s": {"cache": torch.zeros(3, 4), "at": 1}}, 's["cache"][s["at"]] = y.detach()[0]', 's["at"] += 1'
    ),
    "tensor_that_is_written_in_place": program(lambda: {"s": torch.zeros(3, 4)}, "s[1].copy_(y.detach()[0])"),
    "one_tensor_twice_in_place": program(
        lambda: (lambda both: {"s": {"h": both}, "t": both})(torch.zeros(4)), 's["h"].add_(y.detach()[0])', "t.mul_(2)"
    ),
    "numbers_of_other_types": program(
        lambda: {"s": {"h": one(), "flag": 0, "n": 1, "pair": (1, 2)}},
        's["flag"], s["n"], s["pair"] = False, 1.0, (True, 2)',
    ),
    "tensors_in_a_tuple": program(lambda: {"s": (torch.zeros(4), one())}, "s[0].add_(y.detach()[0])"),
}
EAGER_ONLY: dict[str, Program] = {
    "moved_to_the_end": program(
        lambda: {"s": OrderedDict(a=one(), b=1, c=one())}, 's.move_to_end("a")', 's.move_to_end("c", last=False)'
    ),
    "counter": program(lambda: {"s": collections.Counter(h=one())}, 's["seen"] += 1'),  # type: ignore[call-overload]
    "deleted_attribute": program(
        lambda: {"s": State(h=one())}, 'if "step" in vars(s): del s.step', "s.extra = y.detach().float()"
    ),
    "locked_dict": program(lambda: {"s": Locked(h=one())}, 'dict.__setitem__(s, "n", y.detach().float())'),
    "attribute_of_a_tuple": program(lambda: {"s": tagged(one())}, "s.count += 1"),
    "dict_in_itself": program(cyclic, 'assert s["list"][1] is s', 's["list"][1]["n"] = 3'),
}
"""Those that the compiler does not trace, without xamp either."""


class Writer(nn.Module):
    def __init__(self, run: Callable[..., None]) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        with torch.no_grad():  # results that each dtype has exactly
            self.body.weight.copy_(torch.eye(4))
            self.body.bias.zero_()
        self.run = run

    def forward(self, x: torch.Tensor, **given: Any) -> Any:
        y = self.body(x.to(self.body.weight.dtype))
        self.run(y, **given)
        return y


class WriterByPosition(Writer):
    def forward(self, x: torch.Tensor, s: Any) -> Any:  # type: ignore[override]
        return super().forward(x, s=s)


def shown(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """What a value holds, and where an object comes again."""
    if isinstance(value, torch.Tensor):
        return value.detach().double().flatten().tolist()
    if isinstance(value, (int, float, str, type(None))):
        return type(value), value
    if id(value) in seen:
        return "again", seen.index(id(value))
    seen = (*seen, id(value))
    found: list[Any] = [type(value).__name__]
    if isinstance(value, (dict, UserDict)):
        found += [(key, shown(item, seen)) for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        found += [shown(item, seen) for item in value]
    names = (
        [*getattr(value, "__slots__", ()), *vars(value)]
        if hasattr(value, "__dict__")
        else getattr(value, "__slots__", ())
    )
    if not isinstance(value, AttributeDict):
        found += [(name, shown(getattr(value, name), seen)) for name in names]
    return found


def tensors(value: Any, seen: set[int]) -> list[torch.Tensor]:
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, (dict, UserDict)) else value if isinstance(value, (tuple, list)) else ()
    return [t for item in (*items, *getattr(value, "__dict__", {}).values()) for t in tensors(item, seen)]


def made(make: Callable[[], Any], device: torch.device) -> Any:
    """What ``make`` returns, its tensors made on ``device``: not every device takes a CPU tensor's ``.data``."""
    with device:
        return make()


def batch(lane: Lane) -> torch.Tensor:
    return torch.arange(8.0, device=lane.device).reshape(2, 4) / 4


def check(model: Any, name: str, found: Program, lane: Lane, *, times: int = 2) -> None:
    """Run the program as often on a plain model, and compare."""
    make, run = found
    plain = Writer(run).to(lane.device)
    wanted, given = made(make, lane.device), made(make, lane.device)
    held = [(t, t.clone()) for t in tensors(given, set())]
    for _ in range(times):
        plain(batch(lane), **wanted)
        model(batch(lane), **given)
    assert shown(given) == shown(wanted), name
    assert {t.dtype for t in tensors(given, set())} <= {torch.float32}, name
    for tensor, value in held if "in_place" not in name and name != "tensors_in_a_tuple" else ():
        assert torch.equal(tensor, value), f"{name}: a tensor of the caller's was written to"


@pytest.mark.drawn(48)
@pytest.mark.parametrize("level", ["O0", *CAST])
@pytest.mark.parametrize("name", [*PROGRAMS, *EAGER_ONLY])
def test_what_a_forward_writes_arrives(name: str, level: str, lane: Lane) -> None:
    found = {**PROGRAMS, **EAGER_ONLY}[name]
    check(start(Writer(found[1]).to(lane.device), level, lane), name, found, lane)


def each_at_one_level() -> Iterator[Any]:
    """Each program with each level, of which one runs here and the others are thorough: a compiler needs seconds."""
    for number, name in enumerate(PROGRAMS):
        for place, level in enumerate(CAST):
            yield pytest.param(name, level, marks=() if number % len(CAST) == place else pytest.mark.thorough)


@pytest.mark.drawn(10)
@pytest.mark.parametrize(("name", "level"), [*each_at_one_level()])
def test_it_arrives_from_a_graph(name: str, level: str, lane: Lane) -> None:
    forget()
    found = PROGRAMS[name]
    model = torch.compile(start(Writer(found[1]).to(lane.device), level, lane), backend="aot_eager", fullgraph=True)
    check(model, name, found, lane)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_arrives_from_compiled_code_whether_or_not_it_is_one_graph(name: str, lane: Lane) -> None:
    forget()
    found = PROGRAMS[name]
    level = CAST[-1]
    check(torch.compile(start(Writer(found[1]).to(lane.device), level, lane), backend="aot_eager"), name, found, lane)


class Raising(Writer):
    def forward(self, x: torch.Tensor, **given: Any) -> Any:
        super().forward(x, **given)
        raise ValueError("after it wrote")


class RaisingLater(Writer):
    def forward(self, x: torch.Tensor, **given: Any) -> Any:
        super().forward(x, **given)
        torch._dynamo.graph_break()
        raise ValueError("after it wrote")


class RaisingByValue(Writer):
    def forward(self, x: torch.Tensor, **given: Any) -> Any:
        y = super().forward(x, **given)
        if y.sum() > 0:
            raise ValueError("after it wrote")
        return y


@pytest.mark.drawn(8)
@pytest.mark.parametrize("level", ["O0", *CAST])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Raising, RaisingLater, RaisingByValue])
def test_it_arrives_where_the_forward_raises(kind: Any, compiled: bool, level: str, lane: Lane) -> None:
    forget()
    model: Any = start(kind(PROGRAMS["nested"][1]).to(lane.device), level, lane)
    if compiled:
        model = torch.compile(model, backend="eager")
    state = made(lambda: {"cache": {"k": [one()], "n": 0}, "h": one()}, lane.device)
    dtype = model.body.weight.dtype
    with pytest.raises(ValueError, match="after it wrote"):
        model(batch(lane), s=[state, torch.ones(1, dtype=dtype, device=lane.device)][0])
    assert (len(state["cache"]["k"]), state["cache"]["n"]) == (2, 5)


class Positional(Writer):
    def forward(self, x: torch.Tensor, s: Any, *more: Any) -> Any:  # type: ignore[override]
        for each in (s, *more):
            self.run(x, each)
        return x


@pytest.mark.drawn(6)
@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("excluded", [True, ("x",), (State,)])
def test_it_arrives_by_position_and_through_an_attribute(hidden: bool, excluded: Any, level: str, lane: Lane) -> None:
    plain = Positional(PROGRAMS["append"][1]).to(lane.device)
    if hidden:
        plain.forward = plain.forward  # type: ignore[method-assign]
    model = start(plain, level, lane, cast_model_inputs=excluded)
    first, second, third = ([one().to(lane.device)] for _ in range(3))
    model(batch(lane), first, second, third)
    model(batch(lane), first, first)
    assert [len(each) for each in (first, second, third)] == [4, 2, 2]


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, s: Any) -> Any:
        return self.model(x, s)


@pytest.mark.parametrize("level", CAST)
def test_it_arrives_through_an_attribute_in_the_graph_of_another_model(level: str, lane: Lane) -> None:
    forget()
    plain = Positional(PROGRAMS["append"][1]).to(lane.device)
    plain.forward = plain.forward  # type: ignore[method-assign]
    model = start(plain, level, lane, cast_model_inputs=("x",))
    state = [one().to(lane.device)]
    torch.compile(Around(model), backend="eager", fullgraph=True)(batch(lane), state)
    assert len(state) == 2


@pytest.mark.drawn(6)
@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("name", ["sum_in_place", "cache_that_is_written_in_place", "tensor_that_is_written_in_place"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_arrives_without_gradients(mode: Any, name: str, level: str, lane: Lane) -> None:
    """Inference tensors, made in the block or before it, have no versions."""
    model = start(Writer(PROGRAMS[name][1]).to(lane.device), level, lane)
    check(model, name, PROGRAMS[name], lane, times=1)
    with mode():
        check(model, name, PROGRAMS[name], lane)
    given = made(PROGRAMS[name][0], lane.device)
    with mode():
        model(batch(lane), **given)


@pytest.mark.parametrize("level", CAST)
def test_elements_that_nobody_wrote_keep_their_digits(level: str, lane: Lane) -> None:
    model = start(Writer(PROGRAMS["tensor_that_is_written_in_place"][1]).to(lane.device), level, lane)
    cache = torch.full((3, 4), 4097.0, device=lane.device)
    model(batch(lane), s=cache)
    assert cache[0].tolist() == cache[2].tolist() == [4097.0] * 4
    assert cache[1].tolist() == batch(lane)[0].tolist()


@pytest.mark.parametrize("level", CAST)
def test_a_gradient_flows_through_what_was_written_in_place(level: str, lane: Lane) -> None:
    def add(y: Any, s: Any) -> None:
        s["sum"] += y.sum(0)

    def gradient(model: Any) -> list[float]:
        state = {"sum": one().to(lane.device)}
        model(batch(lane), s=state)
        (state["sum"] * torch.arange(4.0, device=lane.device)).sum().backward()
        found: list[float] = model.body.bias.grad.double().tolist()
        return found

    model = start(Writer(add).to(lane.device), level, lane)
    assert gradient(model) == gradient(Writer(add).to(lane.device)) == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.parametrize("level", CAST)
def test_what_was_given_keeps_its_dtype(level: str, lane: Lane) -> None:
    def keep(y: Any, s: Any) -> None:
        s["y"], s["h2"] = y, s["h"]

    model = start(Writer(keep).to(lane.device), level, lane)
    state = {"h": one().to(lane.device)}
    held = state["h"]
    model(batch(lane), s=state)
    assert state["y"].dtype is model.body.weight.dtype
    assert state["h"] is held
    assert state["h2"] is held


@pytest.mark.parametrize("level", CAST)
def test_two_threads_append_to_one_list(level: str, lane: Lane) -> None:
    meet = threading.Barrier(2)

    def add(y: Any, s: Any) -> None:
        s.append(1)
        meet.wait(120)

    model = start(Writer(add).to(lane.device), level, lane)
    shared_list = [one().to(lane.device)]
    threads = [threading.Thread(target=model, args=(batch(lane),), kwargs={"s": shared_list}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(shared_list) == 3


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize(("backend", "named"), [(None, True), (None, False), ("eager", True), ("aot_eager", True)])
def test_what_cannot_be_written_back_is_said_once(
    backend: str | None, named: bool, level: str, lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    def add(y: Any, s: Any) -> None:
        s["mean"].add_(1)

    forget()
    model: Any = start((Writer if named else WriterByPosition)(add).to(lane.device), level, lane)
    if backend is not None:
        model = torch.compile(model, backend=backend, fullgraph=True)
    state = {"mean": torch.zeros(1, device=lane.device).expand(4)}
    with caplog.at_level(logging.WARNING, "xamp"):
        for _ in range(2):
            model(batch(lane), s=state) if named else model(batch(lane), state)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "the forward wrote into its argument s" in said[0]
    assert "initialize(..., cast_model_inputs=('s',))" in said[0]
    assert state["mean"].tolist() == [0.0] * 4


@pytest.mark.parametrize("level", CAST)
def test_a_type_that_is_exempt_is_the_callers_own(level: str, lane: Lane) -> None:
    def write(y: Any, s: Any) -> None:
        s["inner"].memory["dtype"] = s["inner"].h.dtype
        s["n"] = 1

    model = start(Writer(write).to(lane.device), level, lane, cast_model_inputs=(State,))
    inner = State(h=one().to(lane.device))
    state = {"inner": inner, "h": one().to(lane.device)}
    model(batch(lane), s=state)
    assert state["inner"] is inner
    assert inner.memory == {"dtype": torch.float32}
    assert state["n"] == 1
