"""Tier operators: the portable table holds on the device, and it has no effect outside regions."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import xamp
from xamp.casting.ops.fixed_dtype import fixed
from xamp.casting.ops.parts import HERE, operator
from xamp.casting.ops.table import RULES
from xamp.op_dtypes.observe import attempt, expected
from xamp.op_dtypes.samples import Call, Sample, samples
from xamp.policy import best_level
from xamp.testing import foreign
from xamp.testing.lane import Lane
from xamp.testing.processes import command, environment
from xamp.testing.tier import Tier

__all__ = ["Operators"]

LEVEL_OF = {dtype: best_level((dtype,)).name for dtype in ("float16", "bfloat16")}
LIMIT = 300
"""Seconds allowed for a process that imports torch and runs some sixty small computations."""

governed = pytest.mark.parametrize("overload", HERE)
each_dtype = pytest.mark.parametrize("dtype", LEVEL_OF)


class Operators(Tier):
    """The portable table holds on the device, and it has no effect outside regions."""

    tier = "operators"

    @each_dtype
    @governed
    def test_result_dtype(self, lane: Lane, dtype: str, overload: str) -> None:
        """The results of an overload have the table's dtype, and each gradient has its input's."""
        lane.need("portable", LEVEL_OF[dtype])
        lower = getattr(torch, dtype)
        session = _session(lane, dtype)
        for sample in samples(overload):
            _needs_kernel(lane, sample)
            for given in _given(overload, lower):
                call = sample.call(lane.device, *given)
                if RULES[overload].kind == "banned":
                    with session.autocast(), pytest.raises(RuntimeError, match="use "):
                        _run(sample, call)
                    continue
                with session.autocast():
                    results = _floating(_run(sample, call))
                named = given[0] if sample.names_dtype else None
                wanted = expected(RULES[overload], [t.dtype for t in call.inputs], lower, named)
                shown = _spoken_of(overload, results)
                assert {result.dtype for result in shown} == {wanted}, f"{sample} of {given}"
                _assert_gradients(call, shown)

    @each_dtype
    @pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda made: made.__name__)
    def test_recurrent_layer(self, lane: Lane, dtype: str, layer: Any) -> None:
        """A recurrent layer runs in the lower dtype; its results and gradients are near those of fp32."""
        lane.need("portable", LEVEL_OF[dtype])
        model = layer(8, 8, num_layers=2, bidirectional=True).to(lane.device)
        x = torch.rand(5, 4, 8).to(lane.device)
        plain = model(x)[0]
        wanted = torch.autograd.grad(plain.square().sum(), list(model.parameters()))
        with _session(lane, dtype).autocast():
            found = model(x)[0]
        assert found.dtype == getattr(torch, dtype)
        torch.testing.assert_close(found.float(), plain, rtol=0.05, atol=0.05)
        grads = torch.autograd.grad(found.float().square().sum(), list(model.parameters()))
        for grad, exact in zip(grads, wanted, strict=True):
            assert grad.dtype == torch.float32
            assert (grad - exact).norm() <= 0.05 * exact.norm() + 1e-6

    @each_dtype
    def test_never_cast(self, lane: Lane, dtype: str) -> None:
        """No rule casts float64, integers or complex numbers."""
        lane.need("portable", LEVEL_OF[dtype])
        session, tried = _session(lane, dtype), 0
        for other in (torch.float64, torch.int64, torch.complex64):
            try:
                x = torch.ones(3, 3, dtype=other, device=lane.device)  # a cast may give another dtype: torch_npu's does
            except (RuntimeError, TypeError):  # the device has no such dtype
                continue
            plain = _dtypes(x)
            with session.autocast():
                assert _dtypes(x) == plain, other
            tried += bool(plain)
        if not tried:
            lane.lacks("float64, int64 or complex64")

    @each_dtype
    def test_native_policy(self, lane: Lane, dtype: str) -> None:
        """``op_policy="native"`` gives the dtypes of ``torch.autocast``, or the region's where that has another."""
        lane.need("native", LEVEL_OF[dtype])
        lower, fixed_to = getattr(torch, dtype), fixed(lane.backend.op_rules)
        session = _session(lane, dtype, op_policy="native")
        ran = 0
        for sample in (sample for overload in HERE for sample in samples(overload)):
            with session.autocast():
                ours = _plain_attempt(lane, sample, lower)
            with torch.autocast(lane.kind, dtype=lower):
                theirs = _plain_attempt(lane, sample, lower)
            if sample.overload in fixed_to:
                theirs = [name.replace(str(fixed_to[sample.overload]), str(lower)) for name in theirs]
            assert ours == theirs, str(sample)
            ran += any(name.startswith("[") for name in ours)
        assert ran >= len(HERE) / 2, "too few of them run at all"

    def test_foreign_code_is_untouched(self, lane: Lane, tmp_path: Path) -> None:
        """Code under ``torch.autocast`` computes the same bits as without xamp, also beside an open region."""
        lane.need("portable")
        dtype = next((dtype for dtype, level in LEVEL_OF.items() if lane.declares(level)), None)
        if dtype is None:
            lane.need(*LEVEL_OF.values())
        before = _in_a_process_of_its_own(lane, tmp_path)
        session = _session(lane, str(dtype))
        self._compare(foreign.results(lane.device, lane.can.dtypes), before)
        stop, ready = threading.Event(), threading.Event()

        def stay() -> None:
            x = torch.ones(4, 4, device=lane.device)
            with session.autocast():
                torch.softmax(x @ x, 0)
                ready.set()
                stop.wait(LIMIT)

        thread = threading.Thread(target=stay, daemon=True)
        thread.start()
        try:
            assert ready.wait(LIMIT), "no region was entered"
            self._compare(foreign.results(lane.device, lane.can.dtypes), before)
        finally:
            stop.set()
            thread.join(LIMIT)

    @staticmethod
    def _compare(found: dict[str, Any], before: dict[str, Any]) -> None:
        assert found.keys() == before.keys()
        assert len([name for name in before if not isinstance(before[name], str)]) >= foreign.AT_LEAST
        for name, result in before.items():
            if isinstance(result, str):
                assert found[name] == result, name
            else:
                assert foreign.equal(found[name], result), name


def _session(lane: Lane, dtype: str, **options: Any) -> _Held:
    """A session whose regions cast the device's operators to ``dtype``."""
    model = nn.Linear(1, 1).to(lane.device)
    xamp.initialize(model, level=LEVEL_OF[dtype], verbosity=0, **options)
    return _Held(model, xamp.session(model))


class _Held(NamedTuple):
    """A session and its model; the session ends when nothing holds the model."""

    model: nn.Module
    session: Any

    def autocast(self) -> Any:
        return self.session.autocast()


def _given(overload: str, lower: torch.dtype) -> Iterator[tuple[torch.dtype, ...]]:
    """Yield the dtypes of the floating inputs, one combination after the other."""
    yield (torch.float32,)
    yield (lower,)
    if RULES[overload].kind == "promote":
        yield lower, torch.float32
        yield torch.float32, lower


def _needs_kernel(lane: Lane, sample: Sample) -> None:
    """End the clause as not declared if the device lacks the operator even in fp32 outside autocast."""
    seen = attempt(sample, lane.kind, None, (torch.float32,), present=True)
    if seen.unobserved:
        lane.lacks(f"an operator {sample.overload}, which torch does not have on {lane.kind}")


def _plain_attempt(lane: Lane, sample: Sample, lower: torch.dtype) -> Any:
    """The result dtypes of a call in the current autocast state, or the name of the error's class."""
    found = []
    for given in ((torch.float32,), (lower,)):
        try:
            results = _run(sample, sample.call(lane.device, *given, grad=False))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            found.append(type(error).__name__)
        else:
            found.append(str([result.dtype for result in _floating(results)]))
    return found


def _run(sample: Sample, call: Call) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators of the table are deprecated
        return operator(sample.overload)(*call.args, **call.kwargs)


def _floating(returned: Any) -> list[torch.Tensor]:
    results = returned if isinstance(returned, tuple) else (returned,)
    return [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()]


def _spoken_of(overload: str, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results that the rule governs; flash attention returns others too, only for its backward."""
    return results[:1] if overload == "_scaled_dot_product_flash_attention" else results


def _assert_gradients(call: Call, results: list[torch.Tensor]) -> None:
    differentiable = [tensor for tensor in call.inputs if tensor.requires_grad]
    total = [result.sum(dtype=torch.float32) for result in results if result.requires_grad]
    assert total, "no result is differentiable"
    for tensor, grad in zip(differentiable, torch.autograd.grad(total, differentiable), strict=True):
        assert grad.dtype == tensor.dtype
        assert grad.isfinite().all()


_NEVER_CAST: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "sum": torch.sum,
    "cumsum": lambda x: x.cumsum(0),
    "stack": lambda x: torch.stack([x, x]),
    "matmul": lambda x: x @ x,
}


def _dtypes(x: torch.Tensor) -> dict[str, torch.dtype]:
    """The dtype of each result, of the operators that take ``x`` on its device."""
    found: dict[str, torch.dtype] = {}
    for name, call in _NEVER_CAST.items():
        with contextlib.suppress(RuntimeError, TypeError):
            found[name] = call(x).dtype
    return found


def _in_a_process_of_its_own(lane: Lane, folder: Path) -> dict[str, Any]:
    """Compute :mod:`xamp.testing.foreign` in a process in which xamp has registered nothing."""
    file = folder / "foreign.pt"
    words = command(lane, foreign.__name__, str(file))
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found
