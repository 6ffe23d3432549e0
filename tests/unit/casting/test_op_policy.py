"""The portable op policy on the CPU: what the table promises, overload by overload, and what stays as it was.

Covers: xamp.casting.ops.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_python import python
from gpu_kernels import GPU_KERNELS
from table_ops import BF16, FP16, FP32, LOWER, Calls, assert_equal, batch, gradients, many, noted, promised, start
from table_ops import region as make_region
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.casting import ops
from xamp.casting.ops import parts
from xamp.casting.ops.parts import HERE, operator
from xamp.casting.ops.table import RULES
from xamp.errors import StateError
from xamp.op_dtypes.observe import expected
from xamp.op_dtypes.samples import Call, Sample, samples

FP64 = torch.float64
ON_CPU = [name for name in HERE if name not in GPU_KERNELS]
NAMED = _ExperimentalConfig(capture_overload_names=True)


def _in_model(level: str, function: Callable[[], Any]) -> Any:
    return start(Calls(), level, cast_model_outputs=False)(function)


def _in_session(level: str, function: Callable[[], Any]) -> Any:
    with make_region(level):
        return function()


def floating(returned: Any) -> list[torch.Tensor]:
    results = returned if isinstance(returned, tuple) else (returned,)
    return [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()]


def run(sample: Sample, call: Call) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators of the table are deprecated
        return operator(sample.overload)(*call.args, **call.kwargs)


def backward(call: Call, results: list[torch.Tensor]) -> list[torch.Tensor | None]:
    total = [r.sum(dtype=FP32) for r in results if r.requires_grad]
    found = iter(torch.autograd.grad(total, [t for t in call.inputs if t.requires_grad], allow_unused=True))
    return [next(found) if t.requires_grad else None for t in call.inputs]


# ---------------------------------------------------------------- op by op


@pytest.mark.parametrize("inside", [_in_session, _in_model], ids=["block", "model"])
@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("overload", [name for name in ON_CPU if RULES[name].kind != "banned"])
def test_an_overload_does_what_the_table_says(overload: str, level: str, inside: Callable[..., Any]) -> None:
    lower = LOWER[level]
    for sample in samples(overload):
        for given in ((FP32,), (lower,), (lower, FP32), (FP32, lower), (FP64,)):
            call = sample.call("cpu", *given)
            dtypes = [t.dtype for t in call.inputs]
            results = floating(inside(level, functools.partial(run, sample, call)))
            wanted = expected(RULES[overload], dtypes, lower, given[0] if sample.names_dtype else None)
            assert {r.dtype for r in results} == {wanted}, (str(sample), given)
            for tensor, gradient in zip(call.inputs, backward(call, results), strict=True):
                assert tensor.requires_grad == (gradient is not None)
                assert gradient is None or gradient.dtype == tensor.dtype


@pytest.mark.parametrize("level", LOWER)
@pytest.mark.parametrize("overload", [name for name in ON_CPU if RULES[name].kind != "banned"])
def test_values_and_gradients_are_near_those_of_fp32(overload: str, level: str) -> None:
    lower = LOWER[level]
    # A rule that keeps fp32 changes nothing; one that lowers rounds inputs of about 1 to 8 or 11 bits.
    close = 0.06 if lower is BF16 else 0.01
    for sample in samples(overload):
        if sample.names_dtype:
            continue
        call, plain = sample.call("cpu", FP32), sample.call("cpu", FP32)
        mine = floating(_in_session(level, functools.partial(run, sample, call)))
        reference = floating(run(sample, plain))
        exact = all(r.dtype == FP32 for r in mine)
        for a, b in zip([*mine, *backward(call, mine)], [*reference, *backward(plain, reference)], strict=True):
            if a is None or b is None:
                assert a is b
            else:
                torch.testing.assert_close(a.float(), b, rtol=0.0 if exact else close, atol=0.0 if exact else close)


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated:UserWarning")  # torch says so once a process
def test_the_functions_that_entries_call_reach_the_very_overload() -> None:
    """In torch's own record of calls; a function of ``torch._C`` stands for several overloads."""
    named = [(name, function) for name in ON_CPU for function in [parts.python_function(name)] if function]
    assert len(named) > 60
    with profile(activities=[ProfilerActivity.CPU], experimental_config=NAMED) as record:
        for overload, function in named:
            for sample in samples(overload):
                with record_function(f"sample {overload}"):
                    call = sample.call("cpu", FP32)
                    with record_function("call"), contextlib.suppress(NotImplementedError):
                        function(*call.args, **call.kwargs)
    calls = [event for event in record.events() or () if event.name == "call"]
    assert len(calls) > 100
    for event in calls:
        overload = event.cpu_parent.name.removeprefix("sample ")
        packet, _, name = overload.partition(".")
        seen = {(each.name, each.overload_name) for each in event.cpu_children}
        assert seen <= {(f"aten::{packet}", name)}, overload


@pytest.mark.parametrize("level", LOWER)
def test_a_banned_loss_is_refused_and_says_what_to_do(level: str) -> None:
    p = torch.full((3,), 0.5)
    with make_region(level), pytest.raises(StateError, match=re.escape("use binary_cross_entropy_with_logits")):
        F.binary_cross_entropy(p, p)
    with pytest.raises(StateError, match=r"^binary_cross_entropy: not in a region that casts"):
        start(Calls(), level)(lambda: nn.BCELoss()(p.to(LOWER[level]), p))
    assert F.binary_cross_entropy(p, p).dtype == FP32
    with make_region(level):
        assert F.binary_cross_entropy_with_logits(p, p).dtype == FP32


# ---------------------------------------------------------------- in one region


def softmax_and_mv(x: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    return F.softmax(x, -1).dtype, torch.mv(x, x[0]).dtype


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.Linear, None], ids=str)
def test_no_grad_before_grad_in_one_region_leaves_gradients(make: Any) -> None:
    """What was cast without grad mode has no way back to the weight it was cast from."""
    found = []
    for before in (True, False):
        torch.manual_seed(1)
        model: Any = many() if make is None else make(8, 8)
        x = batch()
        with make_region("O4"):
            if before:
                with torch.no_grad():
                    model(x)
            made = model(x)
            made = made[0] if isinstance(made, tuple) else made
            made.float().square().sum().backward()
        found.append(gradients(model, x))
    assert_equal(*found)


class Casts(TorchDispatchMode):
    """Counts how often each of some shapes is cast."""

    def __init__(self, shapes: list[torch.Size]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = dict.fromkeys(shapes, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape in self.counted:
            self.counted[args[0].shape] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell], ids=lambda made: made.__name__)
def test_weights_of_a_cell_are_cast_once_a_region(cell: Any) -> None:
    model, x = cell(5, 4), torch.randn(2, 5)
    weights = [model.weight_ih.shape, model.weight_hh.shape]
    with make_region("O4"), Casts(weights) as casts:
        state = model(x)
        for _ in range(3):
            state = model(x, state)
    assert casts.counted == dict.fromkeys(weights, 1)
    made = state[0] if isinstance(state, tuple) else state
    made.float().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_cell_by_names_is_lowered_too() -> None:
    model, x, h = nn.GRUCell(5, 4), torch.randn(2, 5), torch.randn(2, 4)
    with make_region("O4"):
        made = torch.gru_cell(input=x, hx=h, w_ih=model.weight_ih, w_hh=model.weight_hh, b_ih=None, b_hh=None)
        mixed = torch.gru_cell(x, hx=h, w_ih=model.weight_ih, w_hh=model.weight_hh)
    assert (made.dtype, mixed.dtype) == (BF16, BF16)
    assert torch.equal(made, mixed)


def test_inference_mode() -> None:
    with make_region("O1"), torch.inference_mode():
        assert softmax_and_mv(torch.randn(3, 3, dtype=FP16)) == (FP32, FP16)


def test_a_copied_model_stays_under_the_policy() -> None:
    made = copy.deepcopy(start(many(), "O4", cast_model_outputs=False))
    made.dtypes.clear()
    made(batch())
    assert noted(made) == promised("O4")


# ---------------------------------------------------------------- what goes through


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func.jvp compiles its own by it
def test_functional_call_vmap_jvp_and_double_backward() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.softmax(x, -1) * torch.exp(x)).float().sum(-1)

    x = torch.randn(5, 4)
    with make_region("O4"):
        torch.testing.assert_close(torch.func.vmap(function)(x), function(x))
        torch.testing.assert_close(
            torch.func.vmap(torch.func.grad(lambda row: function(row).sum()))(x),
            torch.func.grad(lambda rows: function(rows).sum())(x),
        )
        tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]
        assert softmax_and_mv(x.to(BF16)) == (FP32, BF16)
    torch.testing.assert_close(tangent, torch.func.jvp(function, (x,), (torch.ones_like(x),))[1])
    model = many(noting=False)
    start(model, "O4")
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_equal([torch.func.functional_call(model, parameters, (batch(),))], [model(batch())])

    y = torch.randn(3, 3, requires_grad=True)
    with make_region("O1"):
        (gradient,) = torch.autograd.grad(torch.logsumexp(y, -1).sum(), y, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), y)
    assert (gradient.dtype, second.dtype) == (FP32, FP32)
    assert second.abs().sum() > 0


class Tagged(torch.Tensor):
    pass


def test_a_tensor_subclass_is_kept() -> None:
    x = torch.randn(3, 3, dtype=BF16).as_subclass(Tagged)
    with make_region("O4"):
        made = torch.softmax(x, -1)
        assert type(made) is Tagged
        assert made.dtype == FP32
        assert torch.exp(nn.Parameter(x.float())).dtype == FP32


@torch.library.custom_op("xamp_tests::weights", mutates_args=())
def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def test_a_custom_operator_with_a_rule_for_autocast_and_before_it_has_one() -> None:
    x = torch.randn(3, 3)
    with make_region("O4"):
        assert weights(x.to(BF16)).dtype == FP32  # what it calls is cast, as on a device that lists it
    with torch.autocast("cpu", dtype=BF16):
        assert weights(x.to(BF16)).dtype == BF16
    torch.library.register_autocast("xamp_tests::weights", "cpu", BF16)
    for opened in (make_region("O4"), make_region("O4", "native"), torch.autocast("cpu", dtype=BF16)):
        with opened:
            assert weights(x).dtype == BF16
    assert weights(x).dtype == FP32


def test_arguments_by_name_and_at_their_defaults() -> None:
    x = torch.randn(3, 4, dtype=BF16)
    with make_region("O4"):
        assert torch.softmax(input=x, dim=1).dtype == FP32
        assert torch.softmax(x, 1, None).dtype == FP32
        assert torch.softmax(x, 1, BF16).dtype == BF16
        assert torch.softmax(x, 1, dtype=FP64).dtype == FP64
        assert x.sum(dim=(0, 1), keepdim=True).dtype == FP32
        assert x.sum(dtype=BF16).dtype == BF16
        assert torch.norm(x).dtype == FP32
        assert x.norm(2, 1, True).dtype == FP32
        assert x.norm(p=1).dtype == FP32
        assert torch.linalg.vector_norm(x, 3, dim=1).dtype == FP32
        assert torch.addcmul(input=x, tensor1=x, tensor2=x, value=2).dtype == BF16
        assert torch.stack([x, x.float()]).dtype == FP32
        assert torch.einsum("ij,kj->ik", [x.float(), x]).dtype == BF16
        assert torch.ops.aten.index_put(x, [None, torch.tensor([1])], torch.zeros(3, 1)).dtype == FP32
        assert torch.cumsum(x, 0, out=torch.empty(3, 4, dtype=BF16)).dtype == BF16


# ---------------------------------------------------------------- threads


# ---------------------------------------------------------------- the native policy


def test_a_native_session_installs_nothing() -> None:
    code = (
        "import torch, xamp; from xamp.casting.ops.parts import operator\n"
        "key = lambda: len(torch._C._dispatch_get_registrations_for_dispatch_key('AutocastCPU'))\n"
        "before = key()\n"
        "xamp.initialize(torch.nn.Linear(1, 1), level='O4', op_policy='native', backend='cpu', verbosity=0)\n"
        "xamp.session(xamp.initialize(torch.nn.Linear(1, 1), level='O4', op_policy='native', verbosity=0,\n"
        "    backend='cpu')).autocast()\n"
        "native = key()\n"
        "xamp.initialize(torch.nn.Linear(1, 1), level='O4', op_policy='portable', backend='cpu', verbosity=0)\n"
        "print(native - before, key() - before)"
    )
    out = subprocess.run([python(), "-c", code], capture_output=True, check=True, text=True)
    added, after = map(int, out.stdout.split())
    assert added == 0
    assert after > 70


def test_torch_is_prepared_where_operators_are_cast_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, levels = ops.named("portable"), list[str]()
    install = policy.install

    def counted(device_type: str, backend: Any) -> None:
        levels.append(level)
        install(device_type, backend)

    monkeypatch.setattr(policy, "install", counted)
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        xamp.initialize(nn.Linear(2, 2), level=level, verbosity=0)
    assert levels == ["O1", "O4"]
