"""Containers in and out of ``forward``: each keeps its type, and nothing but fp16, bf16 and fp32 tensors changes.

Covers: xamp.values.containers, xamp.values.forms, xamp.values.walk, xamp.values.ways, xamp.casting.unseen_results.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from containers import (
    MAKERS,
    AttributeDict,
    ClassifierOutput,
    Encoding,
    Frozen,
    MyDict,
    MyList,
    MyTuple,
    Noted,
    Plain,
    Point,
    SlotDict,
    Slotted,
    floats,
    leaves,
    shape,
    with_attributes,
)
from gathering import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lane
from managed_models import start
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from xamp.values.containers import cast_any, cast_floats, common_caster, result_caster

HALF, FP32 = torch.float16, torch.float32
CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


class Cast(Protocol):
    def __call__(self, value: Any, dtype: torch.dtype) -> Any: ...


def cast_by_type(value: Any, dtype: torch.dtype) -> Any:
    """The cast of eager forwards, as :func:`cast_floats` is called."""
    return BY_TYPE[dtype](value)


BY_TYPE = {dtype: result_caster(dtype) for dtype in CASTABLE}
both = pytest.mark.parametrize("cast", [cast_floats, cast_by_type])


@both
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_container_keeps_its_type_and_the_callers_stays_as_it_was(
    make: Callable[[torch.Tensor], Any], cast: Cast
) -> None:
    given = make(floats())
    before = leaves(given)
    values = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in before]
    result = cast(given, HALF)
    assert result is not given
    assert shape(result) == shape(given)
    for old, new, kept, value in zip(before, leaves(result), leaves(given), values, strict=True):
        assert kept is old, "the caller's container was written to"
        if isinstance(old, torch.Tensor) and old.dtype in CASTABLE:
            assert new.dtype == HALF
            assert torch.equal(new.float(), value)
            assert torch.equal(old, value)
        else:
            assert new is old


@both
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_container_in_which_nothing_changes_is_the_same_object(
    make: Callable[[torch.Tensor], Any], cast: Cast
) -> None:
    given = make(floats())
    assert cast(given, FP32) is given


@pytest.mark.parametrize("make", [lambda x: [x], lambda x: (x, 1), lambda x: {"a": [x]}, Point, Plain])
def test_common_containers_are_cast_by_the_loop(make: Callable[..., Any]) -> None:
    """It leaves others to the walk, which takes several times as long and makes the same."""
    made = common_caster(FP32)(make(torch.ones(2, dtype=HALF)), {})
    assert leaves(made)[0].dtype == FP32


class Opaque:
    def __init__(self) -> None:
        self.tensor = floats()


UNTOUCHED: list[Any] = [
    3,
    2.5,
    1j,
    True,
    None,
    "text",
    b"bytes",
    torch.float32,
    torch.device("cpu"),
    np.ones(2, dtype=np.float32),
    np.float32(1.0),
    torch.ones(2, dtype=torch.float64),
    torch.ones(2, dtype=torch.complex64),
    torch.ones(2, dtype=torch.int64),
    torch.ones(2, dtype=torch.bool),
    torch.ones(2).to(torch.float8_e4m3fn),
    torch.Size([2, 3]),
    range(3),
    {1, 2},
    Plain,
    Opaque(),
]


@both
@pytest.mark.parametrize("value", UNTOUCHED, ids=lambda v: f"{type(v).__name__} {getattr(v, 'dtype', '')}")
def test_what_is_no_lower_or_single_float_passes_as_the_same_object(value: Any, cast: Cast) -> None:
    assert cast(value, HALF) is value
    result = cast([value, {"x": value, "t": floats()}], HALF)
    assert result[0] is value
    assert result[1]["x"] is value
    assert result[1]["t"].dtype == HALF


@both
def test_a_mapping_keeps_what_was_set_on_it(cast: Cast) -> None:
    """The dict of ``state_dict()`` has the versions of its modules in ``_metadata``."""
    state = nn.BatchNorm1d(2).state_dict()
    found = cast(state, HALF)
    assert found["weight"].dtype is HALF
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    given = UserDict(a=floats())
    given.name = "mine"  # type: ignore[attr-defined]
    assert cast(given, HALF).name == "mine"


@both
def test_a_model_output_answers_by_attribute_key_and_index(cast: Cast) -> None:
    given = ClassifierOutput(loss=floats(), hidden_states=(floats(),))
    result = cast(given, HALF)
    assert result.loss is result["loss"] is result[0]
    assert result.loss.dtype == result.hidden_states[0].dtype == HALF
    assert result.logits is None
    assert list(result) == ["loss", "hidden_states"]
    assert given.loss is given["loss"]
    assert given.loss.dtype == FP32


@both
def test_a_packed_sequence_keeps_its_order(cast: Cast) -> None:
    padded = torch.arange(6.0).reshape(2, 3, 1)
    packed = pack_padded_sequence(padded, torch.tensor([2, 3]), batch_first=True, enforce_sorted=False)
    result = cast(packed, HALF)
    assert isinstance(result, PackedSequence)
    assert result.data.dtype == HALF
    assert torch.equal(result.batch_sizes, packed.batch_sizes)
    assert result.sorted_indices is packed.sorted_indices
    assert result.unsorted_indices is packed.unsorted_indices


@both
def test_gradients_flow_back_through_the_cast(cast: Cast) -> None:
    leaf = torch.ones(2, requires_grad=True)
    cast({"x": [leaf]}, HALF)["x"][0].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == FP32
    assert torch.equal(leaf.grad, torch.ones(2))


class Tagged(torch.Tensor):
    """A tensor of somebody's own type."""


@both
def test_a_tensor_subclass_keeps_its_type(cast: Cast) -> None:
    given = torch.ones(2).as_subclass(Tagged)
    result = cast(given, HALF)
    assert type(result) is Tagged
    assert result.dtype == HALF
    assert cast(given, FP32) is given


# ---------------------------------------------------------------- any nesting

TENSORS = st.sampled_from(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int32, torch.bool)
).map(lambda dtype: torch.ones(2, dtype=dtype))
LEAVES = st.one_of(TENSORS, st.integers(), st.text(max_size=3), st.none(), st.just(np.ones(2, dtype=np.float32)))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(children, max_size=3)
    dicts = st.dictionaries(st.text(max_size=2), children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        lists.map(MyList),
        lists.map(lambda items: with_attributes(MyTuple(items))),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda items: defaultdict(list, items)),
        dicts.map(MyDict),
        dicts.map(Encoding),
        st.builds(Point, children, children),
        st.builds(Plain, children, children),
        st.builds(Frozen, children, children),
        st.builds(Slotted, children, children),
        st.builds(ClassifierOutput, children, children),
    )


@given(
    st.recursive(LEAVES, _containers, max_leaves=12),
    st.sampled_from(CASTABLE),
    st.sampled_from([cast_floats, cast_by_type]),
)
@settings(max_examples=200, deadline=None)
def test_any_nesting_keeps_its_types_and_only_castable_tensors_change(
    value: Any, dtype: torch.dtype, cast: Cast
) -> None:
    before, form = leaves(value), shape(value)
    result = cast(value, dtype)
    assert shape(result) == form
    assert shape(value) == form
    changed = False
    for old, new, kept in zip(before, leaves(result), leaves(value), strict=True):
        assert kept is old
        if isinstance(old, torch.Tensor) and old.dtype in CASTABLE and old.dtype != dtype:
            assert new.dtype == dtype
            changed = True
        else:
            assert new is old
    assert changed or result is value


# ---------------------------------------------------------------- through a model


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inside: list[Any] = []

    def forward(self, batch: Any, *, extra: Any = None) -> Any:
        self.inside = [shape(batch), [leaf.dtype for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]]
        return batch if extra is None else (batch, extra)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_batch_goes_in_lowered_and_comes_out_fp32_in_the_same_containers(level: str, lane: Lane) -> None:
    model = start(Echo().to(lane.device), level, lane)
    lower = model.weight.dtype
    for name in ("nested", "ModelOutput", "UserDict subclass", "frozen dataclass"):
        given = MAKERS[name](floats().to(lane.device))
        form = shape(copy.copy(given))
        result = model(given)
        assert model.inside[0] == form
        assert set(model.inside[1]) == {lower}
        assert shape(result) == form
        assert {leaf.dtype for leaf in leaves(result) if isinstance(leaf, torch.Tensor)} == {FP32}
    double = torch.ones(2, dtype=torch.float64, device=lane.device)
    out, extra = model({"x": double, "n": 3}, extra="label")
    assert out["x"] is double
    assert (out["n"], extra) == (3, "label")


def test_types_may_come_in_any_order() -> None:
    for first, second in itertools.product(MAKERS, repeat=2):
        caster = result_caster(HALF)
        for name in (first, second, second, first):
            given = MAKERS[name](floats())
            result, expected = caster(given), cast_floats(given, HALF)
            assert shape(result) == shape(expected), (first, second)
            assert [str(leaf) for leaf in leaves(result)] == [str(leaf) for leaf in leaves(expected)], (first, second)


def test_a_class_made_in_each_forward_is_not_kept() -> None:
    caster, classes = result_caster(FP32), []
    for _ in range(300):
        made = dataclasses.make_dataclass("Made", ["x"])
        assert caster(made(floats().half())).x.dtype == FP32
        classes.append(weakref.ref(made))
        del made
    gc.collect()
    assert sum(each() is not None for each in classes) < 150


@dataclasses.dataclass
class Empty:
    pass


@both
def test_a_dataclass_without_fields_passes_as_the_same_object_unless_it_has_attributes(cast: Cast) -> None:
    given: Any = Empty()
    assert cast(given, HALF) is given
    given.x = floats()
    result = cast(given, HALF)
    assert (type(result), result.x.dtype, given.x.dtype) == (Empty, HALF, FP32)


@dataclasses.dataclass
class Counted:
    """Has a value of its class, one that is set elsewhere, and a way of its own to be copied."""

    x: Any
    y: int = 1
    copies = 0

    def __copy__(self) -> Counted:
        made = Counted(self.x, self.y)
        made.copies = self.copies + 1
        return made


@both
def test_a_dataclass_with_its_own_copy_is_copied_that_way(cast: Cast) -> None:
    given = Counted(floats())
    given.note = "kept"  # type: ignore[attr-defined]
    result = cast(given, HALF)
    assert (result.x.dtype, result.y, result.copies, given.x.dtype) == (HALF, 1, 1, FP32)


class _Stored:
    """A descriptor that keeps its value under another name, and counts how often it is set."""

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return floats() if owner is None else owner.__dict__["_x"]

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__["_x"] = value
        owner.__dict__["sets"] = owner.__dict__.get("sets", 0) + 1


_DEFAULT = floats()


@dataclasses.dataclass
class _Described:
    """Its field is a descriptor."""

    x: Any = _Stored()


@dataclasses.dataclass
class _Defaulted:
    """Has a tensor that only its class holds, until a cast gives the copy one of its own."""

    y: Any
    x: Any = dataclasses.field(default=_DEFAULT, init=False)


@both
def test_a_field_that_is_a_descriptor_is_set_through_it(cast: Cast) -> None:
    given = _Described(floats())
    result = cast(given, HALF)
    assert (result.x.dtype, given.x.dtype, result.sets) == (HALF, FP32, given.sets + 1)  # type: ignore[attr-defined]
    assert "x" not in result.__dict__


@both
def test_a_default_of_the_class_is_cast_for_the_copy_alone(cast: Cast) -> None:
    given = _Defaulted(1)
    assert "x" not in given.__dict__
    result = cast(given, HALF)
    assert (result.x.dtype, result.y, given.x.dtype, _Defaulted.x.dtype) == (HALF, 1, FP32, FP32)


@dataclasses.dataclass
class _Doubled:
    """Gives twice what it holds."""

    x: Any

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        return found * 2 if isinstance(found, torch.Tensor) else found


@dataclasses.dataclass
class _Late(_Doubled):
    """Makes a field when it is asked for."""

    y: Any = dataclasses.field(init=False)

    def __getattr__(self, name: str) -> Any:
        if name != "y":
            raise AttributeError(name)
        return floats()


@both
@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("kind", [_Doubled, _Late])
def test_what_a_dataclass_holds_is_copied_not_what_it_gives(cast: Cast, kind: type[_Doubled], noted: bool) -> None:
    """Whether or not it holds its fields and no more."""
    given: Any = kind(torch.ones(2))
    if noted:
        given.note = "kept"
    result = cast(given, HALF)
    assert torch.equal(result.x, torch.full((2,), 2.0, dtype=HALF))
    assert vars(result).keys() == vars(given).keys()


class _Noting:
    """Counts the assignments to its attributes."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "sets", vars(self).get("sets", 0) + 1)


@dataclasses.dataclass
class _Noted(_Noting):
    x: Any
    y: Any = None


@both
def test_values_of_a_dataclass_that_are_no_fields_are_in_the_copy(cast: Cast) -> None:
    given: Any = Plain(floats(), 1)
    given.note = [floats()]
    result = cast(given, HALF)
    assert (result.x.dtype, result.y, given.x.dtype) == (HALF, 1, FP32)
    assert (result.note[0].dtype, given.note[0].dtype) == (HALF, FP32)
    del given.y
    result = cast(given, HALF)  # as many values as fields
    assert (set(vars(result)), result.x.dtype, result.note[0].dtype) == (
        {"x", "note"},
        HALF,
        HALF,
    )


@both
def test_a_dataclass_that_notes_what_is_assigned_notes_no_cast(cast: Cast) -> None:
    given = _Noted(floats())
    result = cast(given, HALF)
    assert (result.x.dtype, vars(result)["sets"], vars(given)["sets"]) == (HALF, 2, 2)
    given = Frozen(floats(), {"z": floats()})  # type: ignore[assignment]
    result = cast(given, HALF)
    assert (type(result), result.x.dtype, result.y["z"].dtype) == (Frozen, HALF, HALF)


# ---------------------------------------------------------------- what a container is besides its items


@both
def test_items_that_are_attributes_stay_the_same_values(cast: Cast) -> None:
    given: Any = AttributeDict(x=floats(), inner=AttributeDict(y=floats()))
    result = cast(given, HALF)
    assert result.x is result["x"]
    assert result.inner.y is result["inner"]["y"]
    assert result.inner.y.dtype == HALF
    result.new = 1
    assert result["new"] == 1
    assert "new" not in given
    assert given.x.dtype == FP32


@both
@pytest.mark.parametrize("make", [Noted, lambda t: MyTuple([t]), lambda t: MyList([t]), lambda t: MyDict(x=t)])
def test_tensors_that_are_attributes_are_cast(make: Callable[[torch.Tensor], Any], cast: Cast) -> None:
    given = make(floats())
    given.note, given.count = [floats()], 3
    result = cast(given, HALF)
    assert (type(result), result.note[0].dtype, result.count) == (type(given), HALF, 3)
    assert given.note[0].dtype == FP32
    plain: Any = make(torch.ones(1, dtype=torch.int64))
    plain.note = floats()
    assert cast(plain, HALF).note.dtype == HALF


@both
def test_an_attribute_in_a_slot_is_cast(cast: Cast) -> None:
    given: Any = SlotDict(x=1)
    given.note = floats()
    result = cast(given, HALF)
    assert (type(result), result["x"], result.note.dtype, given.note.dtype) == (SlotDict, 1, HALF, FP32)
    assert cast(SlotDict(x=floats()), HALF)["x"].dtype == HALF  # nothing is in the slot


@dataclasses.dataclass
class Late:
    """Has a field that its ``__init__`` does not take."""

    x: Any
    hidden: Any = dataclasses.field(init=False, default=None)


@both
def test_fields_that_are_set_late_and_other_attributes_stay(cast: Cast) -> None:
    given: Any = Late(floats())
    given.hidden = floats()
    given.extra = (floats(), 1)
    result = cast(given, HALF)
    assert (result.x.dtype, result.hidden.dtype, result.extra[0].dtype, result.extra[1]) == (HALF, HALF, HALF, 1)


# ---------------------------------------------------------------- what is one object


TWICE: list[tuple[Callable[[Any], Any], Callable[[Any], tuple[Any, Any]]]] = [
    (lambda c: [c, c], lambda v: (v[0], v[1])),
    (lambda c: (c, {"again": c}), lambda v: (v[0], v[1]["again"])),
    (lambda c: {"a": c, "b": [c]}, lambda v: (v["a"], v["b"][0])),
    (lambda c: Plain(c, c), lambda v: (v.x, v.y)),
    (lambda c: Point(c, c), lambda v: (v.x, v.y)),
    (lambda c: MyDict(a=c, b=c), lambda v: (v["a"], v["b"])),
    (lambda c: with_attributes(MyList([c, c])), lambda v: (v[0], v[1])),
    (lambda c: ClassifierOutput(loss=c, logits=c), lambda v: (v.loss, v["logits"])),
    (lambda c: [Frozen(c, 1), Slotted(c, 1)], lambda v: (v[0].x, v[1].x)),
]
INNER: list[Callable[[], Any]] = [
    floats,
    lambda: [floats()],
    lambda: {"x": floats()},
    lambda: (floats(), 1),
    lambda: Plain(floats()),
    lambda: MyDict(x=floats()),
]


@both
def test_what_is_one_object_stays_one(cast: Cast) -> None:
    for (make, both_of), inner in itertools.product(TWICE, INNER):
        one, other = both_of(cast(make(inner()), HALF))
        assert one is other
        assert shape(one) == shape(inner())
        assert {leaf.dtype for leaf in leaves(one) if isinstance(leaf, torch.Tensor)} == {HALF}


@both
def test_a_container_may_hold_itself(cast: Cast) -> None:
    a_list: list[Any] = [floats()]
    a_list.append(a_list)
    a_dict: dict[str, Any] = {"x": floats(), "list": [1]}
    a_dict["list"].append(a_dict)
    parent, child = Plain(floats()), Plain(floats())
    parent.y, child.y = [child], parent
    for value, way in (
        (a_list, lambda v: v[1]),
        (a_dict, lambda v: v["list"][1]),
        (parent, lambda v: v.y[0].y),
        ({"outer": (a_list,)}, lambda v: {"outer": (v["outer"][0][1],)}),
    ):
        result = cast(value, HALF)
        assert result is not value
        again = way(result)
        assert again is result or again == {"outer": (result["outer"][0],)}
    assert cast(a_list, HALF)[0].dtype == HALF
    assert cast(parent, HALF).y[0].x.dtype == HALF
    empty: list[Any] = [1]
    empty.append(empty)
    assert cast(empty, HALF) is empty


# ---------------------------------------------------------------- what is not looked into


@dataclasses.dataclass
class Refusing:
    """Cannot be copied."""

    x: Any

    def __copy__(self) -> Any:
        raise TypeError("no copies")


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


OUTSIDE: dict[str, Callable[[torch.Tensor], Any]] = {
    "deque": lambda t: deque([t]),
    "SimpleNamespace": lambda t: types.SimpleNamespace(x=t),
    "Holder": Holder,
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset([t]),
    "mappingproxy": lambda t: types.MappingProxyType({"x": t}),
    "ChainMap": lambda t: ChainMap({"x": t}),
    "dict_values": lambda t: {"x": t}.values(),
    "list_iterator": lambda t: iter([t]),
    "generator": lambda t: (each for each in [t]),
    "Refusing": Refusing,
}


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.inner(x))


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_object_that_is_not_looked_into_passes_and_is_said_once(
    nested: bool, level: str, lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    with cases() as case:
        for name, make in OUTSIDE.items():
            with case(name):
                made: list[Any] = []

                def keep(t: torch.Tensor, make: Any = make, made: list[Any] = made) -> Any:
                    made.append(make(t))
                    return {"a": [made[-1]], "t": t} if nested else made[-1]

                model = start(Returning(keep).to(lane.device), level, lane)
                caplog.clear()
                with caplog.at_level("WARNING", "xamp"):
                    for _ in range(3):
                        result = model(floats().to(lane.device))
                        assert (result["a"][0] if nested else result) is made[-1]
                said = [record.getMessage() for record in caplog.records]
                assert len(said) == 1, said
                assert f"forward returns a {name}, which xamp does not look into" in said[0]


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_nothing_is_said_of_what_has_nothing_to_cast(level: str, lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    values = (deque([1]), Holder(floats().double()), Holder(None), {1, 2}, range(3), nn.Linear(2, 2).half(), Empty())
    with caplog.at_level("WARNING", "xamp"):
        for value in values:
            assert (
                start(Returning(lambda t, value=value: value).to(lane.device), level, lane)(  # type: ignore[misc]
                    floats().to(lane.device)
                )
                is value
            )
    assert not caplog.records


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_argument_whose_class_cannot_be_copied_passes_and_is_said(
    level: str, lane: Lane, caplog: pytest.LogCaptureFixture
) -> None:
    cannot = dataclasses.make_dataclass(f"Refusing{level}", ["x"], bases=(Refusing,))
    model = start(Echo().to(lane.device), level, lane)
    given = cannot(floats().to(lane.device))
    with caplog.at_level("WARNING", "xamp"):
        for _ in range(2):
            model({"a": given})
    said = [record.getMessage() for record in caplog.records if "Echo.forward gets" in record.getMessage()]
    assert len(said) == 1
    assert f"gets a Refusing{level} as it is" in said[0]


def test_results_may_be_cast_by_a_function_that_casts_more() -> None:
    x = torch.ones(2, dtype=torch.float64)
    assert result_caster(FP32)([x])[0].dtype is torch.float64
    assert result_caster(FP32, cast_any)([x])[0].dtype is FP32
