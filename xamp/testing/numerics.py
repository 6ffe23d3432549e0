"""Tier numerics: the numbers that each level computes, on real small models."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.casting.ops.fixed_dtype import fixed
from xamp.casting.ops.table import LAYERS
from xamp.policy import LEVELS, best_level, levels_where
from xamp.testing.lane import Lane
from xamp.testing.models import TASKS, Batch, Task, checkpointed, parts_of
from xamp.testing.nets import PICKLES, Distilled, Nested, Result, ran_in
from xamp.testing.tier import Tier, at_levels, casting, every_level
from xamp.testing.training import by_hand, distance, exact, match, ours, plain_gradients, start_loop, train, worst

__all__ = ["Numerics"]

PLAIN = best_level(()).name
SEEDS = range(3)
STEPS = 12

GRADIENTS = {"float16": 3e-3, "bfloat16": 2e-2}
"""By dtype: norm of the error over norm of the gradient, of the whole vector. Measured on a CPU: 1.1e-3 and 5.8e-3."""
OUTPUTS = {"float16": 2e-3, "bfloat16": 1.5e-2}
"""The same for a model's outputs. Measured on a CPU: 6.6e-4 and 5.5e-3."""
CURVE = {"float16": 3e-3, "bfloat16": 1e-2}
"""Allowed difference of a loss from that in fp32, as a fraction of the first. Measured on a CPU: 3e-4 and 1.5e-3."""
LEARNED = 0.75
"""The mean of the last three losses is below this part of the mean of the first three. A CPU: 0.17 to 0.71."""
AGAINST_HAND = 1.25
"""Bound on a parameter's error over that of the hand-written loop, over all seeds."""
MORE_SEEDS = range(SEEDS.stop, 24)
"""Seeds added if that bound is exceeded: for a batch norm's 8 weights 3 seeds gave 0.79 to 1.38, 24 0.98 to 1.05."""
COUNTED = 1e-6
"""That comparison leaves out parameters whose gradient is below this part of the largest: it is rounding alone."""

TRAINED = [
    (level, task)
    for level in levels_where(lambda row: row.dtype is not None)
    for task in TASKS.values()
    if not LEVELS[level].steps_lower or task.name != "recurrent"  # SGD, all that O3 can do, learns it in more steps
]

each_task = pytest.mark.parametrize("task", TASKS.values(), ids=str)


def dtype_of(level: str) -> str:
    """Name of a level's lower dtype; float32 at O0."""
    return LEVELS[level].dtype or "float32"


class Numerics(Tier):
    """The numbers that each level computes."""

    tier = "numerics"

    @each_task
    @every_level
    def test_gradients_near_fp64(self, lane: Lane, level: str, task: Task) -> None:
        """The gradient equals that of fp64 up to the rounding of the level's dtype; at O0 of the device's fp32."""
        lane.need(level)
        for seed in SEEDS:
            model, batch = task.make(lane.device, seed), task.batch(seed, lane.device)
            wanted = exact(task, model, batch)
            error = distance(ours(task, model, batch, level), wanted)
            assert error <= _bound(task, model, batch, level), f"relative error of the gradient, seed {seed}"

    @each_task
    @casting
    def test_no_worse_than_by_hand(self, lane: Lane, level: str, task: Task) -> None:
        """No parameter's gradient is further from fp64 than in a loop with torch.autocast and torch.amp.GradScaler.

        Both sides use the device's own list of operators. ``gradients_near_fp64`` bounds the portable policy.
        """
        lane.need(level, "native")
        errors: Errors = {}
        for seeds in (SEEDS, MORE_SEEDS):
            for seed in seeds:
                _add_errors(errors, task, lane, level, seed)
            assert errors
            worse = {name: (a**0.5, b**0.5) for name, (a, b) in errors.items() if a**0.5 > AGAINST_HAND * b**0.5}
            if not worse:
                break
        assert worse == {}, "by name: error, error by hand"

    @pytest.mark.parametrize(("level", "task"), TRAINED, ids=[f"{level}-{task}" for level, task in TRAINED])
    def test_training_follows_fp32(self, lane: Lane, level: str, task: Task) -> None:
        """The loss before each step is near that of fp32, and falls."""
        lane.need(level)
        plain, found = (train(task, lane, each, STEPS, sgd=LEVELS[level].steps_lower) for each in (None, level))
        assert found.isfinite().all()
        gap = ((found - plain).abs().max() / plain[0]).item()
        assert gap <= CURVE[dtype_of(level)], f"{found.tolist()} is not {plain.tolist()}"
        assert found[-3:].mean() < LEARNED * found[:3].mean(), "the loss does not fall"

    @each_task
    def test_o0_is_plain_torch(self, lane: Lane, task: Task) -> None:
        """Training at O0 gives the same parameters as plain torch, bit for bit if the device repeats its results."""

        def run(level: str | None) -> list[torch.Tensor]:
            loop = start_loop(task, lane, level)
            return [loop.steps(5), *loop.stepped()]

        lane.need(PLAIN)
        found, allowed = match(run(PLAIN), lambda: run(None))
        assert found <= allowed

    @pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
    @every_level
    def test_checkpointing_is_exact(self, lane: Lane, level: str, reentrant: bool) -> None:
        """With activation checkpointing, backward recomputes what forward computed: the gradients are the same."""
        lane.need(level)
        kept, recomputed = checkpointed(None), checkpointed(reentrant)
        batch = kept.batch(0, lane.device)

        def run(task: Task, bare: bool) -> list[torch.Tensor]:
            model = task.make(lane.device)
            torch.manual_seed(3)  # for dropout
            return list(ours(task, model, batch, level, bare=bare).values())

        for bare in (False,) if LEVELS[level].master_weights else (False, True):
            found = run(recomputed, bare)
            assert found
            gap, allowed = match(found, functools.partial(run, kept, bare))
            assert gap <= allowed, "in loss.backward()" if bare else "in scale_loss"

    @pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
    @every_level
    def test_no_grad_then_grad(self, lane: Lane, level: str, mode: str) -> None:
        """If one region runs a forward without gradients and then one with them, no gradient is missing."""
        lane.need(level)
        task = dataclasses.replace(TASKS["convolutions"], build=lambda: Distilled(getattr(torch, mode)))
        model, batch = task.make(lane.device), task.batch(0, lane.device)
        wanted = exact(task, model, batch)
        found = ours(task, model, batch, level)
        assert sorted(found) == sorted(wanted)
        assert distance(found, wanted) <= _bound(task, model, batch, level)

    @pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
    @every_level
    def test_validation_between_steps(self, lane: Lane, level: str, mode: str) -> None:
        """Evaluation between training steps is near fp32's, and training continues as without it."""
        lane.need(level)
        bound = OUTPUTS[dtype_of(level)] if LEVELS[level].dtype else 1e-5
        for task in (TASKS["convolutions"], TASKS["transformer"]):
            loop, plain = (start_loop(task, lane, each, sgd=True) for each in (level, None))
            for _ in range(3):
                loop.step()
                plain.step()
                with getattr(torch, mode)():
                    found, wanted = (_evaluate(task, each.model, lane) for each in (loop, plain))
                assert not found.requires_grad
                assert _apart(found, wanted) <= 4 * bound  # the weights differ by now, too
            gap, allowed = match(loop.stepped(), functools.partial(_trained, task, lane, level))
            assert gap <= allowed, "evaluation moved the training"

    @each_task
    @every_level
    def test_inference(self, lane: Lane, level: str, task: Task) -> None:
        """Without an optimizer outputs are in fp32 and near those of fp32, in training mode and in evaluation."""
        lane.need(level)
        model = task.make(lane.device)
        plain = copy.deepcopy(model)
        xamp.initialize(parts_of(task, model), level=level, verbosity=0)
        with torch.no_grad():
            for training in (True, False, True):
                found, wanted = (task.predict(m.train(training), task.batch(0, lane.device)) for m in (model, plain))
                assert found.dtype == torch.float32
                if LEVELS[level].dtype is None:
                    assert _apart(found, wanted) <= 1e-6
                else:
                    assert 0 < _apart(found, wanted) <= OUTPUTS[dtype_of(level)]

    @every_level
    def test_outputs_are_fp32(self, lane: Lane, level: str) -> None:
        """Floating outputs are fp32, however they are nested; integers, fp64 and everything else stay unchanged."""
        lane.need(level)
        model: Any = Nested().to(lane.device)
        xamp.initialize(model, level=level, verbosity=0)
        made = model({"x": torch.ones(2, 4, device=lane.device)})
        assert type(made) is Result
        assert made.first.dtype == torch.float32
        assert [type(made.rest), type(made.rest["more"])] == [dict, list]
        (value, count), double, name = made.rest["more"], made.rest["double"], made.rest["name"]
        assert (value.dtype, count.dtype, double.dtype) == (torch.float32, torch.int64, torch.float64)
        assert name == "as it was"
        assert ran_in(made.first) == ran_in(value) == getattr(torch, dtype_of(level))

    @every_level
    def test_outputs_as_asked(self, lane: Lane, level: str) -> None:
        """``cast_model_outputs`` leaves outputs in the dtype that they were computed in, or casts them to another."""
        lane.need(level)
        own = getattr(torch, dtype_of(level))
        for asked, wanted in ((False, own), (True, torch.float32), (own, own)):
            model: Any = Nested().to(lane.device)
            xamp.initialize(model, level=level, cast_model_outputs=asked, verbosity=0)
            made = model({"x": torch.ones(2, 4, device=lane.device)})
            assert (made.first.dtype, made.rest["more"][0].dtype) == (wanted, wanted), f"cast_model_outputs={asked}"

    @every_level
    def test_more_methods(self, lane: Lane, level: str) -> None:
        """``methods=("generate",)`` runs under the policy as ``forward`` does, and gives fp32."""
        lane.need(level)
        model: Any = Nested().to(lane.device)
        xamp.initialize(model, level=level, methods=("generate",), verbosity=0)
        made = model.generate(torch.ones(2, 4, device=lane.device))
        assert made.dtype == torch.float32
        assert ran_in(made) == getattr(torch, dtype_of(level))

    @every_level
    def test_copies_run_the_policy(self, lane: Lane, level: str) -> None:
        """A deep copy of a model gives the same outputs in the same dtypes, with its own weights."""
        lane.need(level)
        model: Any = Nested().to(lane.device)
        xamp.initialize(model, level=level, verbosity=0)
        twin, batch = copy.deepcopy(model), {"x": torch.ones(2, 4, device=lane.device)}
        wanted, found = model(batch), twin(batch)
        assert found.first.dtype == torch.float32
        assert ran_in(found.first) == getattr(torch, dtype_of(level))
        assert worst([found.first], [wanted.first]) == 0.0
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert worst([twin(batch).first], [wanted.first]) == 0.0, "the copy runs the original's weights"

    @pytest.mark.parametrize("way", ["pickle", "save"])
    @every_level
    def test_pickles_are_plain(self, lane: Lane, level: str, way: str) -> None:
        """A pickled model is of its own class, and has exact fp32 weights on the device."""
        lane.need(level)
        model: Any = Nested().to(lane.device)
        xamp.initialize(model, level=level, verbosity=0)
        made, wanted = PICKLES[way](model), model.state_dict()
        assert type(made) is Nested
        for key, value in made.state_dict().items():
            assert (value.dtype, value.device) == (torch.float32, wanted[key].device), key
            assert torch.equal(value, wanted[key]), key
        assert ran_in(made({"x": torch.ones(2, 4, device=lane.device)}).first) == torch.float32

    @at_levels(lambda row: row.dynamic and row.dtype == "float16")
    def test_vanishing_gradients(self, lane: Lane, level: str) -> None:
        """The loss scale saves gradients that are too small for fp16, exactly; without it they are zero."""
        lane.need(level)
        tiny, grads = 2.0**-26, {}
        for scale in (None, 1.0):
            model = nn.Linear(4, 2, bias=False).to(lane.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            xamp.initialize(model, optimizer, level=level, loss_scale=scale, verbosity=0)
            loss = model(torch.ones(1, 4, device=lane.device)).sum() * tiny
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            (param,) = xamp.master_params(optimizer)
            assert param.grad is not None
            grads[scale] = param.grad.unique().tolist()
        assert grads == {None: [tiny], 1.0: [0.0]}


# ---------------------------------------------------------------- what clauses share


Errors = dict[str, list[float]]
"""For each parameter the sum of squared errors: xamp's, and that of the loop by hand."""


def _add_errors(errors: Errors, task: Task, lane: Lane, level: str, seed: int) -> None:
    """Add the errors of one seed; both sides use the device's own list of operators."""
    model, batch = task.make(lane.device, seed), task.batch(seed, lane.device)
    dtype = getattr(torch, dtype_of(level))
    hand = None if _ignores(lane, model, dtype) else by_hand(task, model, batch, dtype)
    if hand is None:  # only gradients_near_fp64 can bound the error, and recurrent_training
        lane.lacks(f"{task} in {dtype_of(level)} under torch.autocast, which plain torch cannot train here")
    wanted, found = exact(task, model, batch), ours(task, model, batch, level, op_policy="native")
    largest = max(float(grad.norm()) for grad in wanted.values())
    for name, grad in wanted.items():
        if float(grad.norm()) > COUNTED * largest:
            sums = errors.setdefault(name, [0.0, 0.0])
            for place, other in enumerate((found[name], hand[name])):
                sums[place] += (other - grad).square().sum().item()


def _ignores(lane: Lane, model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether ``torch.autocast`` on the device casts recurrent layers of ``model`` to another dtype than ``dtype``."""
    to = {own for overload, own in fixed(lane.backend.op_rules).items() if overload in LAYERS}
    return bool(to - {dtype}) and any(isinstance(module, nn.RNNBase) for module in model.modules())


def _bound(task: Task, model: nn.Module, batch: Batch, level: str) -> float:
    """The bound on the error of the gradient; at O0 by the device's own fp32, which may be a shorter format."""
    if LEVELS[level].dtype is not None:
        return GRADIENTS[dtype_of(level)]
    return max(1e-5, 1.5 * distance(plain_gradients(task, model, batch), exact(task, model, batch)))


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over norm of ``wanted``."""
    a, b = found.detach().cpu().double(), wanted.detach().cpu().double()
    return float((a - b).norm() / b.norm())


def _evaluate(task: Task, model: Any, lane: Lane) -> torch.Tensor:
    """The model's outputs in evaluation mode; afterwards the model is in training mode."""
    model.eval()
    made = task.predict(model, task.batch(99, lane.device))
    model.train()
    return made


def _trained(task: Task, lane: Lane, level: str) -> list[torch.Tensor]:
    loop = start_loop(task, lane, level, sgd=True)
    loop.steps(3)
    return loop.stepped()
