"""What Apex's O1 casts outside of any model: with gradients, and at both patch types.

The dtypes at fp16 of 290 expressions are in test_apex_o1_grid.py, the words of refusals at fp16 in
test_apex_messages.py.

Covers: xamp.apex._casts, xamp.apex._lists, xamp.apex._wrappers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, FP64, casts
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from xamp.apex._functions import half_function

Expression = Callable[[torch.Tensor], torch.Tensor]

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
image = torch.linspace(-1.0, 1.0, 2 * 4 * 36).reshape(2, 4, 6, 6)
series = torch.linspace(-1.0, 1.0, 60).reshape(5, 3, 4)
linear, convolution, batch_norm = nn.Linear(4, 4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


def cell(kind: Any) -> Expression:
    made = kind(4, 4)
    return lambda x: made(x, made(x))


def layers(kind: Any) -> Expression:
    made = kind(4, 4, num_layers=2, bidirectional=True)
    return lambda x: made(x)[0]


def packed(x: torch.Tensor) -> Any:
    return gru(pack_padded_sequence(x, torch.tensor([5, 4, 2])))[0].data


gru, lstm_cell = nn.GRU(4, 4, num_layers=2), nn.LSTMCell(4, 4)

CASES: dict[str, tuple[torch.Tensor, Expression, Any]] = {
    "nn.Linear": (square, linear, "lower"),
    "F.linear": (square, lambda x: F.linear(x, linear.weight, linear.bias), "lower"),
    "nn.Conv2d": (image, convolution, "lower"),
    "method matmul": (square, lambda x: square.matmul(x), "lower"),
    "@, left": (square, lambda x: x @ square, "lower"),
    "@, right": (square, lambda x: square @ x, "lower"),
    **{kind.__name__: (square, cell(kind), "lower") for kind in (nn.RNNCell, nn.GRUCell)},
    "LSTMCell": (square, lambda x: lstm_cell(x, lstm_cell(x))[0], "lower"),
    **{kind.__name__: (series, layers(kind), "lower") for kind in RECURRENT},
    "packed": (series, packed, "lower"),
    "F.softmax": (square, lambda x: F.softmax(x, dim=1), FP32),
    "nn.GroupNorm": (image, nn.GroupNorm(2, 4), FP32),
    "F.mse_loss": (square, lambda x: F.mse_loss(x, target=square), FP32),
    "**": (square, lambda x: x**2.0, FP32),
    "method cpu": (square, lambda x: x.cpu(), FP32),
    "method sum": (square, lambda x: x.sum(), FP32),
    "F.relu": (square, F.relu, "given"),
    "nn.BatchNorm2d": (image, batch_norm, "given"),
    "in place": (square, lambda x: x.clone().add_(square), "given"),
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
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, lower: torch.dtype, given: torch.dtype) -> None:
    data, expression, wanted = CASES[name]
    with casts(lower):
        _check(data, expression, given, {"lower": lower, "given": given}.get(wanted, FP32))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is FP32])
def test_lifted_whatever_the_lower_dtype_is(name: str) -> None:
    for lower, given in ((FP16, BF16), (BF16, FP16)):
        with casts(lower):
            _check(*CASES[name][:2], given, FP32)


@pytest.mark.parametrize("kind", RECURRENT)
def test_weights_of_recurrent_modules_get_gradients(kind: Any) -> None:
    made: Any = kind(4, 4, num_layers=2, bidirectional=True)
    with casts():
        made(series.half())[0][-1].float().sum().backward()
        with pytest.raises(RuntimeError, match="must be equal to input_size"):
            made(torch.ones(5, 3, 7).half())
    assert all(p.grad is not None and p.grad.dtype is FP32 for p in made.parameters())


def test_values_are_those_of_casts_by_hand() -> None:
    with casts():
        made = linear(square)
    assert torch.equal(made, F.linear(square.half(), linear.weight.half(), linear.bias.half()))


# ---------------------------------------------------------------- promotion

PROMOTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "torch.atan2": lambda x, y: torch.atan2(x, y),
    "method mul": lambda x, y: x.mul(y),
    "+": lambda x, y: x + y,
    "torch.cat": lambda x, y: torch.cat([x, x, y]),
    "torch.stack by name": lambda x, y: torch.stack(tensors=(x, y)),
}


@pytest.mark.parametrize("lower", [FP16, BF16])
@pytest.mark.parametrize("name", PROMOTED)
def test_promoted_to_the_widest(name: str, lower: torch.dtype) -> None:
    for first in (lower, FP32):
        for second in (lower, FP32):
            other, wanted = square.to(second), FP32 if FP32 in (first, second) else lower
            with casts(lower):
                _check(square, lambda x, other=other: PROMOTED[name](x, other), first, wanted)  # type: ignore[misc]


def test_an_augmented_assignment_rebinds() -> None:
    """The operator is listed as one that promotes; the method is not."""
    with casts():
        x = before = square.half()
        x += square
        assert x.dtype is FP32
        assert x is not before
        assert before.dtype is FP16


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("given", [FP16, BF16])
@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda x: x.exp_(), "method exp_"),
        (lambda x: x.pow_(2), "method pow_"),
        (lambda x: torch.exp_(x), "function exp_"),
    ],
)
def test_refused_in_place_in_rocms_words(call: Callable[[torch.Tensor], Any], what: str, given: torch.dtype) -> None:
    with casts(BF16):
        assert call(square.clone()).dtype is FP32
        with pytest.raises(NotImplementedError) as caught:
            call(square.to(given))
    assert str(caught.value) == f"Cannot call in-place {what} with fp16 or bfloat16 args."
    assert call(square.to(given)).dtype is given


@each_input
def test_binary_cross_entropy_is_banned(lower: torch.dtype, given: torch.dtype) -> None:
    share, target = torch.full((4,), 0.25), torch.ones(4)
    for loss in (nn.BCELoss(), lambda x, y: F.binary_cross_entropy(x, target=y)):
        with casts(lower):
            if given is FP32:
                assert loss(share, target).dtype is FP32
            else:
                with pytest.raises(NotImplementedError, match="amp does not work out-of-the-box with `F"):
                    loss(share.to(given), target)
        with casts(lower, allow_banned=True):
            assert loss(share.to(given), target).dtype is FP32


# ---------------------------------------------------------------- what Apex got wrong


def test_a_script_may_ask_for_the_old_casts_of_float64_and_bf16() -> None:
    """Models were fed float64 from numpy: O1 lowered it, and without that it does not meet the weights' dtype."""
    double, complex_ = square.double(), square.to(torch.complex64)
    with casts(), pytest.raises(RuntimeError, match="dtype"):
        linear(double)
    with casts(cast_all_floats=True):
        assert linear(double).dtype is FP16
        assert (square.bfloat16() @ square.bfloat16()).dtype is FP16
        assert double.sum().dtype is FP32
        assert F.softmax(double, dim=0).dtype is FP32
        with pytest.raises(NotImplementedError, match=r"types to promote: \{.DoubleTensor., .FloatTensor.\}"):
            double + square
    with casts():
        assert (double @ double).dtype is FP64
        assert (complex_ @ complex_).dtype is torch.complex64


def test_a_weight_that_was_written_to_is_cast_again() -> None:
    """The cache was cleared by scale_loss only: an evaluation after load_state_dict used the weights of before."""
    own = nn.Linear(4, 4, bias=False)
    with casts(), torch.no_grad():
        own(square)
        own.load_state_dict({"weight": torch.zeros(4, 4)})
        assert own(square).abs().sum() == 0


def test_a_list_of_weights_is_cast_through_the_cache() -> None:
    """cached_cast called itself without its arguments for a list: TypeError."""
    weights = [nn.Parameter(square.clone()) for _ in range(2)]
    with casts() as handle:
        made = half_function(lambda many: many)(weights)
        assert [weight.dtype for weight in made] == [FP16, FP16]
        assert len(handle.cache) == 2


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
