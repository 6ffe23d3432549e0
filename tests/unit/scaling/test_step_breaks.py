"""Where the compiler breaks its graph in a compiled step, and how often it compiles while the scale moves.

Covers: xamp.scaling.engine, xamp.torch_compat.compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import compiling
import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

import xamp
from xamp.policy import LEVELS, levels_where

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # The tracer of torch itself asks the scaled loss for its .grad after a break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

DYNAMIC = levels_where(lambda row: row.dynamic)


class Breaks:
    """Where graphs were broken, and why.

    Attributes:
        found: for each break the file and the reason.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, str]] = []
        if not hasattr(symbolic_convert, "log_graph_break"):
            log: Any = symbolic_convert.InstructionTranslatorBase.log_graph_break

            def logged(tracer: Any, options: Any, reason: str, exc: Any) -> None:
                if not exc.logged:
                    self._note(getattr(exc, "real_stack", None), str(exc))
                log(tracer, options, reason, exc)

            monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "log_graph_break", logged)
            return
        before: Any = symbolic_convert.log_graph_break  # torch 2.7, 2.8

        def logged_before(options: Any, reason: str = "", exc_info: bool = False, user_stack: Any = None) -> None:
            self._note(user_stack, reason)
            before(options, reason, exc_info, user_stack)

        monkeypatch.setattr(symbolic_convert, "log_graph_break", logged_before)

    def _note(self, stack: Any, why: str) -> None:
        stack = stack or torch._guards.TracingContext.extract_stack()
        self.found.append((stack[-1].filename, why))


def start(level: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    compiling.forget()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    xamp.initialize(model, optimizer, level=level, verbosity=0, **options)
    return model, optimizer


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def backward(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    with xamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    return loss.detach()


def thorough(cases: list[tuple[Any, ...]], *plain: tuple[Any, ...]) -> list[Any]:
    """Mark all of ``cases`` but ``plain``."""
    return [case if case in plain else pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("level", LEVELS)
def test_a_whole_step_breaks_its_graph_once(level: str, fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On entering ``scale_loss``, or at torch's ``backward``; Python runs the rest. Later steps compile no more."""
    model, optimizer = start(level, fused=fused)
    breaks, counter = Breaks(monkeypatch), CompileCounter()

    @torch.compile(backend=counter)
    def whole(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()

    outcomes = []
    for step in range(6):
        whole(batch(step) * (float("inf") if step == 3 and level in DYNAMIC else 1.0))
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
    assert outcomes == ["APPLIED"] * 3 + ["SKIPPED" if level in DYNAMIC else "APPLIED"] + ["APPLIED"] * 2
    ((file, why),) = breaks.found
    assert file == __file__
    assert "eager by rule" in why
    assert counter.frame_count == 1


def test_each_backward_after_the_first_costs_no_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python runs what follows the first block, and a forward there is a graph of its own."""
    model, optimizer = start("O2")
    breaks, counter = Breaks(monkeypatch), CompileCounter()

    @torch.compile(backend=counter)
    def whole(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    for step in range(3):
        whole(batch(step))
    assert counter.frame_count == 2
    assert len(breaks.found) == 1


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "step": lambda model, optimizer, session: optimizer.step(),
    "zero_grad": lambda model, optimizer, session: optimizer.zero_grad(),
    "zero_grad of the model": lambda model, optimizer, session: model.zero_grad(),
    "master_params": lambda model, optimizer, session: len(list(xamp.master_params(optimizer))),
    "clip_grad_norm_": lambda model, optimizer, session: xamp.clip_grad_norm_(optimizer, 1.0),
    "clip_grad_value_": lambda model, optimizer, session: xamp.clip_grad_value_(optimizer, 1.0),
    "metrics": lambda model, optimizer, session: session.metrics(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("level", ["O2", "O4"])
def test_what_is_called_between_breaks_it_once(level: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(level)
    backward(model, optimizer, batch(0))
    session, breaks = xamp.session(optimizer), Breaks(monkeypatch)
    torch.compile(CALLS[call], backend="eager")(model, optimizer, session)
    assert [("eager by rule" in why, file == __file__) for file, why in breaks.found] == [(True, True)]


@pytest.mark.parametrize(
    ("level", "when"),
    thorough([(level, when) for level in LEVELS for when in ("before", "after")], ("O1", "after"), ("O2", "before")),
)
def test_a_compiled_model_compiles_once_for_100_steps_with_10_scales(level: str, when: str) -> None:
    """Under the portable policy, with batches of any size; the model is compiled before ``initialize``, or after."""

    def losses(how: str) -> tuple[list[float], list[int]]:
        torch.manual_seed(3)
        compiling.forget()
        with_backward = (when == "before") == (level in DYNAMIC)  # in turn, for its graph takes as long again
        counter = CompileCounterWithBackend("aot_eager" if with_backward else "eager")
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
        model: Any = torch.compile(inner, backend=counter, dynamic=True) if how == "before" else inner
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.05)
        dynamic: dict[str, Any] = {"growth_interval": 2, "init_scale": 2.0**4} if level in DYNAMIC else {}
        xamp.initialize(inner, optimizer, level=level, op_policy="portable", verbosity=0, **dynamic)
        if how == "after":
            model = torch.compile(inner, backend=counter, dynamic=True)
        found, frames, scales = [], [], set()
        for step in range(100):
            if step >= 30 and step % 10 == 0 and level in DYNAMIC:  # as a checkpoint sets it
                xamp.session(optimizer).engine.scalers[0].set(2.0 ** (step // 10))
            optimizer.zero_grad()
            found.append(float(backward(model, optimizer, batch(step, rows=3 + step % 5))))
            optimizer.step()
            frames.append(counter.frame_count)
            scales.add(xamp.loss_scale(optimizer))
        assert len(scales) >= (10 if level in DYNAMIC else 1)
        return found, frames

    eager, _ = losses("never")
    compiled, frames = losses(when)
    assert frames == [frames[0]] * 100
    assert frames[0] > 0
    lower = xamp.policy.LEVELS[level].dtype
    near = {"float16": 4e-3, "bfloat16": 3e-2}.get(lower or "", 1e-5)
    assert compiled == pytest.approx(eager, rel=near, abs=near)
