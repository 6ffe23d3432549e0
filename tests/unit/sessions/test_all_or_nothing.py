"""A call of ``initialize`` that raises leaves models and optimizers exactly as they were.

Covers: xamp.sessions.initialize, xamp.sessions.set_up, xamp.sessions.checks.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Lane, needs_dtype, usable_lanes
from managed_models import LEVELS, Net, batch, net, sgd, train
from snapshot import Snapshot
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import xamp
from xamp import policy
from xamp.errors import BackendUnavailable, PolicyError, StateError, UnsupportedPolicy, XampError

CAST = ("O2", "O3", "O5")


def used(lane: Lane) -> tuple[Net, torch.optim.Optimizer]:
    """A model with gradients, hooks and an optimizer that has stepped."""
    model = net(lane)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model.register_forward_hook(lambda *_: None)
    model.inner.register_forward_pre_hook(lambda *_: None)
    optimizer.register_step_pre_hook(lambda *_: None)
    model.note = "somebody's"  # type: ignore[assignment]
    for _ in range(2):
        model(batch(lane))[0].square().mean().backward()
        optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def refused(error: type[BaseException], message: str, *objects: nn.Module | torch.optim.Optimizer) -> Iterator[None]:
    """The body raises ``error`` and ``objects`` are as they were."""
    before = Snapshot(*objects)
    with pytest.raises(error, match=message):
        yield
    before.assert_same()
    for found in objects:
        with pytest.raises(StateError, match=r"not given to xamp\.initialize"):
            xamp.session(found)


# One wrong argument in a call that is right otherwise.
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "level": (PolicyError, "no such level", {"level": "O7"}),
    "backend": (BackendUnavailable, "no backend of that name", {"backend": "quipu"}),
    "backend, almost": (BackendUnavailable, r"Did you mean 'cpu'\?", {"backend": "cpuu"}),
    "backend that is no string": (XampError, "backend", {"backend": 3}),
    "backend that is a list": (XampError, "backend", {"backend": ["cpu"]}),
    "keep_fp32": (PolicyError, "matches no module", {"keep_fp32": ["nowhere.*"]}),
    "methods": (PolicyError, "has no method 'sample'", {"methods": ["sample"]}),
    "loss_scale": (PolicyError, "a loss scale is", {"loss_scale": -1}),
    "num_losses": (PolicyError, "num_losses=0", {"num_losses": 0}),
    "enabled": (PolicyError, "enabled='perhaps'", {"enabled": "perhaps"}),
    "verbosity": (PolicyError, "verbosity='loud'", {"verbosity": "loud"}),
    "delegate that is no switch": (PolicyError, "delegate=3", {"delegate": 3}),
    "delegate": (UnsupportedPolicy, "nothing to hand over to", {"delegate": True}),
    "op_policy": (PolicyError, "no such choice", {"op_policy": "theirs"}),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument(wrong: str, level: str, lane: Lane) -> None:
    model, optimizer = used(lane)
    error, message, arguments = WRONG[wrong]
    call: dict[str, Any] = {"level": level, "verbosity": 0, **arguments}
    with refused(error, message, model, optimizer):
        xamp.initialize(model, optimizer, **call)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_model(dtype: torch.dtype, level: str, lane: Lane) -> None:
    if policy.LEVELS[level].master_weights and str(dtype) == f"torch.{policy.LEVELS[level].dtype}":
        dtype = {torch.float16: torch.bfloat16, torch.bfloat16: torch.float16}[dtype]  # the level takes its own
        needs_dtype(lane, dtype)
    model, optimizer = used(lane)
    model.head.to(dtype)
    takes = {torch.float16: "O2", torch.bfloat16: "O5"}[dtype]
    cure = rf"{takes} takes a model in {str(dtype).removeprefix('torch.')}"
    message = rf"'head\.weight' of Net is {dtype}, .*Leave out \.half\(\).*model\.float\(\).*{cure}"
    with refused(PolicyError, message, model, optimizer):
        xamp.initialize(model, optimizer, level=level)


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_on_two_device_types(level: str, lane: Lane) -> None:
    model, optimizer = used(lane)
    with FakeTensorMode():  # a tensor of a device that is not there
        elsewhere = nn.Parameter(torch.empty(2, device="xla"))
    with refused(PolicyError, "on two device types, .* and .*model.to", model, optimizer):
        model.register_parameter("extra", elsewhere)
        try:
            xamp.initialize(model, optimizer, level=level)
        finally:
            del model.extra


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("part", [False, True])
def test_parameters_without_memory(part: bool, level: str, lane: Lane) -> None:
    model, _ = used(lane)
    values = copy.deepcopy(model.state_dict())
    (model.head if part else model).to("meta")
    with pytest.raises(PolicyError, match=r"are on meta.*model\.to_empty\(device=\.\.\.\)"):
        xamp.initialize(model, sgd(model), level=level)
    model.to_empty(device=lane.device)
    model.load_state_dict(values)
    train(*xamp.initialize(model, sgd(model), level=level, verbosity=0), batch(lane))


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_of_another_model(level: str, lane: Lane) -> None:
    (model, optimizer), (other, _) = used(lane), used(lane)
    with refused(PolicyError, "holds no parameter of the models given", model, other, optimizer):
        xamp.initialize(other, optimizer, level=level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("again", LEVELS)
def test_a_second_initialize_leaves_the_first_working(level: str, again: str, lane: Lane) -> None:
    model, optimizer = used(lane)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    other = sgd(model) if level not in CAST else torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before = Snapshot(model, optimizer, other)
    calls: list[tuple[Any, Any]] = [(model, optimizer), (model, None), (model, other), ([model], [optimizer, other])]
    for models, optimizers in calls:
        with pytest.raises(StateError, match=r"was given to initialize before.*close\(\) first"):
            xamp.initialize(models, optimizers, level=again)
    before.assert_same()
    train(model, optimizer, batch(lane))
    assert xamp.session(optimizer).policy.level == level


@pytest.mark.parametrize("level", CAST)
def test_a_model_that_ddp_already_wraps(level: str) -> None:
    lane = next(lane for lane in usable_lanes() if lane.device.type == "cpu")
    # torch's own stand-in: gloo's threads can hang when a group is taken down inside a process that goes on.
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        model, optimizer = used(lane)
        wrapped = DistributedDataParallel(model)
        for given in (wrapped, nn.Sequential(wrapped)):
            with refused(StateError, "bare model and wrap what it returns; O0, O1 and O4", model, optimizer):
                xamp.initialize(given, optimizer, level=level)
        for taken in ("O0", "O1", "O4"):
            xamp.initialize(wrapped, optimizer, level=taken, verbosity=0)
            assert xamp.session(model).policy.level == taken  # trained in tests/distributed, by real processes
            xamp.session(wrapped).close()
    finally:
        dist.destroy_process_group()


def test_an_eps_that_is_zero_in_fp16(lane: Lane) -> None:
    model = net(lane)
    optimizer = torch.optim.Adam(model.parameters())
    with refused(PolicyError, r"Adam\(eps=1e-08\) steps torch\.float16.*Pass eps=1e-4 or larger", model, optimizer):
        xamp.initialize(model, optimizer, level="O3")
    xamp.initialize(model, torch.optim.Adam(model.parameters(), eps=0.0), "O3", verbosity=0)  # who says zero means it


@pytest.mark.parametrize("level", LEVELS)
def test_a_fused_form_that_cannot_be(level: str, lane: Lane) -> None:
    model = net(lane)
    for optimizer, error in (
        (torch.optim.Adam(model.parameters(), eps=1e-4, foreach=True), PolicyError),
        (torch.optim.RMSprop(model.parameters(), eps=1e-4), UnsupportedPolicy),
    ):
        with refused(error, r"initialize\(fused=True\): .*[Ll]eave fused='auto'", model, optimizer):
            xamp.initialize(model, optimizer, level=level, fused=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_has_no_shapes_yet(level: str, lane: Lane) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)).to(lane.device)
    with refused(PolicyError, r"'0\.weight' of Sequential has no shape yet", model):
        xamp.initialize(model, level=level)


@pytest.mark.parametrize("level", CAST)
@pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning")
def test_a_script_module_inside_a_model(level: str, lane: Lane) -> None:
    part = nn.Linear(4, 4).to(lane.device)  # torch cannot move a traced one to each type of device
    model = nn.Sequential(nn.Linear(4, 4).to(lane.device), torch.jit.trace(part, torch.ones(1, 4, device=lane.device)))
    first = model[0]
    with refused(UnsupportedPolicy, "is a ScriptModule", first):
        xamp.initialize(model, level=level)
    assert type(model) is nn.Sequential
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("models", "optimizers", "message"),
    [
        ("text", "good", "str is no torch.nn.modules.module.Module"),
        ("good", "text", "str is no torch.optim.optimizer.Optimizer"),
        ("none", "good", "NoneType is no"),
        ("swapped", "swapped", "is no torch.nn"),
        ("twice", "good", "the same object stands in the list twice"),
        ("good", "twice", "the same object stands in the list twice"),
        ("empty", "good", "there is no model"),
    ],
)
def test_what_is_no_model_or_optimizer_or_stands_there_twice(
    models: str, optimizers: str, message: str, lane: Lane
) -> None:
    model, optimizer = used(lane)
    given: dict[str, Any] = {"text": "model", "none": None, "empty": [], "good": model, "swapped": optimizer}
    taken: dict[str, Any] = {"text": "adam", "good": optimizer, "swapped": model, "twice": [optimizer, optimizer]}
    with refused(PolicyError, message, model, optimizer):
        xamp.initialize({**given, "twice": (model, model)}[models], taken[optimizers], level="O2")


# ---------------------------------------------------------------- failures half-way


class Final(type):
    """A metaclass whose classes admit no subclass."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Final:
        if any(isinstance(base, Final) for base in bases):
            raise TypeError(f"{name} is final")
        return super().__new__(mcs, name, bases, namespace)


class Unique(type):
    """A metaclass that knows each name once."""

    names: set[str] = set()

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Unique:
        if name in mcs.names:
            raise ValueError(f"there is a class {name}")
        mcs.names.add(name)
        return super().__new__(mcs, name, bases, namespace)


class UniqueNet(Net, metaclass=Unique):
    pass


class FinalSGD(torch.optim.SGD, metaclass=Final):
    pass


class FinalNet(Net, metaclass=Final):
    pass


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_cannot_be_managed_after_one_that_was(level: str, lane: Lane) -> None:
    (model, optimizer), (other, _) = used(lane), used(lane)
    last: torch.optim.Optimizer = FinalSGD(other.parameters(), lr=0.1)
    with refused(PolicyError, "FinalSGD cannot be managed: FinalSGD is final", model, other, optimizer, last):
        xamp.initialize([model, other], [optimizer, last], level=level, keep_fp32=["head"], fused="auto")
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    train(model, optimizer, batch(lane))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_admits_no_subclass_after_one_that_did(level: str, lane: Lane) -> None:
    model, optimizer = used(lane)
    last = FinalNet().to(lane.device)
    with refused(PolicyError, "FinalNet cannot be put under a policy: FinalNet is final", model, optimizer, last):
        xamp.initialize([model, last], optimizer, level=level, keep_fp32=["head"])


@pytest.mark.parametrize("level", LEVELS)
def test_a_metaclass_that_knows_the_name_already(level: str, lane: Lane) -> None:
    model = UniqueNet().to(lane.device)
    message = "UniqueNet cannot be put under a policy: its metaclass refuses a subclass: there is a class UniqueNet"
    with refused(PolicyError, message, model):
        xamp.initialize(model, level=level)


@pytest.mark.parametrize("failure", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("level", LEVELS)
def test_any_failure_at_the_last_moment(
    level: str, failure: type[Exception], lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the step counters were made fp32, as fused kernels need them: under fp64 torch makes them fp64."""
    model, optimizer = used(lane)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()

    def fail(*_: object) -> NoReturn:
        raise failure("at the last moment")

    monkeypatch.setattr("xamp.sessions.set_up.manage", fail)
    with refused(failure, "at the last moment", model, optimizer):
        xamp.initialize(model, optimizer, level=level, keep_fp32=["head"], verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_ctrl_c_while_the_settings_are_logged(level: str, lane: Lane, caplog: pytest.LogCaptureFixture) -> None:
    class Interrupt(logging.Handler):
        def emit(self, record: logging.LogRecord) -> NoReturn:
            raise KeyboardInterrupt("while logging")

    model, optimizer = used(lane)
    caplog.set_level(logging.INFO, "xamp")
    handler = Interrupt()
    logging.getLogger("xamp").addHandler(handler)
    try:
        with refused(KeyboardInterrupt, "while logging", model, optimizer):
            xamp.initialize(model, optimizer, level=level, verbosity=1)
    finally:
        logging.getLogger("xamp").removeHandler(handler)


@pytest.mark.parametrize("level", LEVELS)
def test_close_before_any_step_gives_everything_back_to_the_bit(level: str, lane: Lane) -> None:
    model, optimizer = used(lane)
    optimizer.zero_grad()
    before = Snapshot(model, optimizer)
    exact = level not in ("O3",)  # without masters the fp32 values are gone
    xamp.initialize(model, optimizer, level=level, keep_fp32=["head"], verbosity=0)
    xamp.session(model).close()
    (before.assert_same if exact else before.assert_same_form)()


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "O3"])
def test_close_gives_the_very_step_counters_back(level: str, lane: Lane) -> None:
    """With what was counted since. The plain form that goes on would wait for each that is on the device."""
    model, optimizer = used(lane)
    for state in optimizer.state.values():
        state["step"] = state["step"].double()
    counters = [(param, state["step"], state["step"].item()) for param, state in optimizer.state.items()]
    xamp.initialize(model, optimizer, level=level, init_scale=128.0, verbosity=0)
    train(model, optimizer, batch(lane), steps=2)
    xamp.session(optimizer).close()
    for param, counter, before in counters:
        assert optimizer.state[param]["step"] is counter
        assert counter.item() == before + 2
    assert all(state["step"].is_cpu for state in optimizer.state.values())


# ---------------------------------------------------------------- any arguments

ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "level": st.sampled_from([*LEVELS, "auto", "fp16", "amp-bf16", "O9", None]),
    "backend": st.sampled_from(["auto", "auto", "nowhere", "", None]),
    "loss_scale": st.sampled_from([None, "dynamic", "128.0", 0.5, 0, "x", float("inf"), torch.tensor(4.0)]),
    "dtype": st.sampled_from([None, None, "float16", torch.bfloat16, torch.float32, torch.int8, "x"]),
    "keep_batchnorm_fp32": st.sampled_from([None, None, True, "False", "maybe", 3]),
    "keep_fp32": st.sampled_from([(), (), ["head"], "*", [nn.BatchNorm1d], [Net], ["h*", "nowhere"], [3], None]),
    "master_weights": st.sampled_from([None, None, True, "False", []]),
    "cast_model_outputs": st.sampled_from([None, None, False, "bf16", torch.float16, "x"]),
    "methods": st.sampled_from([("forward",), "generate", ["generate"], ["nothing"], 3]),
    "num_losses": st.sampled_from([1, 1, "2", 0, -1, None, 1.5]),
    "init_scale": st.one_of(st.just(2.0**16), st.floats(), st.just("128")),
    "growth_factor": st.sampled_from([2.0, 1.5, 1.0, float("nan"), "2"]),
    "backoff_factor": st.sampled_from([0.5, 0.3, 1.0, 0.0]),
    "growth_interval": st.sampled_from([2000, 1, 0, 2**40]),
    "min_loss_scale": st.sampled_from([1.0, None, 128, 2.0**30, -1]),
    "max_loss_scale": st.sampled_from([2.0**24, None, 64.0, "x"]),
    "on_static_overflow": st.sampled_from([None, "skip", "step", "stop"]),
    "op_policy": st.sampled_from(["native", "native", "odd"]),
    "fused": st.sampled_from(["auto", True, False, "True", None]),
    "delegate": st.sampled_from([False, False, True]),
    "enabled": st.sampled_from([True, True, True, False]),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer | None]] = {
    "none": lambda params: None,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4, foreach=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-4),
}


@st.composite
def some_calls(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of which a few are given, so that many calls go well."""
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=4, unique=True))
    return {"level": draw(st.sampled_from(LEVELS)), **{name: draw(ARGUMENTS[name]) for name in names}}


@given(some_calls(), st.sampled_from(sorted(OPTIMIZERS)))
@settings(max_examples=150, deadline=None)
def test_any_call_works_and_can_be_undone_or_is_refused_and_changes_nothing(call: dict[str, Any], kind: str) -> None:
    for lane in usable_lanes():
        model = net(lane)
        optimizer = OPTIMIZERS[kind](model.parameters())
        before = Snapshot(model, *([optimizer] if optimizer is not None else []))
        try:
            xamp.initialize(model, optimizer, **call, verbosity=0)
        except XampError:
            before.assert_same()
            continue
        if optimizer is None:
            assert bool(model(batch(lane))[0].isfinite().all())
        else:
            train(model, optimizer, batch(lane))
            assert all(bool(p.isfinite().all()) for p in xamp.master_params(optimizer))
        xamp.session(model).close()
        before.assert_same_form()
