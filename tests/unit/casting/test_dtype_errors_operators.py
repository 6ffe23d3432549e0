"""Whatever raises where fp32 meets low-precision parameters, in whatever words, is explained, and its place named.

Covers: xamp.casting.dtype_errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gathering import cases
from lanes import Lane
from managed_models import start
from torch import nn

from xamp.policy import levels_where

CAST = levels_where(lambda row: row.casts_parameters)

MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "layer_norm": (lambda: nn.LayerNorm(8), lambda part, x: part(x)),
    "group_norm": (lambda: nn.GroupNorm(2, 8), lambda part, x: part(x)),
    "instance_norm": (lambda: nn.InstanceNorm1d(8, affine=True), lambda part, x: part(x[..., None].expand(-1, -1, 4))),
    "prelu": (nn.PReLU, lambda part, x: part(x)),
    "gru": (lambda: nn.GRU(8, 8), lambda part, x: part(x)),
    "lstm": (lambda: nn.LSTM(8, 8, batch_first=True), lambda part, x: part(x[:, None])),
    "rnn": (lambda: nn.RNN(8, 8), lambda part, x: part(x)),
    "lstm_state": (lambda: nn.LSTM(8, 8), lambda part, x: part(x.to(part.weight_hh_l0.dtype), (x[:1], x[:1]))),
    "gru_cell": (lambda: nn.GRUCell(8, 8), lambda part, x: part(x)),
    "linear": (lambda: nn.Linear(8, 8), lambda part, x: part(x)),
    "bilinear": (lambda: nn.Bilinear(8, 8, 8), lambda part, x: part(x, x)),
    "conv1d": (lambda: nn.Conv1d(8, 8, 1), lambda part, x: part(x[..., None])),
    "conv2d": (lambda: nn.Conv2d(8, 8, 1), lambda part, x: part(x[..., None, None])),
    "conv_transpose": (lambda: nn.ConvTranspose1d(8, 8, 1), lambda part, x: part(x[..., None])),
    "attention": (lambda: nn.MultiheadAttention(8, 2), lambda part, x: part(x, x, x)),
    "attention_of_two": (
        lambda: nn.MultiheadAttention(8, 2),
        lambda part, x: part(x, x.to(part.in_proj_weight.dtype), x),
    ),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(8, 2, 8), lambda part, x: part(x[:, None])),
    "embedding_bag": (
        lambda: nn.EmbeddingBag(8, 8, mode="sum"),
        lambda part, x: part(torch.zeros(4, 8, dtype=torch.long, device=x.device), per_sample_weights=x),
    ),
    "sequential": (lambda: nn.Sequential(nn.ReLU(), nn.Sequential(nn.LayerNorm(8))), lambda part, x: part(x)),
    "batch_norm": (lambda: nn.BatchNorm1d(8), lambda part, x: part(x)),
}

OPERATORS: dict[str, Callable[..., Any]] = {
    "scatter_add_": lambda x, y, at: x.clone().scatter_add_(1, at, y),
    "scatter_add": lambda x, y, at: torch.scatter_add(x, 1, at, y),
    "scatter": lambda x, y, at: x.scatter(1, at, y),
    "scatter_reduce": lambda x, y, at: x.scatter_reduce(1, at, y, "sum"),
    "index_add": lambda x, y, at: x.index_add(0, at[0, :4], y),
    "index_copy": lambda x, y, at: x.index_copy(0, at[0, :4], y),
    "index_reduce": lambda x, y, at: x.index_reduce(0, at[0, :4], y, "amax"),
    "scatter_add_ into what is made there": lambda x, y, at: torch.zeros_like(x).scatter_add_(1, at, y.detach()),
    "index_add_ into what is made there": lambda x, y, at: y.new_zeros(4, 8, dtype=x.dtype).index_add_(0, at[0, :4], y),
    "matmul": lambda x, y, at: x @ y.T,
    "torch.matmul": lambda x, y, at: torch.matmul(x, y.T),
    "mm": lambda x, y, at: torch.mm(x, y.T),
    "bmm": lambda x, y, at: torch.bmm(x[None], y.T[None]),
    "addmm": lambda x, y, at: torch.addmm(x[:, :4], y, y.T),
    "baddbmm": lambda x, y, at: torch.baddbmm(x[None, :, :4], y[None], y.T[None]),
    "dot": lambda x, y, at: torch.dot(x[0], y[0]),
    "einsum": lambda x, y, at: torch.einsum("ij,kj->ik", x, y),
    "lerp": lambda x, y, at: torch.lerp(x, y, 0.5),
    "masked_scatter": lambda x, y, at: x.masked_scatter(x > 0, y),
    "put": lambda x, y, at: x.put(at[0, :4], y[0, :4]),
    "attention": lambda x, y, at: nn.functional.scaled_dot_product_attention(x[None], y[None], y[None]),
    "linear": lambda x, y, at: nn.functional.linear(x, y),
    "grid_sample": lambda x, y, at: nn.functional.grid_sample(x[None, None], y[None, :, :2, None].expand(1, 4, 2, 2)),
    "searchsorted": lambda x, y, at: torch.searchsorted(x, y),
    "cdist": lambda x, y, at: torch.cdist(x, y),
}


class Part(nn.Module):
    """Runs ``use`` on fp32, within itself, so that its name is the one to be found."""

    def __init__(self, inner: nn.Module, use: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.use = use

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self.inner, x.float())


class Operator(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, y: torch.Tensor) -> Any:
        x = torch.ones(y.shape, device=y.device)
        at = torch.zeros(y.shape, dtype=torch.long, device=y.device)
        return self.run(x, y, at)


class Put(nn.Module):
    """Writes into a part of a tensor."""

    def forward(self, y: torch.Tensor) -> Any:
        table = torch.zeros(8, 8, device=y.device)
        at = torch.arange(4, device=y.device)
        table[at, :] = y
        return table


class Whole(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([part])

    def forward(self, x: torch.Tensor) -> Any:
        return self.blocks[0](self.first(x))


def error_of(call: Callable[[], Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return error
    return None


def lowered_by_hand(part: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What plain torch does with the same dtypes tells whether this device takes them."""
    return Whole(part).to(dtype)


@pytest.mark.parametrize("level", CAST)
def test_each_module_and_operator_that_raises_is_explained(level: str, lane: Lane) -> None:
    made: dict[str, tuple[Callable[[], nn.Module], str]] = {
        **{name: ((lambda m=m, u=u: Part(m(), u)), "blocks.0.inner") for name, (m, u) in MODULES.items()},  # type: ignore[misc]
        **{f"{name}()": ((lambda run=run: Operator(run)), "blocks.0") for name, run in OPERATORS.items()},  # type: ignore[misc]
        "put": (Put, "blocks.0"),
    }
    raised = 0
    x = torch.ones(4, 8, device=lane.device)
    with cases() as case:
        for name, (make, place) in made.items():
            with case(name):
                managed = start(Whole(make()).to(lane.device), level, lane)
                dtype = managed.first.weight.dtype
                plain = lowered_by_hand(make(), dtype).to(lane.device)
                if name == "batch_norm" and level != "O3":
                    plain.get_submodule("blocks.0").float()  # as these levels keep it
                expected = error_of(lambda m=plain, d=dtype: m(x.to(d)))  # type: ignore[misc]
                found = error_of(lambda m=managed: m(x))  # type: ignore[misc]
                assert type(found) is type(expected), f"{name}: {found!r} in place of {expected!r}"
                if found is None:
                    continue
                raised += 1
                said = str(found)
                assert said.count("\nxamp: ") == 1, f"{name}: {said}"
                assert f"\nxamp: {place}" in said, f"{name}: {said}"
    assert raised >= 25


WRONG: dict[str, Callable[..., Any]] = {
    "shapes of a product": lambda x, y, at: x @ y.float(),
    "shapes of a sum": lambda x, y, at: x + y[:, :3],
    "sizes of lists": lambda x, y, at: torch.cat([x, y[:, :3]]),
    "an index": lambda x, y, at: torch.index_select(x, 0, at[0] + 100),
    "a view": lambda x, y, at: (x + y).view(3, 5),
    "a key": lambda x, y, at: {"x": x, "y": y}["z"],
    "an attribute": lambda x, y, at: torch.add(x, y).nowhere,  # type: ignore[attr-defined]
    "no number": lambda x, y, at: int(torch.mul(x, y)),
    "indices of floats": lambda x, y, at: torch.index_select(y, 0, y[0]),
}


@pytest.mark.parametrize("level", CAST)
def test_other_errors_beside_mixed_dtypes_are_left_alone(level: str, lane: Lane) -> None:
    x = torch.ones(4, 8, device=lane.device)
    with cases() as case:
        for name, run in WRONG.items():
            with case(name):
                model = start(Whole(Operator(run)).to(lane.device), level, lane)
                found = error_of(lambda m=model: m(x))  # type: ignore[misc]
                assert found is not None, name
                assert "xamp" not in str(found), f"{name}: {found}"


class Refused(Exception):
    """An error of somebody's, which makes its text by itself."""

    def __init__(self, code: int) -> None:
        super().__init__(code, "refused")

    def __str__(self) -> str:
        return "dtypes differ"


def refuse(x: Any, y: Any, at: Any) -> Any:
    if x.dtype != y.dtype:
        raise Refused(3)


def assert_same(x: Any, y: Any, at: Any) -> Any:
    assert x.dtype == y.dtype


def type_error(x: Any, y: Any, at: Any) -> Any:
    raise TypeError(f"need one dtype, not {x.dtype} and {y.dtype}")


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("run", [refuse, assert_same, type_error])
def test_errors_that_others_raise_are_explained_too(run: Any, level: str, lane: Lane) -> None:
    found = error_of(
        lambda: start(Whole(Operator(run)).to(lane.device), level, lane)(torch.ones(4, 8, device=lane.device))
    )
    assert found is not None
    said = "\n".join([str(found), *getattr(found, "__notes__", ())])
    if not hasattr(found, "add_note") and isinstance(found, Refused):  # Python 3.10 has nowhere to put it
        return
    assert "which the model makes itself" in said
    assert "blocks.0 of Whole, a Operator, runs at torch." in said


@pytest.mark.parametrize("level", CAST)
def test_a_shape_that_is_wrong_in_a_kept_batch_norm_is_not_laid_on_dtypes(level: str, lane: Lane) -> None:
    model = start(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(8)).to(lane.device), level, lane)
    found = error_of(lambda: model(torch.ones(4, 8, device=lane.device)))
    assert found is not None
    assert "xamp" not in str(found)
