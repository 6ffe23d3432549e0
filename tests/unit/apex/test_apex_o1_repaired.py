"""What apex.amp did wrong around functions, and what happens instead. Each docstring tells the old behaviour."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, FP64, casts, stop
from torch import nn

from xamp.apex import _patches
from xamp.apex._amp_state import _amp_state as state
from xamp.apex._casts_handle import disable_casts
from xamp.apex._handle import init

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _no_casts_are_left() -> Iterator[None]:
    before = state.handle
    yield
    stop()
    state.handle = before


@pytest.mark.parametrize("lower", [FP16, BF16])
def test_a_cached_weight_can_be_used_twice(lower: torch.dtype) -> None:
    """On torch 1.10 and later the second use of a weight raised "IndexError: tuple index out of range"; in ROCm's
    repair of it the cache was never hit."""
    linear = nn.Linear(4, 4)
    with casts(lower) as handle:
        linear(square)
        kept = handle.cache[linear.weight]
        linear(linear(square)).float().sum().backward()
        assert handle.cache[linear.weight] is kept
    assert linear.weight.grad is not None


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.parametrize("given", [FP16, FP32])
def test_recurrent_modules_are_lowered(kind: type[nn.RNN], given: torch.dtype) -> None:
    """nn.RNN was not cast at all; GRU and LSTM failed on weights that cuDNN had not laid out; and with a half input all
    of them raised "RNN input dtype (torch.float16) does not match weight dtype (torch.float32)"."""
    with casts():
        assert kind(4, 4)(square.to(given))[0].dtype is FP16


@pytest.mark.parametrize("lower", [FP16, BF16])
def test_attention_runs_where_torch_is_built_without_cuda(lower: torch.dtype) -> None:
    """bmm, baddbmm and addbmm were on no list there: "expected scalar type Float but found Half"."""
    attention = nn.MultiheadAttention(4, 2)
    with casts(lower):
        output, weights = attention(square, square, square, need_weights=True)
        assert (output.dtype, weights.dtype) == (lower, FP32)
        for call in (torch.bmm, torch.Tensor.bmm):
            assert call(square[None].to(lower), square[None]).dtype is lower
        assert torch.baddbmm(square[None], square[None], square[None].to(lower)).dtype is lower
        assert torch.addbmm(square, square[None], square[None].to(lower)).dtype is lower


def test_casts_of_an_earlier_initialize_can_be_ended() -> None:
    """A later amp.initialize at O0 left the functions patched by an earlier one at O1, for the rest of the process."""
    for _ in range(3):
        init()
    stop()
    assert not _patches.is_installed()
    assert torch.mm(square, square).dtype is FP32


def test_float64_stays() -> None:
    """A product of float64 came out in fp16, its sum in fp32; float64 and fp32 could not be added at all:
    "Do not know how to handle these types to promote: {'DoubleTensor', 'FloatTensor'}"."""
    double = square.double()
    with casts():
        made = (double @ double, F.linear(double, double), double.sum(), torch.exp(double), F.softmax(double, dim=0))
        assert {tensor.dtype for tensor in made} == {FP64}
        assert (double + square).dtype is FP64
        assert torch.mul(double, square.half()).dtype is FP64
        assert square.half().add_(double).dtype is FP16
        assert (square.to(torch.complex64) @ square.to(torch.complex64)).dtype is torch.complex64


def test_bf16_stays_where_fp16_is_the_lower_dtype() -> None:
    """It came out in fp16, which has another range."""
    low = square.bfloat16()
    with casts():
        assert (low @ low).dtype is BF16
        assert F.linear(low, low).dtype is BF16


def test_a_script_may_ask_for_the_old_casts_of_float64_and_bf16() -> None:
    """Models were fed float64 from numpy: O1 lowered it, and without that it does not meet the weights' dtype."""
    linear, double = nn.Linear(4, 4), square.double()
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


def test_disable_casts_ends_with_an_error() -> None:
    """An exception in the block left casts off for good."""
    with casts():
        with contextlib.suppress(ZeroDivisionError), disable_casts():
            raise ZeroDivisionError
        assert torch.mm(square, square).dtype is FP16


def test_disable_casts_needs_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without O1 it raised "'AmpState' object has no attribute 'handle'"."""
    monkeypatch.setattr(state, "handle", None)
    with disable_casts():
        assert torch.mm(square, square).dtype is FP32


def test_an_inner_block_does_not_switch_casts_on_in_the_outer() -> None:
    """Leaving any block switched casts on."""
    with casts(), disable_casts():
        with disable_casts():
            pass
        assert torch.mm(square, square).dtype is FP32


def test_a_weight_that_was_written_to_is_cast_again() -> None:
    """The cache was cleared by scale_loss only: an evaluation after load_state_dict used the weights of before."""
    linear = nn.Linear(4, 4, bias=False)
    with casts(), torch.no_grad():
        linear(square)
        linear.load_state_dict({"weight": torch.zeros(4, 4)})
        assert linear(square).abs().sum() == 0


def test_a_list_of_weights_is_cast_through_the_cache() -> None:
    """cached_cast called itself without its arguments for a list: TypeError."""
    weights = [nn.Parameter(square.clone()) for _ in range(2)]
    from xamp.apex._functions import half_function

    with casts() as handle:
        made = half_function(lambda many: many)(weights)
        assert [weight.dtype for weight in made] == [FP16, FP16]
        assert len(handle.cache) == 2


def test_functions_of_torch_under_names_that_apex_did_not_know() -> None:
    """nn.PReLU and nn.Bilinear raised on half inputs, and so did whoever gave torch.cosine_similarity two dtypes."""
    with casts():
        assert nn.PReLU()(square.half()).dtype is FP16
        assert nn.Bilinear(4, 4, 2)(square.half(), square.half()).dtype is FP32
        assert torch.cosine_similarity(square, square.half()).dtype is FP32
