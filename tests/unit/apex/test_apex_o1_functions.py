"""Handles, the cache of weights, functions of the user's, and what is said of it all.

Covers: xamp.apex._handle, xamp.apex._casts_handle, xamp.apex._casts, xamp.apex._functions.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from apex_casts import BF16, FP16, FP32, FP64, casts, stop
from torch import nn

from xamp.apex import _functions as functions
from xamp.apex import _handle, _patches
from xamp.apex._amp_state import _amp_state as state
from xamp.apex._casts_handle import disable_casts
from xamp.apex._handle import AmpHandle, NoOpHandle, init

square = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


@pytest.fixture(autouse=True)
def _no_casts_are_left() -> Iterator[None]:
    before = state.handle
    yield
    stop()
    functions.take_registered()
    functions.switch(True)
    state.handle = before
    assert not _patches.is_installed()


# ---------------------------------------------------------------- init and its handle


@pytest.mark.parametrize(
    ("arguments", "options", "lower"),
    [
        ((True, "dynamic", False, True, True), {}, FP16),  # in NVIDIA's order
        ((True, "dynamic", BF16, False, True, True), {}, BF16),  # in ROCm's
        ((True, "dynamic", BF16), {"enable_caching": False, "verbose": True, "allow_banned": True}, BF16),
    ],
)
def test_arguments(arguments: tuple[Any, ...], options: dict[str, Any], lower: torch.dtype) -> None:
    handle = init(*arguments, **options)
    assert isinstance(handle, AmpHandle)
    assert state.handle is handle
    assert (handle.has_cache, handle.verbose, handle._casting.allow_banned) == (False, True, True)
    assert torch.mm(square, square).dtype is lower


def test_another_patch_type_is_refused() -> None:
    with pytest.raises(RuntimeError) as caught:
        init(patch_type=FP32)
    assert str(caught.value) == (
        "Unsupported patch_torch_functions_type passed to initialize."
        "Supported types are: torch.float16 and torch.bfloat16."
    )
    assert not _patches.is_installed()


def test_switched_off_it_installs_nothing() -> None:
    handle = init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert not _patches.is_installed()
    with handle._disable_casts():
        handle._clear_cache()
    handle._deactivate()


def test_is_active_can_be_set() -> None:
    with casts() as handle:
        handle._is_active = False
        assert torch.mm(square, square).dtype is FP32
        with handle._disable_casts():
            pass
        assert torch.mm(square, square).dtype is FP32
        handle._is_active = True
        assert torch.mm(square, square).dtype is FP16


@pytest.mark.parametrize("first", [0, 1])
def test_disabled_blocks_may_be_nested_and_overlap(first: int) -> None:
    """In Apex leaving any of them switched casts on."""
    with casts() as handle:
        blocks = [handle._disable_casts(), disable_casts()]
        for block in blocks:
            block.__enter__()
        blocks[first].__exit__(None, None, None)
        assert torch.mm(square, square).dtype is FP32
        blocks[1 - first].__exit__(None, None, None)
        assert torch.mm(square, square).dtype is FP16
        assert disable_casts()(lambda: torch.mm(square, square).dtype)() is FP32


# ---------------------------------------------------------------- the cache of weights


class Lowered(nn.Module):
    """A weight that is lowered twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8).to(dtype) / 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, self.weight)

    @staticmethod
    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x.mm(weight).mm(weight).sum()


class Lifted(Lowered):
    @staticmethod
    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x + torch.pow(weight[:2], 2) + torch.pow(weight[:2], 2)).sum()


class Promoted(Lowered):
    @staticmethod
    def compute(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((x * weight[:2]) * weight[:2]).sum()


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("lower", [FP16, BF16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("made", [Lowered, Lifted, Promoted])
def test_gradients_arrive_in_training_after_evaluation(
    made: Callable[[torch.dtype], Lowered], wide: bool, lower: torch.dtype
) -> None:
    """A cast made under no_grad has no parent; used in training, it would keep the gradient to itself."""
    model, x = made(FP32 if wide else lower), torch.ones(2, 8)
    plain = model.weight.detach().float().requires_grad_()
    with casts(lower) as handle:
        for _ in range(2):
            model.zero_grad()
            plain.grad = None
            with torch.no_grad():
                model(x)
            model(x).float().backward()
            handle._clear_cache()
            model.compute(x, plain).backward()
            found, wanted = gradient(model.weight), gradient(plain)
            assert found.dtype is model.weight.dtype
            torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.0)
            model.weight.data -= 0.5
            plain.data -= 0.5


def test_a_weight_is_cast_once_between_two_clearings(caplog: pytest.LogCaptureFixture) -> None:
    linear = nn.Linear(4, 4)
    with caplog.at_level(logging.INFO, "xamp"), casts(verbose=True) as handle:
        for _ in range(3):
            linear(square.half())
        assert len(caplog.messages) == 2
        assert set(handle.cache) == set(linear.parameters())
        handle.remove_cache(linear.weight)
        handle.remove_cache(linear.weight)
        linear(square.half())
        assert len(caplog.messages) == 3
        handle._clear_cache()
        linear(square.half())
        assert len(caplog.messages) == 5


def test_weights_of_recurrent_modules_are_cached() -> None:
    lstm = nn.LSTM(4, 4)
    with casts() as handle:
        lstm(square)
        assert set(handle.cache) == set(lstm.parameters())


def test_without_a_cache() -> None:
    with casts(enable_caching=False) as handle:
        nn.Linear(4, 4)(square)
        assert (handle.has_cache, handle.cache) == (False, {})
        handle.remove_cache(square)


def test_a_weight_made_under_inference_mode() -> None:
    with torch.inference_mode():
        linear = nn.Linear(4, 4)
        with casts():
            assert [linear(square).dtype for _ in range(2)] == [FP16, FP16]


# ---------------------------------------------------------------- functions of the user's


def noted(*args: Any, **kwargs: Any) -> list[Any]:
    """The dtypes of what arrives."""

    def look(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype
        return type(value)(look(item) for item in value) if isinstance(value, (list, tuple)) else value

    return [look(value) for value in (*args, *kwargs.values())]


MIXED = (square, square.half(), square.bfloat16())


@pytest.mark.parametrize("lower", [FP16, BF16])
@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("half", [FP16, FP16, FP16]),
        ("bfloat16", [BF16, BF16, BF16]),
        ("float", [FP32, FP32, FP32]),
        ("promote", None),
    ],
)
@pytest.mark.parametrize("form", ["decorated", "registered"])
def test_a_function_of_the_users(form: str, kind: str, wanted: Any, lower: torch.dtype) -> None:
    module: Any = types.SimpleNamespace(noted=noted)
    if form == "decorated":
        module.noted = getattr(functions, f"{kind}_function")(noted)
    else:
        getattr(functions, f"register_{kind}_function")(module, "noted")
    plain = noted(*MIXED)
    assert module.noted(*MIXED) == plain
    with casts(lower):
        if kind == "promote":
            assert module.noted(square, square.half()) == [FP32, FP32]
            with pytest.raises(NotImplementedError, match="Do not know how to handle these types"):
                module.noted(*MIXED)
        else:
            assert module.noted(*MIXED) == wanted
            assert module.noted([square, (square.half(),)], x=square) == [[wanted[0], (wanted[0],)], wanted[0]]
            assert module.noted([square, 1], square.double()) == [[FP32, 1], FP64]
        with disable_casts():
            assert module.noted(*MIXED) == plain
    assert module.noted(*MIXED) == plain


def test_a_registration_of_an_earlier_handle_holds_under_a_later_one() -> None:
    module: Any = types.SimpleNamespace(noted=noted)
    functions.register_half_function(module, "noted")
    with casts():
        init()
        assert module.noted(square) == [FP16]


def test_apexs_cast_is_the_outer_one_unless_the_users_is_preferred() -> None:
    for preferred, wanted in ((None, "through fp16"), (True, "fp32")):
        functions.register_float_function(torch, "mm")
        with casts(user_cast_preferred=preferred):
            made = torch.mm(square / 3, square)
        assert made.dtype is FP32
        through = torch.mm((square / 3).half().float(), square.half().float())
        assert torch.equal(made, through if wanted == "through fp16" else torch.mm(square / 3, square))


def test_the_message_of_the_banned_function_helps() -> None:
    """It tells to register the sigmoid before it."""
    functions.register_float_function(torch, "sigmoid")
    with casts():
        share = torch.sigmoid(square.half())
        assert F.binary_cross_entropy(share, torch.ones(4, 4)).dtype is FP32


def test_decorated_functions_rest_after_a_disabled_init() -> None:
    decorated = functions.half_function(noted)
    with casts():
        init(enabled=False)
        assert decorated(square) == [FP32]
        assert torch.mm(square, square).dtype is FP16
        init()
        assert decorated(square) == [FP16]


def test_other_names_of_a_registered_function_stay() -> None:
    functions.register_float_function(torch, "prelu")
    with casts(user_cast_preferred=True):
        assert torch.prelu(square.half(), torch.ones(1).half()).dtype is FP32
        assert F.prelu(square.half(), torch.ones(1).half()).dtype is FP16


def test_casts_of_a_users_half_function_are_cached() -> None:
    weight = nn.Parameter(square.clone())
    multiply: Any = functions.half_function(lambda x, w: x @ w)
    with casts() as handle:
        multiply(square, weight)
        assert handle.cache[weight].dtype is FP16
    as_bf16: Any = functions.bfloat16_function(lambda w: w)
    with casts() as handle:
        assert multiply(square, weight).dtype is FP16
        assert as_bf16(weight).dtype is BF16
        assert torch.mm(square, weight).dtype is FP16


# ---------------------------------------------------------------- what is said


def test_each_cast_is_logged_if_asked_for(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.DEBUG, "xamp"), casts():
        torch.mm(square, square.half())
    with caplog.at_level(logging.INFO, "xamp"), casts(verbose=True):
        torch.mm(square, square.half())
        F.softmax(square.half(), dim=0)
        square.half() + square
        square.bfloat16().sum()
        torch.cat([square, square.half()])
        square.clone().add_(square.half())
        functions.half_function(noted)(square)
    assert caplog.messages == [
        "Float->Half (mm)",
        "Half->Float (softmax)",
        "Half->Float (__add__)",
        "BFloat16->Float (sum)",
        "Half->Float (cat)",
        "Half->Float (add_)",
        "Float->Half (noted)",
    ]
    assert capsys.readouterr().out == ""


def test_start_is_init_by_name() -> None:
    handle = _handle.start(BF16, enable_caching=False, verbose=True, allow_banned=True, user_cast_preferred=True)
    assert state.handle is handle
    assert (handle.has_cache, handle.verbose, handle._casting.lower) == (False, True, BF16)
