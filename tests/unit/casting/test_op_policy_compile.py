"""torch.compile under the portable op policy: the dtypes and values of eager, and nothing for other code.

Covers: xamp.casting.ops.portable, xamp.casting.region.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table_ops import BF16, FP32, LOWER, assert_equal, batch, gradients, many, start
from torch import nn

import xamp

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated"),  # inductor imports what uses it
]

NO_COMPILER = shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang++") is None
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor", marks=[pytest.mark.slow, pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler")]
    ),
]
each_backend = pytest.mark.parametrize("compiler", BACKENDS)


class Dtypes(nn.Module):
    """Returns what operators of each rule give of a lower tensor, as it is."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.to(BF16)
        return (
            torch.mv(x, x[0, :8]),
            F.softmax(y, -1),
            F.layer_norm(y, (8,)),
            torch.einsum("ij,kj->ik", x, x),
            y.exp(),
            y.sum(-1),
            torch.addcmul(y, x, y),
            F.scaled_dot_product_attention(x[None], x[None], x[None]),
            y.norm(),
            torch.linalg.vector_norm(y, dim=-1),
            torch.cdist(y, y),
            F.mse_loss(y, y * 2),
        )


GIVEN = (BF16, FP32, FP32, BF16, FP32, FP32, FP32, BF16, FP32, FP32, FP32, FP32)


def compiled(function: Any, compiler: str) -> Any:
    return torch.compile(function, backend=compiler, fullgraph=True)


def dtypes(results: Any) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in results)


@each_backend
def test_dtypes_are_those_of_eager(compiler: str) -> None:
    model = start(Dtypes(), cast_model_outputs=False)
    x = batch().detach()
    eager = model(x)
    assert dtypes(eager) == GIVEN
    made = compiled(model, compiler)(x)
    assert dtypes(made) == GIVEN
    for a, b in zip(made, eager, strict=True):
        # Where inductor fuses, it keeps digits that eager rounds away: as it does under torch.autocast.
        assert (a - b).float().norm() <= (0.02 if compiler == "inductor" else 1e-6) * b.float().norm()


@each_backend
@pytest.mark.parametrize("level", LOWER)
def test_a_compiled_model_trains_as_the_eager_one(level: str, compiler: str) -> None:
    found = []
    for compiles in (False, True):
        model, x = many(noting=False), batch()
        start(model, level)
        run: Any = compiled(model, compiler) if compiles else model
        out = run(x)
        assert out.dtype == FP32
        torch.autograd.backward(out.square().mean())
        found.append([out.detach(), *gradients(model, x)])
    eager, other = found
    for a, b in zip(other, eager, strict=True):
        assert a.dtype == b.dtype
        if compiler == "eager":
            assert torch.equal(a, b)
        assert (a - b).norm() <= 0.05 * b.norm()


def softmax_and_mv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.softmax(x.to(BF16), -1), torch.mv(x, x[0, :8])


@each_backend
@pytest.mark.parametrize("foreign_first", [True, False])
def test_one_compiled_function_serves_portable_native_and_foreign_callers(compiler: str, foreign_first: bool) -> None:
    function = compiled(softmax_and_mv, compiler)
    wanted = {"portable": (FP32, BF16), "native": (BF16, FP32), "foreign": (BF16, FP32)}
    with torch.autocast("cpu", dtype=BF16):
        assert dtypes(softmax_and_mv(batch().detach())) == wanted["foreign"]

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return function(x)

    managed = {name: start(Net(), op_policy=name, cast_model_outputs=False) for name in ("portable", "native")}

    def foreign(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            return function(x)

    x = batch().detach()
    order = ["foreign", "portable", "native"] if foreign_first else ["portable", "native", "foreign"]
    for name in order * 2:
        call: Callable[..., Any] = foreign if name == "foreign" else managed[name]
        assert dtypes(call(x)) == wanted[name], name


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return *softmax_and_mv(x), *self.inner(x), *softmax_and_mv(x)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return softmax_and_mv(x)


@each_backend
@pytest.mark.parametrize("outer", ["portable", "native"])
def test_a_model_of_one_policy_within_one_of_the_other(outer: str, compiler: str) -> None:
    inner = start(Softmax(), op_policy="native" if outer == "portable" else "portable", cast_model_outputs=False)
    model = start(Nested(inner), op_policy=outer, cast_model_outputs=False)
    x = batch().detach()
    eager = model(x)
    assert dtypes(eager)[0] != dtypes(eager)[2]
    assert dtypes(compiled(model, compiler)(x)) == dtypes(eager)


@each_backend
def test_a_compiled_model_called_within_a_region_of_the_other_policy(compiler: str) -> None:
    x = batch().detach()
    model = start(Softmax(), cast_model_outputs=False)
    native = start(Softmax(), op_policy="native", cast_model_outputs=False)
    wanted = dtypes(model(x)), dtypes(native(x))
    assert wanted[0] != wanted[1]
    regions = [xamp.session(one).autocast() for one in (model, native)]
    mine, other = compiled(model, compiler), compiled(native, compiler)
    for around in regions:
        with around:
            assert (dtypes(mine(x)), dtypes(other(x))) == wanted


@each_backend
def test_blocks_of_autocast_within_the_compiled_model(compiler: str) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", enabled=False):
                off = F.softmax(x.to(BF16), -1)
            with torch.autocast("cpu", dtype=torch.float16):
                half = torch.mv(x, x[0, :8])
            with xamp.disable_casts():
                disabled = F.softmax(x.to(BF16), -1)
            return off, half, disabled, F.softmax(x.to(BF16), -1)

    model = start(Net(), cast_model_outputs=False)
    x = batch().detach()
    wanted = (BF16, torch.float16, BF16, FP32)
    assert dtypes(model(x)) == wanted
    assert dtypes(compiled(model, compiler)(x)) == wanted


@each_backend
def test_the_block_of_a_session(compiler: str) -> None:
    session = xamp.session(start(nn.Linear(1, 1)))

    def function(x: torch.Tensor) -> Any:
        with session.autocast():
            return softmax_and_mv(x)

    x = batch().detach()
    assert dtypes(compiled(function, compiler)(x)) == dtypes(function(x)) == (FP32, BF16)


def test_an_exported_program_computes_as_the_model_does() -> None:
    model = start(Dtypes(), cast_model_outputs=False)
    x = batch().detach()
    exported = torch.export.export(model, (x,)).module()
    assert dtypes(exported(x)) == GIVEN
    assert_equal(exported(x), model(x))
