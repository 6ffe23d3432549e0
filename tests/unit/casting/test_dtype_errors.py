"""An error about dtypes that leaves a managed forward, or a backward in ``scale_loss``, names a cure; and it helps.

Covers: xamp.casting.dtype_errors.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gathering import cases
from torch import nn

import xamp
from xamp.casting.dtype_errors import explain_backward, explain_forward
from xamp.policy import LEVELS, levels_where

LOWERING = levels_where(lambda row: row.dtype is not None)
CAST = levels_where(lambda row: row.casts_parameters)


class Doubles(torch.autograd.Function):
    """Its backward multiplies by what it makes itself, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.float().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (torch.ones(4, 4) @ x)


class Own(nn.Module):
    """Runs ``run`` within a module of its own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(x)


class Net(nn.Module):
    def __init__(self, run: Callable[..., Any] = torch.tanh) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(6, 6), Own(run)

    def forward(self, x: torch.Tensor) -> Any:
        return self.own(self.first(x))


RUN: dict[str, Callable[..., Any]] = {
    "fft": lambda h: torch.fft.rfft(h).abs(),
    "quantile": lambda h: torch.quantile(h, 0.5),
    "huber": lambda h: F.huber_loss(h, torch.zeros(h.shape)),
    "cross entropy": lambda h: F.cross_entropy(h, torch.full(h.shape, 1 / 6)),
    "a constant": lambda h: h.masked_fill(h > 0, -1e9),
    "a filled tensor": lambda h: torch.full_like(h, 1e9) + h,
    "fake quantisation": lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, 0, 255),
    "a determinant": lambda h: torch.linalg.det(h[:, :4]),
    "a factorization": lambda h: torch.linalg.lu_factor(h[:, :4])[0],
    "cholesky": lambda h: torch.linalg.cholesky(h @ h.T + 9 * torch.eye(4)),
    "a kernel": torch.special.erfcx,
    "a sparse product": lambda h: torch.sparse.mm(torch.eye(4).to_sparse(), h),
    "index_put_": lambda h: torch.zeros(4, 6).index_put_((torch.tensor([0]),), h[:1]),
    "a backward": Doubles.apply,
}


def said_by(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def trained(run: Callable[..., Any], level: str, **options: Any) -> Exception | None:
    """One backward in ``scale_loss``; return what it raised."""
    torch.manual_seed(0)
    net: Any = Net(run)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    xamp.initialize(net, optimizer, level=level, verbosity=0, **options)
    try:
        with xamp.scale_loss(net(torch.randn(4, 6)).float().mean(), optimizer) as scaled:
            scaled.backward()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("level", LOWERING)
def test_each_is_told_with_its_module_and_the_cure_that_is_named_helps(level: str) -> None:
    raised = 0
    with cases() as case:
        for name, run in RUN.items():
            with case(name):
                error = trained(run, level)
                if error is None:
                    continue
                raised += 1
                said = said_by(error)
                assert said.count("xamp: ") == 1, said
                assert "keep_fp32=" in said
                if f"a backward at level {level}" not in said:
                    assert name != "a backward"
                    assert f"own of Net, a Own, runs at torch.{LEVELS[level].dtype}" in said
                    assert "keep it in fp32 by keep_fp32=['own']" in said.lower()
                assert trained(run, level, keep_fp32=["own"]) is None
    assert raised >= (5 if level in ("O1", "O4") else 9)


@pytest.mark.parametrize("level", levels_where(lambda row: row.dtype == "float16"))
def test_a_constant_that_does_not_fit_has_a_cure_of_its_own(level: str) -> None:
    said = said_by(trained(RUN["a constant"], level))  # type: ignore[arg-type]
    assert "a constant does not fit this dtype. Take torch.finfo(x.dtype).min or .max" in said
    assert trained(lambda h: h.masked_fill(h > 0, torch.finfo(h.dtype).min).clamp(-1), level) is None


def test_code_of_the_model_itself_needs_a_module_first() -> None:
    net: Any = Own(lambda x: (x @ torch.ones(6, 6)).to(torch.bfloat16).masked_fill(x > 0, 1.0).double() @ x)
    xamp.initialize(nn.ModuleList([net, nn.Linear(1, 1)]), level="O1", methods=(), verbosity=0)
    error = RuntimeError("expected m1 and m2 to have the same dtype")
    explain_forward(error, net, torch.float16, casts=False)
    assert "Own runs at torch.float16: this code has no way in that dtype" in str(error)
    assert "keep_fp32=[...] with a module of its own for that code" in str(error).lower()


MADE: dict[str, Callable[[Any], Any]] = {
    "float": lambda copied: copied.float(),
    "half": lambda copied: copied.half(),
    "bfloat16": lambda copied: copied.bfloat16(),
    "double": lambda copied: copied.double(),
    "a part": lambda copied: copied.requires_grad_(False).first.float() and copied,
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("level", CAST)
def test_a_copy_that_was_cast_is_told_of_a_cure_that_a_copy_can_follow(level: str, name: str) -> None:
    net: Any = Net()
    xamp.initialize(net, level=level, verbosity=0)
    copied = MADE[name](copy.deepcopy(net))
    if copied.first.weight.dtype is net.first.weight.dtype:
        assert copied(torch.ones(2, 6)).dtype is torch.float32
        return
    with pytest.raises(RuntimeError) as caught:
        copied(torch.ones(2, 6))
    said = str(caught.value)
    assert f"first.weight is {copied.first.weight.dtype}, and this copy of a managed model is under its policy" in said
    assert "session" not in said, "a copy has none"
    plain = pickle.loads(pickle.dumps(copied))
    assert plain(torch.ones(2, 6, dtype=plain.first.weight.dtype)).dtype is plain.first.weight.dtype
    assert copy.deepcopy(net)(torch.ones(2, 6)).dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
def test_weights_of_another_dtype_for_functional_call(level: str) -> None:
    net: Any = Net()
    xamp.initialize(net, level=level, verbosity=0)
    lower, weights = net.first.weight.dtype, {name: p.detach().float() for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match=f"Give functional_call weights of {lower}"):
        torch.func.functional_call(net, weights, (torch.ones(2, 6),))
    lowered = {name: value.to(lower) for name, value in weights.items()}
    assert torch.func.functional_call(net, lowered, (torch.ones(2, 6),)).dtype is torch.float32


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_float64_weights_where_operators_are_cast(level: str) -> None:
    net: Any = Net()
    xamp.initialize(net, level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"float64 is cast by no rule\. Cast it to torch.float32"):
        net.double()(torch.ones(2, 6))
    assert net.float()(torch.ones(2, 6)).dtype is torch.float32


OTHERS: dict[str, Exception] = {
    "labels": RuntimeError("expected scalar type Long but found Half"),
    "a target": RuntimeError("expected target dtype to be Long or Byte, but got Int"),
    "indices": RuntimeError("index_select(): Expected dtype int32 or int64 for index"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied, of dtype Half"),
    "an attribute": AttributeError("'Tensor' has no attribute 'dtypes'"),
    "xamp's own": xamp.StateError("float16"),
    "something else": RuntimeError("no"),
    "an assert of something else": AssertionError(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_errors_are_left_alone(name: str) -> None:
    def fails(_: object) -> None:
        raise OTHERS[name]

    for level in LOWERING:
        error = trained(fails, level)
        assert error is not None
        assert "xamp:" not in said_by(error)


def test_nothing_is_told_where_nothing_is_lowered() -> None:
    error = RuntimeError("expected dtype Half")
    explain_forward(error, Net(), None, casts=False)
    explain_forward(error, Net(), torch.float32, casts=False)
    explain_backward(error, None, "O0")
    assert str(error) == "expected dtype Half"


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_in_the_block_that_is_of_no_backward_is_left_alone(level: str) -> None:
    net: Any = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    xamp.initialize(net, optimizer, level=level, verbosity=0)
    with pytest.raises(RuntimeError) as caught, xamp.scale_loss(net(torch.ones(4, 6)).sum(), optimizer):
        torch.ones(2, 2).half() @ torch.ones(2, 2)
    assert "xamp" not in str(caught.value)


def test_a_forward_within_the_block_is_told_once() -> None:
    net: Any = Net(RUN["a determinant"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    xamp.initialize(net, optimizer, level="O2", verbosity=0)
    with pytest.raises(RuntimeError) as caught, xamp.scale_loss(torch.ones(()), optimizer):
        net(torch.ones(4, 6))
    assert str(caught.value).count("xamp: ") == 1
    assert "own of Net" in str(caught.value)
