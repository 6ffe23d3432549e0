"""Tier compiled: a model that ``torch.compile`` compiled under a policy behaves as the eager one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.policy import LEVELS, levels_where
from xamp.testing.exact import outcome
from xamp.testing.lane import Lane
from xamp.testing.models import TASKS, Task
from xamp.testing.nets import Dtypes, Mixed
from xamp.testing.numerics import CURVE, dtype_of
from xamp.testing.tier import Tier, casting, every_level, scaled
from xamp.testing.training import FIRST_SCALE, Loop, match, start_loop, worst
from xamp.torch_compat.torch_private import dynamo

__all__ = ["Compiled"]

STEPS = 4
SAME = 1e-4
"""The allowed difference in fp32 of a compiled loss from the eager one, as a fraction of the first loss."""


MIXED = dataclasses.replace(TASKS["convolutions"], name="mixed", build=Mixed)

WAYS = {
    "after-eager": (MIXED, "after", "eager"),
    "after-aot_eager": (MIXED, "after", "aot_eager"),
    "before-aot_eager": (MIXED, "before", "aot_eager"),
    "itself-aot_eager": (MIXED, "itself", "aot_eager"),
    "after-aot_eager-transformer": (TASKS["transformer"], "after", "aot_eager"),
}
"""By name: the task; whether it is compiled after or before ``initialize``, or by ``model.compile``; the compiler."""


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # inductor imports code that uses it
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a .functools.lru_cache")
class Compiled(Tier):
    """A compiled model under a policy behaves as the eager one."""

    tier = "compiled"

    @pytest.fixture(autouse=True)
    def _fresh_compiler(self) -> Iterator[None]:
        """Start with nothing compiled, and without the cache on disk: its key is the calls, not their result dtypes."""
        torch.compiler.reset()
        with dynamo.without_autograd_cache():
            yield
        torch.compiler.reset()

    @pytest.mark.parametrize("way", WAYS)
    @every_level
    def test_trains_like_eager(self, lane: Lane, level: str, way: str) -> None:
        """A single graph, compiled before or after ``initialize``, gives the eager model's loss at every step."""
        task, moment, compiler = WAYS[way]
        _need_compiler(lane, compiler)
        eager = start_loop(task, lane, level, sgd=True)
        loop = _compiled_loop(task, lane, level, moment, compiler)
        found, wanted = loop.steps(STEPS), eager.steps(STEPS)
        bound = CURVE[dtype_of(level)] if LEVELS[level].dtype else SAME
        assert ((found - wanted).abs().max() / wanted[0]).item() <= bound, f"{found.tolist()} is not {wanted.tolist()}"
        if compiler == "eager":
            gap, allowed = match([found], lambda: [start_loop(task, lane, level, sgd=True).steps(STEPS)])
            assert gap <= allowed, "the compiler's eager backend runs the very operators, which give the same bits"

    @pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
    @casting
    def test_result_dtypes(self, lane: Lane, level: str, compiler: str) -> None:
        """Under the portable op policy each operator gives the same dtype as in eager mode; softmax gives fp32."""
        lane.need(level, "portable")
        _need_compiler(lane, compiler)
        model: Any = Dtypes().to(lane.device)
        xamp.initialize(model, level=level, op_policy="portable", cast_model_outputs=False, verbosity=0)
        x = torch.rand(8, 8, device=lane.device)
        compiled: Any = torch.compile(model, backend=compiler, fullgraph=True)
        eager, made = model(x), compiled(x)
        low, full = getattr(torch, dtype_of(level)), torch.float32
        assert [t.dtype for t in eager] == [low, full, full, full, full, full, low, full]
        assert [t.dtype for t in made] == [t.dtype for t in eager]
        for ours, wanted in zip(made, eager, strict=True):
            assert worst([ours], [wanted]) <= 4 * torch.finfo(low).eps * wanted.abs().max().item()

    @every_level
    def test_compiled_once(self, lane: Lane, level: str) -> None:
        """One graph serves all training steps, however the loss scale moves; evaluation needs only one more."""
        _need_compiler(lane, "eager")
        graphs: list[Any] = []

        def counting(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        loop = start_loop(MIXED, lane, level, sgd=True, growth_interval=1)
        loop.run = torch.compile(loop.model, backend=counting, fullgraph=True)
        for _ in range(2):
            loop.steps(2)
            loop.step(lambda: lane.overflow_(_gradient(loop.model)))
            assert len(graphs) == 1
        x = MIXED.batch(0, lane.device)[0]
        for _ in range(2):
            loop.model.eval()
            with torch.no_grad():
                loop.run(x)
            loop.model.train()
            loop.step()
            assert len(graphs) == 2

    @every_level
    def test_closed_session(self, lane: Lane, level: str) -> None:
        """Compiled code is plain fp32 after ``close``; under the next session it runs in that session's dtypes."""
        _need_compiler(lane, "aot_eager")
        loop = _compiled_loop(MIXED, lane, level, "after", "aot_eager")
        loop.steps(2)
        xamp.session(loop.model).close()
        model, x = loop.model.eval(), MIXED.batch(7, lane.device)[0]
        with torch.no_grad():
            plain = Mixed().to(lane.device).eval()
            plain.load_state_dict(model.state_dict())
            assert worst([loop.run(x)], [plain(x)]) <= 1e-5
            for other in LEVELS:
                if lane.declares(other) and other != level:
                    xamp.initialize(model, level=other, verbosity=0)
                    eager = model(x)
                    assert worst([loop.run(x)], [eager]) <= 1e-5 + CURVE.get(dtype_of(other), 0.0)
                    assert LEVELS[other].dtype is None or worst([loop.run(x)], [plain(x)]) > 0
                    return

    @scaled
    def test_overflow_is_skipped(self, lane: Lane, level: str) -> None:
        """On an overflow in a compiled model nothing moves, the scale backs off, and the next step is applied."""
        _need_compiler(lane, "aot_eager")
        loop = _compiled_loop(MIXED, lane, level, "after", "aot_eager")
        (optimizer,) = loop.optimizers
        loop.steps(1)
        before = loop.stepped()
        loop.step(lambda: lane.overflow_(_gradient(loop.model)))
        assert outcome(optimizer) == "SKIPPED"
        assert worst(loop.stepped(), before) == 0.0
        assert xamp.loss_scale(optimizer) == FIRST_SCALE / 2
        loop.step()
        assert outcome(optimizer) == "APPLIED"
        assert worst(loop.stepped(), before) > 0.0

    def test_default_compiler(self, lane: Lane) -> None:
        """With ``torch.compile``'s default compiler a model trains as the eager one does."""
        bare = levels_where(lambda row: not row.casts_parameters)
        level = next(level for level in reversed(bare) if lane.declares(level))
        _need_compiler(lane, "inductor")
        found = _compiled_loop(MIXED, lane, level, "after", "inductor").steps(STEPS)
        wanted = start_loop(MIXED, lane, level, sgd=True).steps(STEPS)
        bound = CURVE[dtype_of(level)] if LEVELS[level].dtype else SAME
        assert ((found - wanted).abs().max() / wanted[0]).item() <= bound


# ---------------------------------------------------------------- what clauses share


def _need_compiler(lane: Lane, compiler: str) -> None:
    """End the clause as skipped where plain fp32 code does not compile."""
    trouble = _trouble(lane.device, compiler)
    if trouble:
        lane.cannot("compile", f"{compiler} fails on plain fp32: {trouble}")


@functools.cache
def _trouble(device: torch.device, compiler: str) -> str:
    """Why plain fp32 code does not compile and train on ``device``; empty if it does."""
    model, x = nn.Linear(4, 4).to(device), torch.rand(2, 4, device=device)
    try:
        torch.compile(model, backend=compiler)(x).sum().backward()
    except Exception as error:  # from the compiler, or from code that it calls
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    return ""


def _compiled_loop(task: Task, lane: Lane, level: str, moment: str, compiler: str) -> Loop:
    """A loop over a compiled model, before its first step; see :data:`WAYS`."""
    options: dict[str, Any] = {"backend": compiler, "fullgraph": True}
    if moment == "before":
        lane.need(level)
        model = task.make(lane.device)
        run: Any = torch.compile(model, **options)
        with torch.no_grad():  # compiles it for fp32; evaluation mode leaves batch norm's statistics alone
            assert task.predict(run.eval(), task.batch(0, lane.device)).dtype == torch.float32
        run.train()
        optimizers = task.tune_sgd(model)
        xamp.initialize(run, optimizers, level=level, init_scale=FIRST_SCALE, verbosity=0)
        return Loop(task, lane, model, optimizers, managed=True, run=run)
    loop = start_loop(task, lane, level, sgd=True)
    if moment == "itself":
        loop.model.compile(**options)
    else:
        loop.run = torch.compile(loop.model, **options)
    return loop


def _gradient(model: nn.Module) -> torch.Tensor:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return grads[0]
