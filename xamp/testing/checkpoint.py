"""Tier checkpoint: a resumed run continues as if it had never stopped; a state that does not fit changes nothing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.optim import SGD

import xamp
from xamp.errors import CheckpointError, LossScaleCollapsed
from xamp.policy import LEVELS, levels_where
from xamp.registry.registry import HOST
from xamp.testing.exact import Dot, assert_same, inputs
from xamp.testing.lane import Lane, usable_lanes
from xamp.testing.runs import (
    ORDERS,
    VARIANTS,
    Net,
    Run,
    everything,
    exact,
    load,
    save,
    start,
    through_a_file,
    train,
)
from xamp.testing.states import RECORDED, UNFIT, with_other_numbers
from xamp.testing.tier import Tier, every_level

__all__ = ["Checkpoint"]

PAIRS = list(itertools.permutations(LEVELS, 2))
SCHEMA = 1

STEPS, STOP = 50, 26
OVERFLOWS = frozenset({4, 11, 12, 23, 30, 41, 42})
"""Steps that overflow. At the stop two clean updates have been counted, of the three that make the scale grow."""


class Checkpoint(Tier):
    """A run continues from its checkpoint as if it had never stopped."""

    tier = "checkpoint"

    @pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_resume_is_bit_identical(self, lane: Lane, variant: str, optimizer: str) -> None:
        """A run of 50 steps with overflows and dropout, stopped and resumed, gives the same state, to the bit."""
        run = start(lane, variant, optimizer=optimizer)
        train(run, range(STOP), OVERFLOWS)
        state = {**save(run), "random": through_a_file(_random_state(lane))}
        outcomes = train(run, range(STOP, STEPS), OVERFLOWS)
        resumed = start(lane, variant, seed=2, optimizer=optimizer)
        load(resumed, state)
        _set_random_state(state["random"])
        assert train(resumed, range(STOP, STEPS), OVERFLOWS) == outcomes
        if xamp.session(run.optimizer).policy.checks:
            assert outcomes.count("SKIPPED") == len([step for step in OVERFLOWS if step >= STOP])
        assert_same(everything(resumed), everything(run))

    @pytest.mark.parametrize("order", ORDERS, ids="-".join)
    @pytest.mark.parametrize("variant", levels_where(lambda row: row.manages_gradients))
    def test_load_order_is_free(self, lane: Lane, variant: str, order: tuple[str, ...]) -> None:
        """The states of model, optimizer and xamp load in any order, also into a run that has already trained."""
        run = start(lane, variant)
        train(run, range(8), {6})
        state, random_state = save(run), _random_state(lane)
        train(run, range(8, 14), {10})
        resumed = start(lane, variant, seed=2)
        train(resumed, range(20, 23), {21})
        load(resumed, state, order)
        _set_random_state(random_state)
        train(resumed, range(8, 14), {10})
        assert_same(everything(resumed), everything(run))

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_state_is_plain(self, lane: Lane, variant: str) -> None:
        """The state is numbers, strings and CPU tensors with a schema number; further training does not change it."""
        run = start(lane, variant)
        train(run, range(3), {1})
        state = xamp.state_dict(run.optimizer)
        assert (state["format"], state["schema"]) == ("xamp", SCHEMA)
        _assert_plain(state)
        assert_same(through_a_file(state), state)
        before = copy.deepcopy(state)
        train(run, range(3, 5))
        assert_same(state, before)

    def test_state_moves_between_devices(self, lane: Lane) -> None:
        """Weights, moments and scale saved on this device load on every other device of the machine, and back."""
        for other in [lane, *(each for each in usable_lanes() if str(each) != str(lane))]:
            for there, here in ((lane, other), (other, lane)):
                variant = _dynamic(there, here)
                source = start(there, variant, optimizer="Adam")
                train(source, range(4))
                run = start(here, variant, seed=2, optimizer="Adam")
                load(run, save(source))
                assert_same(_on_host(everything(run)), _on_host(everything(source)), f"{there} -> {here}")
                assert train(run, [5]) == ["APPLIED"]

    @pytest.mark.parametrize("name", RECORDED)
    def test_recorded_states_load(self, lane: Lane, name: str) -> None:
        """A state that torch.amp.GradScaler, apex.amp or torch_npu wrote sets the scale and tracker of each loss."""
        state, expected = RECORDED[name]
        run = start(lane, _dynamic(lane), num_losses=len(expected))
        load(run, {"xamp": through_a_file(state)}, ["xamp"])
        scalers = xamp.state_dict(run.optimizer)["scalers"]
        assert [(each["scale"], each["growth_tracker"]) for each in scalers] == expected
        scale, tracker = expected[0]
        train(run, range(3 - tracker))
        assert run.scale == 2 * scale

    @pytest.mark.parametrize("kind", ["torch", "torch_npu"])
    def test_grad_scaler_of_torch_goes_on(self, lane: Lane, kind: str) -> None:
        """torch.amp.GradScaler loads the state written for it, and from then on its scale equals the session's."""
        if not lane.has_grad_scaler:
            lane.lacks("torch.amp.GradScaler, which torch does not have here")
        run = start(lane, _dynamic(lane), growth_factor=4.0, backoff_factor=0.25)
        train(run, range(6), {4})
        scaler = torch.amp.GradScaler(lane.kind, growth_interval=7)
        scaler.load_state_dict(through_a_file(xamp.state_dict(run.optimizer, format=kind)))
        assert scaler.is_enabled()
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 3)
        model = Dot().to(lane.device)
        optimizer = SGD(model.parameters(), lr=0.125)
        assert scaler.get_scale() == run.scale == 64.0
        for step, x in zip(range(6, 10), inputs(4, lane), strict=True):
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            train(run, [step])
            assert scaler.get_scale() == run.scale, f"step {step}"

    @every_level
    def test_model_state_is_exact(self, lane: Lane, level: str) -> None:
        """``model.state_dict()`` is fp32 with the exact masters, and loads into a plain model."""
        run = start(lane, level)
        train(run, range(4))
        state = through_a_file(run.model.state_dict())
        assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
        for name, stepped in exact(run).items():
            assert_same(state[name], stepped.float(), name)
        if xamp.session(run.model).policy.master_weights:
            rounded = run.model.inner.weight.detach().float().cpu()
            assert not torch.equal(state["inner.weight"], rounded), "the masters are no more than their parameters"
        plain = Net()
        plain.load_state_dict(state, strict=True)
        assert_same(through_a_file(plain.state_dict()), state)

    @every_level
    def test_model_state_writes_the_masters(self, lane: Lane, level: str) -> None:
        """``model.load_state_dict`` of a plain model's state writes masters exactly, and parameters rounded."""
        run = start(lane, level)
        train(run, range(4))
        scale = run.scale
        torch.manual_seed(3)
        state = Net().state_dict()
        run.model.load_state_dict(state, strict=True)
        _assert_weights(run, state)
        assert run.scale == scale
        assert train(run, [4]) == ["APPLIED"]

    @pytest.mark.parametrize(("there", "here"), PAIRS, ids=[f"{a}-{b}" for a, b in PAIRS])
    def test_other_level(self, lane: Lane, there: str, here: str) -> None:
        """A state of one level loads at another: weights cast, masters exact, a dynamic scale into a dynamic scale."""
        lane.need(there, here)
        source = start(lane, there, optimizer="Adam")
        train(source, range(4))
        run = start(lane, here, seed=2, optimizer="Adam", init_scale=16.0)
        own, state = run.scale, save(source)
        load(run, state)
        _assert_weights(run, state["model"])
        moves = [xamp.session(each.optimizer).policy.dynamic for each in (source, run)]
        assert run.scale == (128.0 if all(moves) else own)
        for param, kept in run.optimizer.state.items():
            assert kept["exp_avg"].dtype == param.dtype
        assert train(run, [4]) == ["APPLIED"]

    @pytest.mark.parametrize("what", UNFIT)
    def test_bad_state_changes_nothing(self, lane: Lane, what: str) -> None:
        """A state that does not fit raises an error that names the key, and changes nothing, to the bit."""
        run = start(lane, _dynamic(lane), seed=2)
        train(run, range(4), {2})
        state = with_other_numbers(dict(xamp.state_dict(run.optimizer)))
        key = UNFIT[what](state)
        before = everything(run)
        with pytest.raises(CheckpointError, match=key):
            xamp.load_state_dict(through_a_file(state), run.optimizer)
        assert_same(everything(run), before)

    def test_overflows_in_a_row_are_remembered(self, lane: Lane) -> None:
        """A run stopped after 30 overflows at the floor and resumed collapses at the 50th overflow, not later."""
        variant = _dynamic(lane)
        told: dict[str, Any] = {"init_scale": 1.0, "fused": False}
        run = start(lane, variant, **told)
        train(run, range(30), range(30))
        resumed = start(lane, variant, seed=2, **told)
        load(resumed, save(run))
        assert train(resumed, range(30, 49), range(30, 49)) == ["SKIPPED"] * 19
        with pytest.raises(LossScaleCollapsed, match="50 overflows in a row"):
            train(resumed, [49], [49])

    def test_disabled_does_nothing(self, lane: Lane) -> None:
        """With ``enabled=False`` saving and loading work but change nothing, and the objects stay plain torch's."""
        source = start(lane, _dynamic(lane))
        train(source, range(4))
        run = start(lane, "O0", seed=2, enabled=False)
        before = copy.deepcopy(run.model.state_dict())
        for state in (xamp.state_dict(source.optimizer), RECORDED["torch"][0], xamp.state_dict(run.optimizer)):
            xamp.load_state_dict(through_a_file(state), run.optimizer)
        assert_same(run.model.state_dict(), before)
        assert xamp.state_dict(run.optimizer, format="torch") == {}
        assert run.scale == 1.0
        assert type(run.model) is Net
        assert type(run.optimizer) is SGD

    @pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
    def test_grad_scaler_state(self, lane: Lane, used: bool) -> None:
        """``xamp.GradScaler`` continues from a saved state, fresh or used; torch's scaler loads the same state."""
        first = _Manual(lane)
        first.take(range(8), {5})
        state = through_a_file(first.scaler.state_dict())
        assert (state["scale"], state["_growth_tracker"]) == (64.0, 2)  # 128 after three steps, 64 after the overflow
        other = _Manual(lane, init_scale=8.0)
        if used:
            other.take(range(2))
        other.scaler.load_state_dict(state)
        for scaler in (other.scaler, torch.amp.GradScaler(lane.kind)):
            scaler.load_state_dict(state)
            assert scaler.state_dict() == state
        for manual in (first, other):
            manual.take(range(8, 12), {10})
        assert other.scaler.state_dict() == first.scaler.state_dict()


class _Manual:
    """A :class:`Dot` in fp32, trained by hand with a ``xamp.GradScaler``."""

    def __init__(self, lane: Lane, init_scale: float = 64.0) -> None:
        self._lane = lane
        self._model = Dot().to(lane.device)
        self._optimizer = SGD(self._model.parameters(), lr=0.125)
        self.scaler = xamp.GradScaler(init_scale=init_scale, growth_interval=3)

    def take(self, steps: range, overflows: frozenset[int] | set[int] = frozenset()) -> None:
        """Train for ``steps``; the device overflows at the steps in ``overflows``."""
        for step, x in zip(steps, inputs(len(steps), self._lane), strict=True):
            self._optimizer.zero_grad()
            self.scaler.scale(self._model(x)).backward()
            if step in overflows:
                self._lane.overflow_(self._model.first.weight.grad)  # type: ignore[arg-type]
            self.scaler.step(self._optimizer)
            self.scaler.update()


def _random_state(lane: Lane) -> list[torch.Tensor]:
    """The state of the host's generator and, if the device has its own generator, of that too."""
    return [torch.get_rng_state(), *([] if lane.kind == HOST else [xamp.accel.get_rng_state()])]


def _set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        xamp.accel.set_rng_state(state)


def _dynamic(*lanes: Lane) -> str:
    """A variant with a dynamic scale that all ``lanes`` declare; one with masters if possible."""
    rows = {variant: LEVELS[told["level"]] for variant, told in VARIANTS.items()}
    dynamic = [each for each, told in VARIANTS.items() if told.get("loss_scale", rows[each].loss_scale) == "dynamic"]
    dynamic.sort(key=lambda each: not rows[each].master_weights)
    return next(each for each in dynamic if all(lane.declares(rows[each].name) for lane in lanes))


def _on_host(value: Any) -> Any:
    """``value`` with all tensors in host memory, without the options that choose an optimizer's form."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items() if key not in ("fused", "foreach")}
    return [_on_host(item) for item in value] if isinstance(value, list) else value


def _assert_plain(value: Any, where: str = "state") -> None:
    """Check that ``value`` holds only what ``torch.load(weights_only=True)`` accepts on any machine."""
    if type(value) is dict:
        for key, item in value.items():
            assert type(key) is str, where
            _assert_plain(item, f"{where}[{key!r}]")
    elif type(value) is list:
        for index, item in enumerate(value):
            _assert_plain(item, f"{where}[{index}]")
    elif isinstance(value, torch.Tensor):
        assert type(value) is torch.Tensor, where
        assert "['masters']" in where, f"{where} is a tensor"
        assert (value.device.type, value.dtype, value.requires_grad) == ("cpu", torch.float32, False), where
    else:
        assert type(value) in (str, int, float, bool), f"{where} is a {type(value).__name__}"


def _assert_weights(run: Run, saved: Mapping[str, torch.Tensor]) -> None:
    """Check that ``run`` has the fp32 weights of ``saved``: parameters cast to the level's dtype, masters exact."""
    stepped = exact(run)
    for name, param in run.model.named_parameters():
        assert torch.equal(param.detach().cpu(), saved[name].cpu().to(param.dtype)), name
        assert torch.equal(stepped[name], saved[name].cpu().to(stepped[name].dtype)), name
    for name, buffer in run.model.named_buffers():
        assert torch.equal(buffer.cpu(), saved[name].cpu().to(buffer.dtype)), name
