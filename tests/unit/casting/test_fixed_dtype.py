"""Recurrent layers on a device whose autocast casts them to fp16 in any region: xamp's regions cast to their own dtype.

The device is the CPU, as :mod:`half_layers` makes it one. The reference is a copy of the layer in bf16.

Covers: xamp.casting.ops.fixed_dtype, xamp.casting.ops.layers, xamp.casting.features_in_use,
xamp.sessions.lowering.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import compiling
import half_layers
import pytest
import torch
from mutants import registered
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting.features_in_use import needs
from xamp.contract import RecurrentLayer
from xamp.op_dtypes.survey import survey

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": functools.partial(nn.RNN, nonlinearity="relu"),
    "projected": functools.partial(nn.LSTM, proj_size=3),
    "without bias": functools.partial(nn.GRU, bias=False),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
each_policy = pytest.mark.parametrize("op_policy", ["portable", "native"])


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XAMP_BACKEND", "mutant")
    monkeypatch.setattr(needs, "marks", False)  # as in a process where nobody has asked for them yet
    with registered("half_layers:HalfLayers")(), half_layers.half_layers():
        yield


def layer(make: Callable[..., Any] = nn.LSTM) -> Any:
    torch.manual_seed(1)
    return make(8, 4, num_layers=2, bidirectional=True)


def managed(model: Any, level: str = "O4", **options: Any) -> Any:
    xamp.initialize(model, level=level, cast_model_outputs=False, verbosity=0, **options)
    return model


def series(dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(2)).to(dtype)


def packed(dtype: torch.dtype = FP32) -> PackedSequence:
    return pack_padded_sequence(series(dtype), torch.tensor([5, 4, 1]))


def state(model: Any, dtype: torch.dtype = FP32) -> Any:
    hidden = torch.randn(4, 3, getattr(model, "proj_size", 0) or 4, generator=torch.Generator().manual_seed(3)).to(
        dtype
    )
    cell = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(4)).to(dtype)
    return (hidden, cell) if model.mode == "LSTM" else hidden


def tensors(made: Any) -> list[torch.Tensor]:
    """The outputs and the states."""
    out, states = made
    return [out.data if isinstance(out, PackedSequence) else out, *(states if isinstance(states, tuple) else [states])]


def grads(model: Any, made: Any) -> list[torch.Tensor]:
    params = list(model.parameters())
    found = torch.autograd.grad([each.float().square().sum() for each in tensors(made)], params)
    assert [grad.dtype for grad in found] == [param.dtype for param in params]
    return [grad.float() for grad in found]


def by_hand(model: Any, *args: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What a copy in bf16 gives, and the gradients of its weights."""
    lowered = copy.deepcopy(model).bfloat16()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights")
        made = lowered(*args)
    return tensors(made), grads(lowered, made)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.drawn(16)
@each_policy
@pytest.mark.parametrize("given", [False, True], ids=["no state", "state in fp32"])
@pytest.mark.parametrize("form", [series, packed], ids=["series", "packed"])
@each_layer
def test_they_run_in_bf16_and_their_gradients_reach_the_weights(
    make: Any, form: Any, given: bool, op_policy: str
) -> None:
    model = layer(make)
    wanted = by_hand(model, form(BF16), *([state(model, BF16)] if given else []))
    managed(model, op_policy=op_policy)
    half_layers.calls.clear()
    made = model(form(), *([state(model)] if given else []))
    assert half_layers.calls == [(BF16, {BF16}, True)]
    found = grads(model, made)
    assert equal(tensors(made), wanted[0])
    assert equal(found, wanted[1])
    name = model.mode.lower()
    assert half_layers.joined == [RecurrentLayer(name, 8, 4, model.proj_size, 2, model.bias, bidirectional=True)]


@each_policy
@each_layer
def test_at_o1_every_bit_is_that_of_torch(make: Any, op_policy: str) -> None:
    model = layer(make)
    with torch.autocast("cpu", dtype=HALF):
        plain = model(series())
    wanted = tensors(plain), grads(model, plain)
    managed(model, "O1", op_policy=op_policy)
    half_layers.calls.clear()
    made = model(series())
    assert half_layers.calls == [(HALF, {HALF}, False)]
    assert equal(tensors(made), wanted[0])
    assert equal(grads(model, made), wanted[1])


@pytest.mark.parametrize("around", ["xamp.autocast", "portable", "native"])
def test_blocks_cast_as_models_do(around: str) -> None:
    model, held = layer(), nn.Linear(1, 1)
    wanted, _ = by_hand(model, series(BF16))
    if around == "xamp.autocast":
        block: Any = xamp.autocast(dtype=BF16)
    else:
        managed(held, op_policy=around)
        block = xamp.session(held).autocast()
    with block:
        assert equal(tensors(model(series())), wanted)
    with torch.no_grad(), block:
        assert equal(tensors(model(series())), wanted)
    with torch.inference_mode(), block:
        assert equal(tensors(model(series())), wanted)


@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_torch_autocast_by_hand_stays_torchs(dtype: torch.dtype) -> None:
    model = layer()
    with torch.autocast("cpu", dtype=dtype):
        before = tensors(model(series()))
    managed(layer())(series())
    managed(layer(), op_policy="native")(series())
    half_layers.calls.clear()
    with torch.autocast("cpu", dtype=dtype):
        after = tensors(model(series()))
    assert half_layers.calls == [(HALF, {HALF}, False)]
    assert equal(after, before)
    with xamp.autocast(dtype=BF16), xamp.disable_casts(), torch.autocast("cpu", dtype=dtype):
        assert equal(tensors(model(series())), before)
    assert {each.dtype for each in tensors(model(series()))} == {FP32}


def test_a_torch_autocast_inside_a_region_changes_the_dtype() -> None:
    model = layer()
    with xamp.autocast(), torch.autocast("cpu", dtype=BF16):
        assert {each.dtype for each in tensors(model(series()))} == {BF16}
    with xamp.autocast(dtype=BF16), torch.autocast("cpu", enabled=False):
        assert {each.dtype for each in tensors(model(series()))} == {FP32}


def test_fp64_is_not_cast() -> None:
    with xamp.autocast(dtype=BF16):
        assert {each.dtype for each in tensors(layer().double()(series(FP64)))} == {FP64}


@each_policy
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_models_run_them_in_bf16(compiler: str, op_policy: str) -> None:
    compiling.forget()
    model = managed(nn.Sequential(nn.Linear(8, 8), layer()), op_policy=op_policy)
    wanted = tensors(model(series()))
    half_layers.calls.clear()
    compiled: Any = torch.compile(model, backend=compiler)
    made = compiled(series())
    assert half_layers.calls == [(BF16, {BF16}, True)]
    assert equal(tensors(made), wanted)
    grads(model, made)
    compiling.forget()


@each_policy
def test_a_block_that_was_made_outside_of_what_is_compiled(op_policy: str) -> None:
    """It runs eagerly, though the compiler of torch 2.15 could go on within it: that would leave xamp's mark out."""
    compiling.forget()
    held, model = managed(nn.Linear(1, 1), op_policy=op_policy), layer()
    block = xamp.session(held).autocast()

    def run(x: torch.Tensor) -> Any:
        x = x * 2.0
        with block:
            made = model(x * 1.0)
        return made

    def product(x: torch.Tensor) -> Any:
        with block:
            return x @ x.mT

    assert {each.dtype for each in tensors(torch.compile(run, backend="eager")(series()))} == {BF16}
    with pytest.raises(Exception, match=r"autocast\(\): made outside of the function that torch\.compile traces"):
        torch.compile(product, backend="eager", fullgraph=True)(series())
    if op_policy == "native":  # the device casts to this dtype itself, and needs no mark
        block = xamp.session(managed(nn.Linear(1, 1), "O1", op_policy=op_policy)).autocast()
        assert torch.compile(product, backend="eager", fullgraph=True)(series()).dtype is HALF
    compiling.forget()


@pytest.mark.parametrize("reentrant", [False, True])
@each_policy
def test_backward_recomputes_in_the_dtype_of_the_forward(op_policy: str, reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    model = managed(Net(), op_policy=op_policy)
    half_layers.calls.clear()
    made = model(series().requires_grad_())
    grads_of = sum(each.float().square().sum() for each in tensors(made))
    assert isinstance(grads_of, torch.Tensor)
    grads_of.backward()
    assert half_layers.calls == [(BF16, {BF16}, True)] * 2
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in model.parameters())


@each_policy
def test_layers_that_are_kept_run_in_fp32(op_policy: str) -> None:
    for level in ("O4", "O5"):
        model = managed(nn.Sequential(nn.Linear(8, 8), layer()), level, op_policy=op_policy, keep_fp32=(nn.LSTM,))
        half_layers.calls.clear()
        model(series())
        assert [call[:2] for call in half_layers.calls] == [(FP32, {FP32})]


def test_weights_that_are_lowered_are_joined_once() -> None:
    model = layer()
    wanted, _ = by_hand(model, series(BF16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level="O5", cast_model_outputs=False, verbosity=0)
    half_layers.calls.clear()
    made = model(series())
    assert half_layers.calls == [(BF16, {BF16}, True)]
    assert equal(tensors(made), wanted)
    with xamp.scale_loss(tensors(made)[0].float().square().sum(), optimizer) as loss:
        loss.backward()
    optimizer.step()
    changed = tensors(model(series()))
    assert half_layers.calls == [(BF16, {BF16}, True)] * 2
    plain = layer()
    plain.load_state_dict(model.state_dict())
    assert equal(changed, by_hand(plain, series(BF16))[0])
    xamp.session(model).close()
    assert {each.dtype for each in tensors(model(series()))} == {FP32}


def test_weights_that_torch_has_put_together_are_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's are in fp16."""
    by_torch: Any = ["by torch"]

    def flatten(module: Any) -> None:
        with torch.no_grad():
            half_layers.HalfLayers.join_weights_(None, module._flat_weights, by_torch[0])  # type: ignore[arg-type]

    model = layer()
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", flatten)
    managed(model, "O5")
    assert half_layers.joined == by_torch
    model(series())
    assert half_layers.calls == [(BF16, {BF16}, True)]


def test_tied_weights_stay_tied() -> None:
    model = layer()
    model.weight_hh_l1 = model.weight_hh_l0
    managed(model, "O5")
    assert model.weight_hh_l1 is model.weight_hh_l0
    assert len({weight.untyped_storage().data_ptr() for weight in model._flat_weights}) == 15


def test_weights_that_the_caller_lowered_stay_where_they_are() -> None:
    model = layer().bfloat16()
    places = [weight.data_ptr() for weight in model.parameters()]
    with xamp.autocast(dtype=BF16), pytest.warns(UserWarning, match="not part of single contiguous chunk"):
        model(series())
    assert [weight.data_ptr() for weight in model.parameters()] == places


@each_policy
@pytest.mark.parametrize("dtype", [HALF, BF16], ids=str)
def test_a_survey_says_what_the_device_does_and_what_xamp_does(dtype: torch.dtype, op_policy: str) -> None:
    name = str(dtype).removeprefix("torch.")
    rows = {row.overload: row for row in survey("cpu", half_layers.HalfLayers.op_rules, dtype, op_policy).rows}
    for overload in ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_relu.data", "rnn_tanh.input"):
        row = rows[overload]
        assert (row.native, row.added, row.source, row.agrees) == ("float16", "lower", "called", True)
        assert row.results == {"fp32": name, "lower": name, "mixed": name, "named": None}


@each_policy
def test_who_looks_at_the_device_without_rules_leaves_the_regions_as_they_are(op_policy: str) -> None:
    survey("cpu", {}, BF16, "native")
    managed(layer(), op_policy=op_policy)(series())
    assert half_layers.calls[-1] == (BF16, {BF16}, True)
