"""A managed optimizer is a good citizen of torch: schedulers, hooks, the profiler, pickles, fused implementations.

Covers: xamp.scaling.optimizer, xamp.scaling.optimizer_states, xamp.scaling.torch_step.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import subprocess
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import python
from lanes import Lane
from stepping import (
    Dot,
    assert_follows,
    assert_same,
    at,
    inputs,
    iterate,
    outcome,
    plain_iterate,
    run_backward,
    step_alike,
    twin,
)
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import xamp
from xamp.errors import PolicyError, UnsupportedPolicy

scaled_levels = pytest.mark.parametrize("level", ["O1", "O2"])
all_levels = pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
FUSABLE: dict[str, Any] = {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Adagrad": Adagrad}
each_fusable = pytest.mark.parametrize("name", FUSABLE)


def start(lane: Lane, level: str, cls: Any = SGD, options: dict[str, Any] | None = None, **given: Any) -> Any:
    model = Dot().to(lane.device)
    optimizer = cls(model.parameters(), lr=0.125, **({"momentum": 0.9} if cls is SGD else {}), **(options or {}))
    return xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **given})


# ---------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: StepLR(o, step_size=2, gamma=0.5),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.5, total_steps=8),
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("skip_first", [False, True])
def test_schedulers_advance_when_called_and_never_warn(
    lane: Lane, level: str, make: Any, when: str, skip_first: bool
) -> None:
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125, momentum=0.9)
    optimizer: Any = SGD(model.parameters(), lr=0.125, momentum=0.9)
    step_alike(plain, optimizer)
    plain_schedulers = [make(plain) for _ in range(2 if when == "both" else 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedulers = [make(optimizer)] if when != "after" else []
        model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
        if when != "before":
            schedulers.append(make(optimizer))
        for count, x in enumerate(inputs(6, lane)):
            spoil = ["a"] if skip_first and count == 0 and level in ("O1", "O2") else []
            iterate(model, optimizer, x, lane, spoil)
            if spoil:
                plain._opt_called = True  # type: ignore[attr-defined]
            else:
                plain_iterate(reference, plain, x)
            for scheduler in (*schedulers, *plain_schedulers):
                scheduler.step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert_follows(optimizer, reference)


@all_levels
@pytest.mark.parametrize("wraps", [False, True], ids=["before the scheduler", "around the scheduler's"])
def test_a_step_of_the_users_is_called_where_a_scheduler_has_wrapped_one(lane: Lane, level: str, wraps: bool) -> None:
    model: Any = Dot().to(lane.device)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    calls = []

    def step(self: Any, *args: Any) -> None:
        calls.append(args)
        SGD.step(self, *args)

    if wraps:
        StepLR(optimizer, step_size=1)
        optimizer.step = types.MethodType(functools.wraps(optimizer.step)(step), optimizer)
    else:
        optimizer.step = types.MethodType(step, optimizer)
        StepLR(optimizer, step_size=1)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    for x in inputs(3, lane):
        iterate(model, optimizer, x)
    assert calls == [()] * 3


@all_levels
def test_a_scheduler_stepped_before_the_optimizer_is_still_warned_of(lane: Lane, level: str) -> None:
    _, optimizer = start(lane, level)
    scheduler = StepLR(optimizer, step_size=1)
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)` before `optimizer\.step"):
        scheduler.step()


# ---------------------------------------------------------------- hooks and the profiler


def follow_up(optimizer: Optimizer, then: str) -> None:
    """What makes torch wrap ``step`` again."""
    if then == "StepLR":
        StepLR(optimizer, step_size=1)
    elif then:
        optimizer.load_state_dict(twin(optimizer.state_dict()))


@all_levels
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("then", ["", "StepLR", "load_state_dict"])
def test_step_hooks_run_exactly_once_for_an_applied_step(lane: Lane, level: str, when: str, then: str) -> None:
    model: Any = Dot().to(lane.device)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    if when == "after":
        model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    seen: list[tuple[str, bool]] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", o is optimizer)))
    if when == "before":
        model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    follow_up(optimizer, then)
    for x in inputs(3, lane):
        iterate(model, optimizer, x)
    assert seen == [("before", True), ("after", True)] * 3


@all_levels
def test_hooks_of_all_optimizers_run_exactly_once(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    x = inputs(1, lane)[0]
    seen: list[str] = []
    for register, name in (
        (register_optimizer_step_pre_hook, "before"),
        (register_optimizer_step_post_hook, "after"),
    ):
        handle = register(lambda o, *_, name=name: seen.append(name))
        iterate(model, optimizer, x)
        handle.remove()
        iterate(model, optimizer, x)
    assert seen == ["before", "after"]


@all_levels
def test_a_pre_hook_sees_plain_gradients(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    x = inputs(1, lane)[0]
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.extend(p.grad.float() for p in o.param_groups[0]["params"]))
    iterate(model, optimizer, x)
    torch.testing.assert_close(seen, [x[:4], x[4:]], rtol=1e-6, atol=0)


@all_levels
@pytest.mark.parametrize("then", ["", "StepLR", "load_state_dict"])
def test_the_profiler_sees_one_step_for_each(lane: Lane, level: str, then: str) -> None:
    model, optimizer = start(lane, level)
    follow_up(optimizer, then)
    x = inputs(1, lane)[0]
    iterate(model, optimizer, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            iterate(model, optimizer, x)
    names = [event.name for event in profile.events() or [] if event.name.startswith("Optimizer.")]
    assert sorted(names) == ["Optimizer.step#SGD.step"] * 3 + ["Optimizer.zero_grad#SGD.zero_grad"] * 3


class Counting(SGD):
    """An optimizer with a ``zero_grad`` of its own."""

    cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)


@all_levels
@pytest.mark.parametrize("make", [SGD, Counting])
@pytest.mark.parametrize("to_none", [None, True, False])
def test_zero_grad_clears_as_it_did(lane: Lane, level: str, make: type[SGD], to_none: bool | None) -> None:
    model, optimizer = start(lane, level, make)
    x = inputs(1, lane)[0]
    iterate(model, optimizer, x)
    assert any(p.grad is not None for p in xamp.master_params(optimizer))
    before = getattr(optimizer, "cleared", 0)
    optimizer.zero_grad(*([] if to_none is None else [to_none]))
    assert getattr(optimizer, "cleared", 0) == before + (make is Counting)
    for param in xamp.master_params(optimizer):
        assert param.grad is None or (to_none is False and not param.grad.any())


@all_levels
def test_a_step_that_somebody_put_into_the_optimizer_is_the_one_that_runs(lane: Lane, level: str) -> None:
    model: Any = Dot().to(lane.device)
    optimizer: Any = SGD(model.parameters(), lr=0.125)
    own, seen = optimizer.step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return own(*args, **kwargs)

    optimizer.step = step
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    first, second = inputs(2, lane)
    iterate(model, optimizer, first)
    assert (len(seen), outcome(optimizer)) == (1, "APPLIED")
    if level in ("O1", "O2"):
        iterate(model, optimizer, second, lane, ["a"])
        assert outcome(optimizer) == "SKIPPED"
    xamp.session(model).close()
    assert optimizer.step is step


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("how", "level"),  # a pickle of what O3 steps in fp16 is fp32: see tests/unit/sessions/test_pickles.py
    [(how, f"O{n}") for how in ("pickle", "deepcopy", "torch.save") for n in range(6) if how == "deepcopy" or n != 3],
)
def test_a_copy_is_a_plain_torch_optimizer_with_the_same_state(lane: Lane, level: str, how: str) -> None:
    model, optimizer = start(lane, level, AdamW, {"eps": 1e-3})
    StepLR(optimizer, step_size=1)
    iterate(model, optimizer, inputs(1, lane)[0])
    optimizer.zero_grad()
    copied: Any
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(optimizer))
    elif how == "deepcopy":
        copied = copy.deepcopy(optimizer)
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is AdamW
    assert "xamp" not in repr(vars(copied))
    assert not {"_xamp", "step"} & set(vars(copied))
    assert_same(copied.state_dict(), optimizer.state_dict())
    assert copied.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    for under in (copied, optimizer):
        for p in under.param_groups[0]["params"]:
            p.grad = torch.full_like(p, 0.5)
    step_alike(copied, optimizer)
    copied.step()
    optimizer._xamp_base.step(optimizer)
    torch.testing.assert_close(
        copied.param_groups[0]["params"],
        optimizer.param_groups[0]["params"],
        rtol=1e-3 if level == "O3" else 1e-6,
        atol=0,
    )


@scaled_levels
def test_a_pickle_loads_where_there_is_no_xamp(lane: Lane, level: str, tmp_path: Path) -> None:
    model, optimizer = start(lane, level)
    iterate(model, optimizer, inputs(1, lane)[0])
    optimizer.zero_grad()
    path = tmp_path / "optimizer.pt"
    torch.save(optimizer, path)
    script = (
        "import sys; sys.modules['xamp'] = None\n"
        "import torch\n"
        f"o = torch.load({str(path)!r}, weights_only=False, map_location='cpu')\n"
        "assert type(o) is torch.optim.SGD and o.param_groups[0]['fused'] is None\n"
        "p = o.param_groups[0]['params'][0]; p.grad = torch.ones_like(p); o.step(); print('stepped')\n"
    )
    # Nor the device that it was made on.
    alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([python(), "-c", script], capture_output=True, text=True, check=False, timeout=600, env=alone)
    assert done.stdout.strip() == "stepped", done.stderr


@all_levels
def test_it_looks_like_the_optimizer_it_is(lane: Lane, level: str) -> None:
    _, optimizer = start(lane, level)
    assert isinstance(optimizer, SGD)
    assert (type(optimizer).__name__, type(optimizer).__qualname__, type(optimizer).__module__) == (
        "SGD",
        "SGD",
        "torch.optim.sgd",
    )
    assert repr(optimizer).startswith("SGD (\nParameter Group 0")


# ---------------------------------------------------------------- the fused implementation


@scaled_levels
@each_fusable
def test_auto_uses_the_fused_form_where_the_choice_is_open_and_the_device_has_it(
    lane: Lane, level: str, name: str
) -> None:
    _, optimizer = start(lane, level, FUSABLE[name])
    assert optimizer.param_groups[0]["fused"] is (True if name in lane.can.fused_optimizers else None)


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_auto_changes_nothing_where_nothing_is_skipped_or_copied(lane: Lane, level: str) -> None:
    _, optimizer = start(lane, level)
    assert optimizer.param_groups[0]["fused"] is None


@scaled_levels
@each_fusable
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": False}], ids=str)
def test_auto_never_overrules_the_user(lane: Lane, level: str, name: str, options: dict[str, Any]) -> None:
    _, optimizer = start(lane, level, FUSABLE[name], options)
    for key, value in {"fused": options.get("fused"), "foreach": options.get("foreach")}.items():
        if (name, key) != ("Adagrad", "fused") or key in options:
            assert optimizer.param_groups[0][key] == value or (value is None and not optimizer.param_groups[0][key])
    if "foreach" in options:
        assert not optimizer.param_groups[0]["fused"]


@scaled_levels
def test_auto_never_overrules_the_user_in_one_group_of_two(lane: Lane, level: str) -> None:
    model: Any = Dot().to(lane.device)
    reference = twin(model)
    groups: list[Any] = [[{"params": [m.a], "foreach": False}, {"params": [m.b]}] for m in (model, reference)]
    made = [SGD(group, lr=0.125, momentum=0.9) for group in groups]
    model, optimizer = xamp.initialize(model, made[0], init_scale=64.0, **at(level))
    assert not optimizer.param_groups[0]["fused"]
    for count, x in enumerate(inputs(4, lane)):
        iterate(model, optimizer, x, lane, ["a"] if count == 2 else ())
        if count != 2:
            plain_iterate(reference, made[1], x)
    assert_follows(optimizer, reference)


@scaled_levels
@each_fusable
def test_states_and_pickles_carry_what_the_user_said(lane: Lane, level: str, name: str) -> None:
    model, optimizer = start(lane, level, FUSABLE[name])
    iterate(model, optimizer, inputs(1, lane)[0])
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    assert copy.deepcopy(optimizer).param_groups[0]["fused"] is None
    _, fused = start(lane, level, SGD, {"fused": True})
    assert fused.state_dict()["param_groups"][0]["fused"] is True


@scaled_levels
@each_fusable
@pytest.mark.parametrize("saved", [None, True, False])
def test_the_form_is_decided_again_when_a_state_is_loaded(
    lane: Lane, level: str, name: str, saved: bool | None
) -> None:
    if saved and name not in lane.can.fused_optimizers:
        pytest.skip(f"{lane} has no fused {name} that is right under loss scaling")
    source = Dot().to(lane.device)
    plain = FUSABLE[name](source.parameters(), lr=0.125, **({} if saved is None else {"fused": saved}))
    batches = inputs(5, lane)
    for x in batches[:2]:
        plain_iterate(source, plain, x)
    model, optimizer = start(lane, level, FUSABLE[name])
    before = optimizer.param_groups[0]["fused"]
    model.load_state_dict(source.state_dict())
    optimizer.load_state_dict(twin(plain.state_dict()))
    assert optimizer.param_groups[0]["fused"] is before
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None
    plain.param_groups[0]["fused"] = None  # from here on the form of the run that loaded
    step_alike(plain, optimizer)
    for count, x in enumerate(batches[2:]):
        iterate(model, optimizer, x, lane, ["b"] if count == 1 else ())
        if count != 1:
            plain_iterate(source, plain, x)
    assert outcome(optimizer) == "APPLIED"
    assert_follows(optimizer, source)


@scaled_levels
def test_fused_true_is_refused_where_there_is_none(lane: Lane, level: str) -> None:
    with pytest.raises(UnsupportedPolicy, match=r"initialize\(fused=True\): RMSprop has no fused implementation"):
        start(lane, level, RMSprop, fused=True)
    with pytest.raises(PolicyError, match=r"SGD was made with foreach=True.*excludes fused=True"):
        start(lane, level, SGD, {"foreach": True}, fused=True)


@scaled_levels
def test_an_optimizer_of_a_third_party_is_stepped_as_it_is(lane: Lane, level: str) -> None:
    class Signs(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * p.grad.sign())
                    self.state[p]["steps"] = self.state[p].get("steps", 0) + 1

    model: Any = Dot().to(lane.device)
    reference = twin(model)
    plain = Signs(reference.parameters(), 0.125)
    optimizer: Any = Signs(model.parameters(), 0.125)
    model, optimizer = xamp.initialize(model, optimizer, init_scale=64.0, **at(level))
    for count, x in enumerate(inputs(4, lane)):
        iterate(model, optimizer, x, lane, ["a"] if count in (0, 2) else ())
        if count not in (0, 2):
            plain_iterate(reference, plain, x)
    assert_follows(optimizer, reference)
    assert [state["steps"] for state in optimizer.state.values()] == [2, 2]


@scaled_levels
def test_gradients_that_step_hooks_change_are_what_is_stepped(lane: Lane, level: str) -> None:
    model, optimizer = start(lane, level)
    before = [p.clone() for p in xamp.master_params(optimizer)]
    optimizer.register_step_pre_hook(lambda o, *_: [p.grad.mul_(2) for p in o.param_groups[0]["params"]] and None)
    x = inputs(1, lane)[0]
    run_backward(model(x), optimizer)
    optimizer.step()
    wanted = [before[0] - 0.25 * x[:4], before[1] - 0.25 * x[4:]]
    torch.testing.assert_close([p.detach() for p in xamp.master_params(optimizer)], wanted, rtol=1e-6, atol=1e-7)


class AsksItsScaler(Optimizer):
    """An optimizer of the older of torch's protocols: it skips by the ``grad_scaler`` that its step is passed."""

    _step_supports_amp_scaling = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


def test_an_optimizer_of_the_older_protocol_is_decided_for_by_the_host(lane: Lane) -> None:
    model = torch.nn.Linear(2, 1).to(lane.device)
    optimizer = AsksItsScaler(model.parameters(), lr=0.5)
    xamp.initialize(model, optimizer, level="O1", init_scale=8.0, verbosity=0)
    for overflow in (False, False, True):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with xamp.scale_loss(model(torch.ones(1, 2, device=lane.device)).sum(), optimizer) as scaled:
            scaled.backward()
            if overflow:
                assert model.weight.grad is not None
                lane.overflow_(model.weight.grad)
        optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class OwnForm(SGD):
    """An optimizer that keeps another one in it, and whose state has a form of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["inner"])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_state_of_a_form_of_its_own_is_saved_and_loaded(lane: Lane, level: str) -> None:
    model = Dot().to(lane.device)
    optimizer = OwnForm(model.parameters(), lr=0.125, momentum=0.9)
    xamp.initialize(model, optimizer, **at(level))
    run_backward(model(inputs(1, lane)[0]), optimizer)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert list(state) == ["inner"]
    optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), state)


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad, torch.optim.RAdam])
def test_single_numbers_of_a_state_are_loaded_exactly_at_o3(lane: Lane, cls: Any) -> None:
    def run(stop: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 4).to(lane.device)

        def make() -> Any:
            eps = {} if cls is torch.optim.ASGD else {"eps": 1e-3}
            optimizer = cls(model.parameters(), lr=0.01, **eps)
            xamp.initialize(model, optimizer, level="O3", verbosity=0)
            return optimizer

        optimizer = make()
        for step in range(6):
            if stop and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                xamp.session(model).close()
                optimizer = make()
                optimizer.load_state_dict(state)
                for index, param in enumerate(model.parameters()):
                    for key, value in state["state"][index].items():
                        # torch itself puts every number but the step counter where the parameter is
                        assert value.dim() or torch.equal(optimizer.state[param][key].to(value.device), value), key
            optimizer.zero_grad()
            x = torch.linspace(-1.0, 1.0, 40, device=lane.device).reshape(5, 8)
            with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
