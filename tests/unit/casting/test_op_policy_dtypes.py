"""The portable op policy at dtypes and layouts that no rule speaks of, or that meet each other; packed sequences.

Covers: xamp.casting.ops.portable, xamp.casting.ops.layers.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table_ops import BF16, FP16, FP32, LOWER, assert_equal, gradients, region
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from xamp.casting.ops.parts import HERE, operator
from xamp.casting.ops.portable import additions
from xamp.casting.ops.table import RULES
from xamp.op_dtypes.observe import Observed, attempt
from xamp.op_dtypes.samples import samples

FP64, FP8 = torch.float64, torch.float8_e4m3fn
OTHER = {FP16: BF16, BF16: FP16}

each_level = pytest.mark.parametrize("level", LOWER)


# ---------------------------------------------------------------- packed sequences


def packed(grad: bool = True) -> tuple[list[torch.Tensor], PackedSequence]:
    made = torch.Generator().manual_seed(5)
    rows = [torch.randn(steps, 8, generator=made).requires_grad_(grad) for steps in (5, 3, 3, 1)]
    return rows, pack_sequence(rows)


@each_level
@pytest.mark.parametrize("ways", [False, True], ids=["forward", "both ways"])
@pytest.mark.parametrize(
    "make",
    [nn.LSTM, nn.GRU, nn.RNN, functools.partial(nn.RNN, nonlinearity="relu")],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_layers_lower_packed_sequences_as_they_lower_tensors(make: Any, ways: bool, level: str) -> None:
    torch.manual_seed(1)
    model = make(8, 4, num_layers=2, bidirectional=ways)
    rows, sequence = packed()
    with region(level):
        out, state = model(sequence)
        alone, _ = model(rows[0].detach()[:, None])
    states = state if isinstance(state, tuple) else (state,)
    assert {out.data.dtype, *(s.dtype for s in states), alone.dtype} == {LOWER[level]}
    padded, lengths = pad_packed_sequence(out)
    assert lengths.tolist() == [5, 3, 3, 1]
    torch.testing.assert_close(padded[:, :1], alone, rtol=0.05, atol=0.05)
    plain, _ = model(packed(grad=False)[1])
    torch.testing.assert_close(out.data.float(), plain.data, rtol=0.05, atol=0.05)
    out.data.float().square().sum().backward()
    found = [*gradients(model, rows[0]), *(row.grad for row in rows)]
    assert {g.dtype for g in found if g is not None} == {FP32}
    assert len(found) == len(list(model.parameters())) + 5


@each_level
def test_a_packed_sequence_in_the_lower_dtype_gets_gradients_in_it(level: str) -> None:
    data = packed(grad=False)[1].data.to(LOWER[level]).requires_grad_()
    sizes = packed(grad=False)[1].batch_sizes
    with region(level):
        out, _ = nn.GRU(8, 4)(PackedSequence(data, sizes))
    out.data.float().sum().backward()
    assert out.data.dtype == LOWER[level]
    assert data.grad is not None
    assert data.grad.dtype == LOWER[level]


def test_packed_sequences_outside_of_regions_are_as_before() -> None:
    model = nn.LSTM(8, 4)
    with region("O4"):
        model(packed()[1])
    assert model(packed()[1])[0].data.dtype == FP32
    with torch.autocast("cpu", dtype=BF16):
        assert model(packed()[1])[0].data.dtype == FP32  # which torch leaves so on a CPU


# ---------------------------------------------------------------- two lower dtypes in one call


def outcome(seen: Observed) -> object:
    """The dtypes of the results, or that the call was refused."""
    assert not seen.unobserved
    return "refused" if seen.error and issubclass(seen.error[0], RuntimeError) else seen.error or set(seen.dtypes)


@each_level
@pytest.mark.parametrize("overload", [name for name, rule in HERE.items() if rule.kind == "promote"])
def test_the_other_lower_dtype_is_promoted_or_refused_as_on_cuda(overload: str, level: str) -> None:
    lower = LOWER[level]
    other = OTHER[lower]
    refused = 0
    for sample in samples(overload):
        for given in (
            *((other,), (other, lower), (lower, other), (FP8,), (lower, FP8)),
            *((FP32, other), (other, FP32), (FP32, other, lower), (lower, other, FP32), (FP32, FP8)),
        ):
            wanted = attempt(sample, "cuda", lower, given, present=False)
            with region(level):
                mine = attempt(sample, "cpu", lower, given, present=True)
            if FP8 in given and not wanted.error:
                continue  # an fp8 tensor beside an fp32 one, which xamp leaves as it is
            assert outcome(mine) == outcome(wanted), (str(sample), given)
            refused += wanted.error is not None
    assert refused >= 5


def test_a_refusal_says_what_to_do() -> None:
    x = torch.ones(3)
    says = r"^dot: got a tensor of torch.bfloat16 in a region that casts to torch.float16, which autocast refuses"
    with region("O1"), pytest.raises(RuntimeError, match=says):
        torch.dot(x.half(), x.bfloat16())
    with region("O1"):
        assert torch.dot(x.half(), x.bfloat16().half()).dtype == FP16
        assert torch.dot(x, x.bfloat16()).dtype == FP32
        assert torch.addcmul(x.half(), x.half(), x.double()).dtype == FP64


# ---------------------------------------------------------------- what no rule casts


def given_to(sample: Any, dtype: torch.dtype) -> Any:
    call = sample.call("cpu", FP32, grad=False)

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        return [change(each) for each in value] if isinstance(value, list) else value

    return lambda: operator(sample.overload)(*map(change, call.args), **call.kwargs)


def answer(function: Any) -> Any:
    """The result, or the class of what is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators of the table are deprecated
        try:
            return function()
        except Exception as error:  # whatever an operator says of a dtype
            return type(error)


@pytest.mark.parametrize("dtype", [FP64, FP8, torch.complex64, torch.int64, torch.bool], ids=str)
def test_what_is_added_casts_none_of_it(dtype: torch.dtype) -> None:
    """Each operator that xamp adds an entry for gives what it gives outside of autocast."""
    compared = 0
    for overload in additions("cpu", {}):
        if overload not in RULES:
            continue  # of the second table: test_unlisted.py
        if RULES[overload].kind == "banned" or (RULES[overload].kind == "promote" and dtype == FP8):
            continue  # refused, as on CUDA
        if dtype == FP8 and overload in ("gru_cell", "lstm_cell"):
            continue  # refused, but for its products, of which torch's own list casts the tensors
        for sample in samples(overload):
            if sample.names_dtype:
                continue
            plain, again = (answer(given_to(sample, dtype)) for _ in range(2))
            with region("O1"):
                mine = answer(given_to(sample, dtype))
            if not _is_alike(plain, again):
                continue  # an operator that leaves memory as it finds it
            assert _is_alike(mine, plain), (str(sample), mine, plain)
            compared += 1
    assert compared > 70


def _is_alike(mine: Any, plain: Any) -> bool:
    if isinstance(mine, tuple) and isinstance(plain, tuple):
        return all(map(_is_alike, mine, plain))
    if not isinstance(mine, torch.Tensor) or not isinstance(plain, torch.Tensor):
        return bool(mine == plain)
    a, b = (t.view(torch.uint8) if t.dtype == FP8 else t.nan_to_num(7.0) for t in (mine, plain))
    return mine.dtype == plain.dtype and torch.equal(a, b)


@each_level
def test_sparse_tensors(level: str) -> None:
    x, weight = torch.eye(3).to_sparse(), torch.ones(3, 3)
    with region(level):
        found = [torch.sparse.sum(x), x.sum(), torch.mv(x, weight[0]), torch.sparse.mm(x, weight), x @ weight]
    assert [t.dtype for t in found] == [FP32, FP32, *[LOWER[level]] * 3]
    assert_equal([found[0], found[1]], [torch.sparse.sum(x), x.sum()])
    for made in found[2:]:
        assert torch.equal(made.float(), torch.ones_like(made.float()))


def test_an_embedding_with_sparse_gradients_trains() -> None:
    layer = nn.Embedding(5, 4, sparse=True)
    with region("O4"):
        made = F.softmax(layer(torch.tensor([1, 3])).bfloat16(), -1).square().sum()
    made.backward()
    assert made.dtype == FP32
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_sparse
