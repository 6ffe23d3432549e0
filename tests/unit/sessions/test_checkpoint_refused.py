"""What does not fit is refused, with the key in the message, and everything is as it was, down to the bits.

Covers: xamp.sessions.formats, xamp.sessions.checkpoint.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from checkpoints import Run, start, train
from faults import POISON, places
from hypothesis import strategies as st
from lanes import Lane
from snapshot import Snapshot
from stepping import assert_same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import xamp
from xamp.errors import CheckpointError

ERROR = r"load_state_dict\(state\): .*{}.*Nothing was loaded"


class Guarded:
    """A run at O2 that has trained, and how it stood."""

    def __init__(self, lane: Lane) -> None:
        self.run: Run = start(lane, "O2", num_losses=2)
        train(self.run, lane, range(4), overflows=[2])
        self.state = xamp.state_dict(self.run.optimizer)
        self._objects = Snapshot(self.run.model, self.run.optimizer)

    def refuses(self, state: Any, message: str) -> None:
        with pytest.raises(CheckpointError, match=ERROR.format(message)):
            xamp.load_state_dict(state, self.run.optimizer)
        self.is_as_before()

    def is_as_before(self) -> None:
        self._objects.assert_same()
        assert_same(xamp.state_dict(self.run.optimizer), self.state)

    def changed(self, *path: Any, to: Any) -> Any:
        state: Any = copy.deepcopy(self.state)
        functools.reduce(lambda found, key: found[key], path[:-1], state)[path[-1]] = to
        return state


@pytest.fixture
def guarded(lane: Lane) -> Guarded:
    return Guarded(lane)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 2, "'schema' is 2, from a newer xamp; this one reads up to 1. Upgrade xamp"),
        (["schema"], 10**9, "'schema' is 1000000000, from a newer xamp"),
        (["schema"], 0, "not a state of xamp: format='xamp', schema=0"),
        (["schema"], True, "not a state of xamp: format='xamp', schema=True"),
        (["schema"], "1", "not a state of xamp: format='xamp', schema='1'"),
        (["format"], "torch", "not a state of xamp: format='torch', schema=1"),
        (["format"], None, "not a state of xamp: format=None"),
        (["level"], 2, r"state\['level'\]: must be a string, and is int"),
        (["dtype"], None, r"state\['dtype'\]: must be a string, and is NoneType"),
        (["extra"], 1, "unknown key 'extra'"),
        (["steps"], [], r"state\['steps'\]: must be a dict, and is list"),
        (["steps", "skipped"], -1, r"state\['steps'\]\['skipped'\]: must be a whole number from 0 to .*, and is -1"),
        (
            ["steps", "skipped"],
            True,
            r"state\['steps'\]\['skipped'\]: must be a whole number from 0 to .*, and is True",
        ),
        (["steps", "other"], 1, r"state\['steps'\]: unknown key 'other'"),
        (["scalers"], {}, r"state\['scalers'\]: must be a list, and is dict"),
        (["scalers", 1], None, r"state\['scalers'\]\[1\]: must be a dict, and is NoneType"),
        (["scalers", 1, "scale"], float("inf"), r"\['scalers'\]\[1\]\['scale'\]: must be a finite .* and is inf"),
        (["scalers", 0, "scale"], torch.tensor(1.0), r"\['scalers'\]\[0\]\['scale'\]: must be a finite number"),
        (["scalers", 0, "scale"], 10**400, r"\['scalers'\]\[0\]\['scale'\]: .* is a number of 1329 bits"),
        (["scalers", 0, "growth_tracker"], 1.0, r"\['scalers'\]\[0\]\['growth_tracker'\]: must be a whole number"),
        (["scalers", 0, "dynamic"], None, r"\['scalers'\]\[0\]\['dynamic'\]: must be True or False, and is None"),
        (["optimizers"], None, r"state\['optimizers'\]: must be a list"),
        (["optimizers", 0, "overflow_run"], "9", r"\['optimizers'\]\[0\]\['overflow_run'\]: must be a whole number"),
        (["optimizers", 0, "masters"], 1, r"\['optimizers'\]\[0\]\['masters'\]: must be a dict, and is int"),
        (["optimizers", 0, "masters"], {"0.9": torch.ones(1)}, r"\['0.9'\]: no optimizer here has a parameter at"),
        (
            ["optimizers", 0, "masters"],
            {"0.0": torch.ones(1)},
            r"\['0.0'\]: shape \(1,\), and the parameter's is \(8, 4\)",
        ),
        (["masters"], "abc", r"state\['masters'\]: must be a list, and is str"),
        (["masters", 0], [], r"state\['masters'\]\[0\]: must be a dict"),
        (["masters", 0, "gone.weight"], torch.ones(1), r"\['gone.weight'\]: the model has no such parameter"),
        (["masters", 0, 3], torch.ones(1), r"state\['masters'\]\[0\]\[3\]: a name must be a string"),
        (["masters"], [{}, {"a": torch.ones(1)}], r"state\['masters'\]\[1\] belongs to a further model"),
    ],
)
def test_a_value_that_is_wrong(guarded: Guarded, path: list[Any], value: Any, message: str) -> None:
    guarded.refuses(guarded.changed(*path, to=value), message)


class Broken(collections.UserDict[str, Any]):
    """A mapping that fails when it is read, as one over a file that is gone."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("gone")


def test_a_container_that_fails_when_it_is_read(guarded: Guarded) -> None:
    message = "load_state_dict.state.: the state cannot be read: OSError: gone"
    for state in (Broken(guarded.state), {**guarded.state, "steps": Broken(guarded.state["steps"])}):
        with pytest.raises(CheckpointError, match=message):
            xamp.load_state_dict(state, guarded.run.optimizer)
        guarded.is_as_before()


@pytest.mark.parametrize("key", ["format", "schema", "level", "dtype", "steps", "scalers", "optimizers", "masters"])
def test_a_key_that_is_missing(guarded: Guarded, key: str) -> None:
    state = {name: value for name, value in guarded.state.items() if name != key}
    guarded.refuses(state, f"not a state of xamp|'{key}' is missing")


DENSE = "must be a dense fp32 tensor, and is "
MASTERS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "fp16": (torch.Tensor.half, DENSE + "torch.float16"),
    "bf16": (torch.Tensor.bfloat16, DENSE + "torch.bfloat16"),
    "fp64": (torch.Tensor.double, DENSE + "torch.float64"),
    "int": (torch.Tensor.int, DENSE + "torch.int32"),
    "a list": (torch.Tensor.tolist, DENSE + "of type list"),
    "numpy": (torch.Tensor.numpy, DENSE + "of type ndarray"),
    "sparse": (lambda tensor: tensor.to_sparse(), DENSE + "torch.sparse_coo"),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), DENSE + "torch._mkldnn"),
    "meta": (lambda tensor: tensor.to("meta"), DENSE + "on the device 'meta', which holds no numbers"),
    "another shape": (lambda tensor: tensor.reshape(4, 8), r"shape \(4, 8\), and the parameter's is \(8, 4\)"),
    "broadcastable": (lambda tensor: tensor[:1], r"shape \(1, 4\), and the parameter's is \(8, 4\)"),
    "a scalar": (lambda tensor: tensor[0, 0], r"shape \(\), and the parameter's is \(8, 4\)"),
}


@pytest.mark.parametrize("kind", MASTERS)
def test_a_master_that_cannot_be_one(guarded: Guarded, kind: str) -> None:
    """The last master is the one that is wrong: those before it must not have been written."""
    state = copy.deepcopy(guarded.state)
    named = state["masters"][0]
    for master in named.values():
        master.add_(1.0)
    wrong = named.pop("inner.weight")
    make, message = MASTERS[kind]
    named["inner.weight"] = make(wrong)
    guarded.refuses(state, rf"state\['masters'\]\[0\]\['inner.weight'\]: {message}")


def test_a_sharded_master(guarded: Guarded) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        sharded = DTensor.from_local(guarded.state["masters"][0]["inner.weight"], mesh, [Replicate()])
        guarded.refuses(
            guarded.changed("masters", 0, "inner.weight", to=sharded),
            r"\['inner.weight'\]: must be a dense fp32 tensor, and is of type DTensor",
        )
    finally:
        torch.distributed.destroy_process_group()


def test_a_master_for_a_parameter_that_cannot_take_it(lane: Lane) -> None:
    source = start(lane, "O2")
    state = xamp.state_dict(source.optimizer)
    model: Any = start(lane, "O1").model
    model.inner.weight.data = model.inner.weight.data.double()
    with pytest.raises(CheckpointError, match=r"\['inner.weight'\]: the parameter is a Parameter of torch.float64"):
        xamp.load_state_dict(state, model)


class Odd(nn.Parameter):
    """A parameter that is copied to its own way, as a quantised one is."""


def test_a_master_for_a_parameter_of_a_class_of_its_own(lane: Lane) -> None:
    source = start(lane, "O2")
    state = xamp.state_dict(source.optimizer)
    run = start(lane, "O1")
    run.model.inner.weight = Odd(run.model.inner.weight.detach())
    before = Snapshot(run.model)
    with pytest.raises(CheckpointError, match=r"\['inner.weight'\]: the parameter is a Odd of torch.float32, which no"):
        xamp.load_state_dict(state, run.optimizer)
    before.assert_same()


def test_a_master_with_inf_and_nan_is_what_it_is(guarded: Guarded) -> None:
    """A run that diverged can be resumed and looked at."""
    state = guarded.changed("masters", 0, "inner.bias", to=torch.tensor([float("nan"), float("inf"), 1.0] + [0.0] * 5))
    xamp.load_state_dict(state, guarded.run.optimizer)
    assert_same(xamp.state_dict(guarded.run.optimizer), state)


@hypothesis.settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_any_change_loads_or_is_refused_and_changes_nothing(guarded: Guarded, data: st.DataObject) -> None:
    state: Any = copy.deepcopy(guarded.state)
    anything = st.one_of(
        st.sampled_from(POISON),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
        st.recursive(
            st.integers(), lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=2), x), max_leaves=4
        ),
        st.sampled_from([torch.ones(1), torch.ones(8, 4).half(), torch.ones(8, 4)]),
    )
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(state) or [({}, 0)]))
        change = data.draw(st.sampled_from(["replace", "drop", "add", "nest", "swap"]))
        if change == "replace":
            container[key] = copy.deepcopy(data.draw(anything))
        elif change == "drop":
            del container[key]
        elif change == "nest":
            container[key] = [container[key]] if data.draw(st.booleans()) else {"x": container[key]}
        elif change == "swap":
            other, place = data.draw(st.sampled_from(places(state)))
            container[key] = copy.deepcopy(other[place])
        elif isinstance(container, dict):
            container[data.draw(st.text(max_size=3) | st.integers() | st.none())] = copy.deepcopy(data.draw(anything))
        else:
            container.insert(0, copy.deepcopy(data.draw(anything)))
    try:
        xamp.load_state_dict(state, guarded.run.optimizer)
    except CheckpointError as error:
        guarded.is_as_before()
        said = str(error)
    else:
        said = "Nothing was loaded"
        assert all(0.0 < xamp.loss_scale(guarded.run.optimizer, i) <= 2.0**24 for i in range(2))
        xamp.load_state_dict(guarded.state, guarded.run.optimizer)
        assert_same(xamp.state_dict(guarded.run.optimizer), guarded.state)
    assert "Nothing was loaded" in said
