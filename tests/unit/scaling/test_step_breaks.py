"""Where the compiler breaks its graph in a compiled step, and how often it compiles while the scale moves."""

from __future__ import annotations

from pathlib import Path
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

    @property
    def ours(self) -> set[str]:
        """The files of xamp in which it broke one, and why; each once, for a place may be traced twice.

        The compiler stops at torch's own ``zero_grad``, whoever calls it.
        """
        inside = f"{Path(xamp.__file__).parent}/"
        return {
            f"{file.removeprefix(inside)}:{'tolist' if 'Tensor.tolist()' in why else why}"
            for file, why in self.found
            if file.startswith(inside) and "`Optimizer.zero_grad`" not in why
        }


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


CASES = thorough(
    [
        *((level, fused, "step") for level in ("O1", "O2", "O5") for fused in ("auto", False)),
        *((level, "auto", "whole") for level in LEVELS),
        *((level, False, "whole") for level in DYNAMIC),
    ],
    *(("O1", "auto", "step"), ("O1", False, "whole"), ("O2", "auto", "whole"), ("O4", "auto", "whole")),
)


@pytest.mark.parametrize(("level", "fused", "what"), CASES)
def test_the_graph_is_broken_only_where_the_host_reads(
    level: str, fused: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first step: not at all with a fused optimizer, else once. Later steps compile nothing more."""
    model, optimizer = start(level, fused=fused)
    breaks, counter = Breaks(monkeypatch), CompileCounter()

    def whole(x: torch.Tensor) -> None:
        backward(model, optimizer, x)
        optimizer.step()
        optimizer.zero_grad()

    whole(batch(0))
    compiled: Any = torch.compile(whole if what == "whole" else optimizer.step, backend=counter)
    frames, outcomes = [], []
    for step in range(1, 6):
        x = batch(step) * (float("inf") if step == 3 and level in DYNAMIC else 1.0)
        if what == "whole":
            compiled(x)
        else:
            backward(model, optimizer, x)
            compiled()
            optimizer.zero_grad()
        frames.append(counter.frame_count)
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
    reads = level in DYNAMIC and fused is False
    assert breaks.ours == {"scaling/step.py:tolist"} if reads else not breaks.ours
    assert breaks.found, "torch breaks it in its own optimizer: nothing was traced"
    assert outcomes == ["APPLIED", "APPLIED", "SKIPPED" if level in DYNAMIC else "APPLIED", "APPLIED", "APPLIED"]
    assert frames == [frames[0]] * len(frames)


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", ["O2", pytest.param("O5", marks=pytest.mark.thorough)])
def test_a_compiled_step_sees_that_the_models_own_gradients_were_clipped(level: str, backend: str) -> None:
    model, optimizer = start(level)
    step: Any = torch.compile(optimizer.step, backend=backend)
    for number in range(3):
        backward(model, optimizer, batch(number))
        if number == 2:
            before = [p.detach().clone() for p in xamp.master_params(optimizer)]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with pytest.raises(xamp.StateError, match=r"optimizer\.step\(\): there are gradients that did not come"):
                step()
            after = optimizer.param_groups[0]["params"]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        else:
            step()
            optimizer.zero_grad()


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
