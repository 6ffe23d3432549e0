"""A compiled function that calls ``optimizer.step``, or is a whole step: it has the bits of eager code.

Covers: xamp.scaling.engine, xamp.scaling.optimizer, xamp.torch_compat.compiler.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

import compiling
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import xamp
from xamp.apex import amp
from xamp.policy import LEVELS, levels_where

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
}
STEPS, SPOILT = 5, 2
NO_COMPILER = not any(map(shutil.which, ("c++", "g++", "clang++")))


def train(level: str, optimizer: str, fused: Any, how: str, backend: str = "eager") -> list[Any]:
    """Outcomes, scales, losses and weights of some steps, all of which have the same compiled forward and loss.

    ``how``: "eager" runs all else as Python; else what is compiled besides.
    """
    torch.manual_seed(3)
    compiling.forget()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    stepper = OPTIMIZERS[optimizer](model.parameters())
    xamp.initialize(model, stepper, level=level, fused=fused, growth_interval=2, init_scale=2.0**4, verbosity=0)
    compiled: Any = functools.partial(torch.compile, backend=backend)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        return loss

    def in_a_function() -> None:
        stepper.step()

    def whole(x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(x)
        with xamp.scale_loss(loss, stepper) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(stepper, 1.0)
        step()
        stepper.zero_grad()
        return loss.detach()

    step = {"step": lambda: compiled(stepper.step), "function": lambda: compiled(in_a_function)}.get(
        how, lambda: stepper.step
    )()
    if how == "whole":
        whole = compiled(whole)
    else:
        loss_of = compiled(loss_of)
    found: list[Any] = []
    for number in range(STEPS):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        spoilt = number == SPOILT and level in levels_where(lambda row: row.dynamic)
        found.append(whole(x * float("inf") if spoilt else x).nan_to_num())
        found += [xamp.session(stepper).last_step, xamp.loss_scale(stepper)]
    return [*found, *(p.detach().clone() for p in (*model.parameters(), *xamp.master_params(stepper)))]


HOWS = ("step", "function", "whole")
STEPPERS: list[tuple[str, Any]] = [("sgd", "auto"), ("adam", "auto"), ("adam", False)]
ONCE = [
    (level, *stepper, HOWS[(row + column) % 3])
    for row, level in enumerate(LEVELS)
    for column, stepper in enumerate(STEPPERS)
]
"""Each two of level, optimizer and what is compiled meet in one of these; each case compiles for a second."""


@pytest.mark.drawn(8)
@pytest.mark.parametrize(("level", "optimizer", "fused", "how"), ONCE)
def test_a_step_has_the_bits_of_the_eager_one(level: str, optimizer: str, fused: Any, how: str) -> None:
    assert_same(train(level, optimizer, fused, how), train(level, optimizer, fused, "eager"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_step_has_the_bits_of_the_eager_one_by_a_compiler_that_writes_the_backward(level: str) -> None:
    found = train(level, "adam", "auto", "whole", "aot_eager")
    assert_same(found, train(level, "adam", "auto", "eager", "aot_eager"))
    assert sum(one is xamp.StepOutcome.SKIPPED for one in found) == (level in levels_where(lambda row: row.dynamic))


# The tracer of torch itself asks the scaled loss for its .grad after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("interface", ["GradScaler", "apex"])
def test_other_interfaces_have_the_bits_of_eager_code_too(interface: str) -> None:
    def trained(is_compiled: bool) -> list[Any]:
        torch.manual_seed(3)
        compiling.forget()
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        stepper: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = xamp.GradScaler(init_scale=2.0**4, growth_interval=2)
        if interface == "apex":
            model, stepper = amp.initialize(model, stepper, opt_level="O2", verbosity=0)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).float().square().mean()
            return loss

        def by_hand(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(x)
            scaler.scale(loss).backward()
            scaler.unscale_(stepper)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
            return loss.detach()

        def by_apex(x: torch.Tensor) -> torch.Tensor:
            loss = loss_of(x)
            with amp.scale_loss(loss, stepper) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(stepper), 1.0)
            stepper.step()
            stepper.zero_grad()
            return loss.detach()

        run = by_hand if interface == "GradScaler" else by_apex
        if is_compiled:
            run = torch.compile(run, backend="eager")
        else:
            loss_of = torch.compile(loss_of, backend="eager")
        found: list[Any] = []
        for number in range(STEPS):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            found.append(run(x * float("inf") if number == SPOILT else x).nan_to_num())
        return [*found, *(p.detach().clone() for p in model.parameters())]

    assert_same(trained(True), trained(False))


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """Check that all outcomes, scales and bits are equal."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


@pytest.mark.thorough
@pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated")  # inductor imports what uses it
@pytest.mark.parametrize(("fused", "eager_steps"), [("auto", 0), (False, 1)])
def test_a_whole_step_by_inductor(
    fused: Any, eager_steps: int, inductor_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At O2 as eager within the level's error, and an overflow is skipped; after the first steps it compiles no more.

    What is compiled before the optimizer has its state is compiled again after. Inductor takes a second for each graph
    that it has not seen; most of the second case's are in its cache. Other levels: by compilers that write no code.
    """
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def trained(compiled: bool) -> tuple[list[Any], list[Any], list[torch.Tensor], list[int]]:
        torch.manual_seed(3)
        compiling.forget()
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
        stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        xamp.initialize(model, stepper, "O2", fused=fused, verbosity=0, growth_interval=3, init_scale=2.0**8)
        counter = CompileCounterWithBackend("inductor")

        def whole(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean()
            with xamp.scale_loss(loss, stepper) as scaled:
                scaled.backward()
            stepper.step()
            stepper.zero_grad()
            return loss.detach()

        run = torch.compile(whole, backend=counter) if compiled else whole
        losses, outcomes, frames = [], [], []
        for number in range(10):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            step = whole if number < eager_steps else run
            found = step(x * float("inf") if number == 4 else x)
            losses.append(float(found) if number != 4 else 0.0)
            outcomes.append(xamp.session(stepper).last_step)
            frames.append(counter.frame_count)
        return losses, outcomes, [p.detach().clone() for p in xamp.master_params(stepper)], frames

    losses, outcomes, weights, _ = trained(compiled=False)
    found, seen, stepped, frames = trained(compiled=True)
    assert seen == outcomes
    assert seen.count(xamp.StepOutcome.SKIPPED) == 1
    assert frames[2 - eager_steps] == frames[-1] > 0
    near = 4e-3  # 4 eps of float16
    assert found == pytest.approx(losses, rel=near, abs=near)
    for one, other in zip(weights, stepped, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=near)
