"""What Apex's O1 casts, by raw calls outside of any model: lowered, lifted, matched, promoted, refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, casts
from torch import nn

Expression = Callable[[torch.Tensor], torch.Tensor]

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
image = torch.linspace(-1.0, 1.0, 2 * 4 * 36).reshape(2, 4, 6, 6)
linear, convolution = nn.Linear(4, 4), nn.Conv2d(4, 4, 3)
norm, batch_norm = nn.GroupNorm(2, 4), nn.BatchNorm2d(4)

LOWERED: dict[str, tuple[torch.Tensor, Expression]] = {
    "nn.Linear": (square, linear),
    "F.linear": (square, lambda x: F.linear(x, linear.weight, linear.bias)),
    "nn.Conv2d": (image, convolution),
    "F.conv2d": (image, lambda x: F.conv2d(x, convolution.weight, convolution.bias)),
    "method matmul, left": (square, lambda x: x.matmul(square)),
    "method matmul, right": (square, lambda x: square.matmul(x)),
    "@, left": (square, lambda x: x @ square),
    "@, right": (square, lambda x: square @ x),
}
LIFTED: dict[str, tuple[torch.Tensor, Expression]] = {
    "nn.Softmax": (square, nn.Softmax(dim=1)),
    "F.softmax": (square, lambda x: F.softmax(x, dim=1)),
    "nn.GroupNorm": (image, norm),
    "nn.MSELoss": (square, lambda x: nn.MSELoss()(x, square)),
    "F.mse_loss": (square, lambda x: F.mse_loss(x, target=square)),
    "method pow": (square, lambda x: x.pow(2.0)),
    "**": (square, lambda x: x**2.0),
    "method cpu": (square, lambda x: x.cpu()),
    "method sum": (square, lambda x: x.sum()),
}
MATCHED: dict[str, tuple[torch.Tensor, Expression]] = {
    "nn.ReLU": (square, nn.ReLU()),
    "F.relu": (square, F.relu),
    "nn.BatchNorm2d": (image, batch_norm),
    "batch norm in evaluation": (image, lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=False)),
}
GIVEN = [(FP16, FP16), (FP16, FP32), (BF16, BF16), (BF16, FP32)]  # patch type, input
each_input = pytest.mark.parametrize(("lower", "given"), GIVEN, ids=lambda dtype: str(dtype).removeprefix("torch."))


def _check(data: torch.Tensor, expression: Expression, given: torch.dtype, wanted: torch.dtype) -> None:
    """The result's dtype, and a gradient in the input's."""
    x = data.clone().to(given).requires_grad_()
    y = expression(x)
    assert y.dtype is wanted
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is given


@each_input
@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name: str, lower: torch.dtype, given: torch.dtype) -> None:
    with casts(lower):
        _check(*LOWERED[name], given, lower)


@each_input
@pytest.mark.parametrize("name", LIFTED)
def test_lifted(name: str, lower: torch.dtype, given: torch.dtype) -> None:
    with casts(lower):
        _check(*LIFTED[name], given, FP32)


@pytest.mark.parametrize("name", LIFTED)
def test_lifted_whatever_the_lower_dtype_is(name: str) -> None:
    for lower, given in ((FP16, BF16), (BF16, FP16)):
        with casts(lower):
            _check(*LIFTED[name], given, FP32)


@each_input
@pytest.mark.parametrize("name", MATCHED)
def test_matched(name: str, lower: torch.dtype, given: torch.dtype) -> None:
    with casts(lower):
        _check(*MATCHED[name], given, given)


# ---------------------------------------------------------------- promotion

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PROMOTED: dict[str, Binary] = {
    "torch.atan2": torch.Tensor.atan2,
    "method atan2": lambda x, y: x.atan2(y),
    "torch.mul": lambda x, y: torch.mul(x, y),
    "method mul": lambda x, y: x.mul(y),
    "+": lambda x, y: x + y,
}


@pytest.mark.parametrize("lower", [FP16, BF16])
@pytest.mark.parametrize("name", ["torch.atan2", "method atan2", "torch.mul", "method mul", "+"])
def test_promoted_to_the_widest(name: str, lower: torch.dtype) -> None:
    expression: Binary = {**PROMOTED, "torch.atan2": lambda x, y: torch.atan2(x, y)}[name]
    for first in (lower, FP32):
        for second in (lower, FP32):
            with casts(lower):
                wanted = FP32 if FP32 in (first, second) else lower
                _check(square, lambda x, second=second: expression(x, square.to(second)), first, wanted)  # type: ignore[misc]


def test_a_tensor_without_dimensions_promotes() -> None:
    with casts():
        assert (square.half() * torch.tensor(2.0)).dtype is FP32
    assert (square.half() * torch.tensor(2.0)).dtype is FP16


@pytest.mark.parametrize("lower", [FP16, BF16])
@pytest.mark.parametrize("join", ["cat", "stack"])
def test_a_sequence_is_promoted(join: str, lower: torch.dtype) -> None:
    lowered = [torch.ones(3).to(lower) for _ in range(5)]
    with casts(lower):
        made = getattr(torch, join)
        assert made([*lowered, torch.ones(3)]).dtype is FP32
        assert made((*lowered, torch.ones(3))).dtype is FP32
        assert made(lowered).dtype is lower
        assert made(tensors=[*lowered, torch.ones(3)]).dtype is FP32


@pytest.mark.parametrize("lower", [FP16, BF16])
def test_in_place_keeps_the_dtype_of_what_is_written(lower: torch.dtype) -> None:
    for first in (lower, FP32):
        for second in (lower, FP32):
            with casts(lower):
                _check(square, lambda x, second=second: x.clone().add_(square.to(second)), first, first)  # type: ignore[misc]


def test_an_augmented_assignment_rebinds() -> None:
    """The operator is listed as one that promotes; the method is not."""
    with casts():
        x = before = square.half()
        x += square
        assert x.dtype is FP32
        assert x is not before
        assert before.dtype is FP16


def test_what_cannot_be_promoted() -> None:
    with casts(), pytest.raises(NotImplementedError) as caught:
        square.half() + square.bfloat16()
    assert str(caught.value) == ("Do not know how to handle these types to promote: {'BFloat16Tensor', 'HalfTensor'}")


# ---------------------------------------------------------------- refused

REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "method": (lambda x: x.exp_(), "Cannot call in-place method exp_ on fp16 Tensors."),
    "method with an argument": (lambda x: x.pow_(2), "Cannot call in-place method pow_ on fp16 Tensors."),
    "function": (lambda x: torch.exp_(x), "Cannot call in-place function exp_ with fp16 arguments."),
}
REFUSED_BF16 = {
    "method": "Cannot call in-place method exp_ with fp16 or bfloat16 args.",
    "method with an argument": "Cannot call in-place method pow_ with fp16 or bfloat16 args.",
    "function": "Cannot call in-place function exp_ with fp16 or bfloat16 args.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_place(name: str) -> None:
    call, message = REFUSED[name]
    with casts():
        assert call(square.clone()).dtype is FP32
        with pytest.raises(NotImplementedError) as caught:
            call(square.half())
    assert str(caught.value) == message
    assert call(square.half()).dtype is FP16


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_place_in_rocms_words(name: str) -> None:
    for given in (FP16, BF16):
        with casts(BF16), pytest.raises(NotImplementedError) as caught:
            REFUSED[name][0](square.to(given))
        assert str(caught.value) == REFUSED_BF16[name]


@each_input
def test_binary_cross_entropy_is_banned(lower: torch.dtype, given: torch.dtype) -> None:
    share, target = torch.full((4,), 0.25), torch.ones(4)
    for loss in (nn.BCELoss(), lambda x, y: F.binary_cross_entropy(x, target=y)):
        with casts(lower):
            if given is FP32:
                assert loss(share, target).dtype is FP32
            else:
                with pytest.raises(
                    NotImplementedError, match=r"amp does not work out-of-the-box with `F\.binary_cross_entropy`"
                ):
                    loss(share.to(given), target)
        with casts(lower, allow_banned=True):
            assert loss(share.to(given), target).dtype is FP32


# ---------------------------------------------------------------- recurrent modules

CELLS = {"RNN": nn.RNNCell, "GRU": nn.GRUCell, "LSTM": nn.LSTMCell}
RNNS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


@pytest.mark.parametrize("given", [FP16, FP32])
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_lowered(name: str, given: torch.dtype) -> None:
    cell, x = CELLS[name](4, 4), torch.ones(3, 4, dtype=given, requires_grad=True)
    state: Any = torch.zeros(3, 4, dtype=given)
    with casts():
        hidden = cell(x, (state, state) if name == "LSTM" else state)
        hidden = cell(x, hidden)
    output = hidden[0] if name == "LSTM" else hidden
    assert output.dtype is FP16
    output.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is given


@pytest.mark.parametrize("given", [FP16, FP32])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", RNNS)
def test_recurrent_modules_are_lowered(name: str, layers: int, both_ways: bool, given: torch.dtype) -> None:
    rnn = RNNS[name](4, 4, num_layers=layers, bidirectional=both_ways)
    x = torch.ones(5, 3, 4, dtype=given, requires_grad=True)
    state: Any = torch.zeros(layers * (1 + both_ways), 3, 4, dtype=given)
    with casts():
        output, _ = rnn(x, (state, state) if name == "LSTM" else state)
    assert output.dtype is FP16
    output[-1].float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is given
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in rnn.parameters())


@pytest.mark.parametrize("given", [FP16, FP32])
def test_a_packed_sequence_is_lowered(given: torch.dtype) -> None:
    rnn, x = nn.RNN(4, 4, num_layers=2), torch.ones(5, 3, 4, dtype=given, requires_grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    with casts():
        output, _ = rnn(packed, torch.zeros(2, 3, 4, dtype=given))
    assert output.data.dtype is FP16
    output.data.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is given


def test_shapes_of_recurrent_inputs_are_still_checked() -> None:
    with casts(), pytest.raises(RuntimeError, match="must be equal to input_size"):
        nn.LSTM(4, 4)(torch.ones(5, 3, 7).half())


def test_values_are_those_of_casts_by_hand() -> None:
    with casts():
        made = linear(square)
    assert torch.equal(made, F.linear(square.half(), linear.weight.half(), linear.bias.half()))


# ---------------------------------------------------------------- threads


def test_every_thread_casts() -> None:
    """Also one that ran before the casts were installed, and autograd's."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(torch.mm(grad, grad).dtype)
            return grad

    seen: list[torch.dtype] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with casts():
            seen.append(pool.submit(lambda: torch.mm(square, square).dtype).result())
            thread = threading.Thread(target=lambda: seen.append((square @ square).dtype))
            thread.start()
            thread.join()
            Product.apply(square.clone().requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
        assert pool.submit(lambda: torch.mm(square, square).dtype).result() is FP32
    assert seen == [FP16] * 3


def test_the_device_makes_no_difference() -> None:
    x = torch.ones(2, 2, device="meta")
    with casts():
        assert torch.mm(x, x).dtype is FP16
        assert x.half().sum().dtype is FP32
