"""Where a device lacks one of torch's operators on lists, the plain form does what the operator does, bit for bit.

Covers: xamp.torch_compat.kernels, xamp.registry.trials.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusing import Refusing
from torch.utils._python_dispatch import TorchDispatchMode

import xamp
from xamp.registry.trials import KERNELS, ask_kernels, defect_of
from xamp.torch_compat import kernels
from xamp.torch_compat.torch_private import operators

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
NAMES = [kernel.name for kernel in KERNELS]


class Lacking:
    """A block in which the CPU lacks ``operator`` for ``dtypes``, and was asked."""

    def __init__(self, operator: str, *dtypes: torch.dtype) -> None:
        self.mode = Refusing(operator, *dtypes)
        self.dtypes = dtypes

    def __enter__(self) -> Refusing:
        self.mode.__enter__()
        for dtype in self.dtypes:
            ask_kernels(CPU, dtype)
        self.mode.refused = 0
        return self.mode

    def __exit__(self, *raised: Any) -> None:
        self.mode.__exit__(*raised)


def tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Of every kind: without dimensions, without elements, transposed, with gaps; some of the numbers are subnormal."""
    made = torch.Generator().manual_seed(seed)
    found = [
        torch.randn(shape, generator=made) * 10.0 ** (-4 * k) for k, shape in enumerate([(), (7,), (3, 5), (2, 0)])
    ]
    found += [torch.randn(6, 4, generator=made).t(), torch.randn(9, generator=made)[::2], torch.full((3,), 1e-40)]
    return [each.to(dtype) for each in found]


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


# --- the device is asked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", NAMES)
def test_what_a_device_lacks_is_noted_for_that_dtype_only(operator: str, dtype: torch.dtype) -> None:
    asked = {kernel.name: kernel.dtypes for kernel in KERNELS}[operator]
    with Lacking(operator, dtype):
        assert kernels.missing(operator, "cpu") == ({dtype} if not asked or dtype in asked else set())
        assert not any(kernels.missing(other, "cpu") for other in NAMES if other != operator)


def test_what_one_device_of_a_type_lacks_no_other_brings_back() -> None:
    with Lacking(UNSCALE, torch.bfloat16):
        assert kernels.missing(UNSCALE, "cpu") == {torch.bfloat16}
    for dtype in (torch.bfloat16, torch.float16):
        ask_kernels(CPU, dtype)  # another card, which has it
    assert kernels.missing(UNSCALE, "cpu") == {torch.bfloat16}


def test_an_operator_that_overlooks_inf_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlooking(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        for grad in grads:
            grad.mul_(inv_scale)

    monkeypatch.setattr(operators, UNSCALE.removeprefix("_"), overlooking)
    assert defect_of(CPU, "bfloat16") == ""
    assert kernels.missing(UNSCALE, "cpu") == {torch.bfloat16}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("out of memory")], ids=repr)
def test_no_memory_says_nothing_of_the_device(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(operators, UNSCALE.removeprefix("_"), full)
    with pytest.raises(RuntimeError, match="out of memory"):
        ask_kernels(CPU, torch.bfloat16)


# --- the plain forms

CALLS: dict[str, Callable[[torch.dtype], Any]] = {}


def call(name: str) -> Callable[[Callable[[torch.dtype], Any]], Callable[[torch.dtype], Any]]:
    def keep(function: Callable[[torch.dtype], Any]) -> Callable[[torch.dtype], Any]:
        CALLS[name] = function
        return function

    return keep


@call("_foreach_copy_")
def _copied(dtype: torch.dtype) -> Any:
    there, wide = tensors(dtype, 1), tensors(torch.float32, 2)
    kernels.copy_(there, wide)
    kernels.copy_(wide, tensors(dtype, 3))
    return there, wide


@call("_foreach_lerp_")
def _interpolated(dtype: torch.dtype) -> Any:
    found = tensors(dtype, 1)
    kernels.lerp_(found, tensors(dtype, 2), 0.125)
    return found


@call("_foreach_norm")
def _measured(dtype: torch.dtype) -> Any:
    filled = [each for each in tensors(dtype) if each.numel()]
    return kernels.norms(filled, math.inf), kernels.norms([], 2), kernels.norms(filled[:1], 1, torch.float32)


@call("_foreach_mul_")
def _multiplied(dtype: torch.dtype) -> Any:
    found = [tensors(dtype, seed) for seed in range(3)]
    for each, factor, marked in zip(found, (1 / 3, 0.5, 0.5), (False, False, True), strict=True):
        number = torch.tensor(factor)
        kernels.set_power_of_two(number, marked)
        kernels.multiply_(each, number)
    kernels.multiply_([], torch.tensor(2.0))
    return found


@call("_amp_update_scale_")
def _updated(dtype: torch.dtype) -> Any:
    scale, tracker, seen = torch.tensor(2.0**126), torch.zeros((), dtype=torch.int32), []
    for flag in (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0):  # to the largest power of two, and not to inf
        kernels.update_scale_(scale, tracker, torch.tensor(flag), 2.0, 0.5, 2)
        seen.append((scale.item(), tracker.item()))
    return seen


@call(UNSCALE)
def _unscaled(dtype: torch.dtype) -> Any:
    seen = []
    for inverse, marked in ((2.0**-16, True), (2.0**-16, False), (1 / 3, False), (2.0**-130, True), (1.0, True)):
        for spoilt in (None, math.inf, -math.inf, math.nan):
            grads, found, number = tensors(dtype), torch.zeros(()), torch.tensor(inverse)
            kernels.set_power_of_two(number, marked)
            if spoilt is not None:
                grads[4][2, 3] = spoilt
            kernels.unscale_(grads, found, number)
            seen.append((grads, found))
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", NAMES)
def test_the_plain_form_gives_the_same_bits(operator: str, dtype: torch.dtype) -> None:
    wanted = CALLS[operator](dtype)
    with Lacking(operator, dtype) as mode:
        found = CALLS[operator](dtype)
    assert mode.refused == 0
    same(found, wanted)


def test_mixed_dtypes_are_unscaled_each_as_it_can() -> None:
    def run() -> Any:
        grads = [each for dtype in (*DTYPES, torch.float64) for each in tensors(dtype)]
        random.Random(0).shuffle(grads)
        found = torch.zeros(1)
        kernels.unscale_(grads, found, torch.full((1,), 1 / 3))
        return grads, found

    wanted = run()
    with Lacking(UNSCALE, torch.bfloat16) as mode:
        same(run(), wanted)
    assert mode.refused == 0


def test_a_flag_that_is_up_stays_up_and_nothing_need_be_given() -> None:
    with Lacking(UNSCALE, torch.bfloat16):
        up, down = torch.ones(()), torch.zeros(())
        kernels.unscale_([torch.ones(3, dtype=torch.bfloat16)], up, torch.tensor(0.5))
        kernels.unscale_([], down, torch.tensor(0.5))
        kernels.unscale_([torch.ones(0, dtype=torch.bfloat16)], down, torch.tensor(0.5))
    assert (up.item(), down.item()) == (1.0, 0.0)


@pytest.mark.parametrize("operator", ["_foreach_norm", "_foreach_mul_"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_does_without_them_too(operator: str, dtype: torch.dtype) -> None:
    def run() -> Any:
        params = [torch.nn.Parameter(each) for each in tensors(dtype) if each.numel()]
        for param in params:
            param.grad = param.detach().clone()
        optimizer = torch.optim.SGD(params, lr=0.1)
        norm = xamp.clip_grad_norm_(optimizer, 0.25)
        return norm, [param.grad for param in params]

    before = run()
    with Lacking(operator, dtype) as mode:
        found = run()
    assert mode.refused == 0
    torch.testing.assert_close(found, before)  # one norm, added up in another order


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_what_the_operator_refuses_is_refused_and_left(kind: str) -> None:
    odd = torch.ones(3, dtype=torch.bfloat16 if kind == "sparse" else torch.complex64)
    grads = [torch.ones(3, dtype=torch.bfloat16), odd.to_sparse() if kind == "sparse" else odd]
    found = torch.zeros(())
    with Lacking(UNSCALE, torch.bfloat16), pytest.raises((RuntimeError, NotImplementedError)):
        kernels.unscale_(grads, found, torch.tensor(0.5))
    assert grads[0].eq(1).all()
    assert found.item() == 0.0


def test_what_is_done_by_plain_operators_is_unseen_by_autograd_too() -> None:
    """Gradients that ``backward(create_graph=True)`` made keep what they were made by, as by torch's kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.ones(3, dtype=dtype, requires_grad=True) * 2
        made_by = grad.grad_fn
        with Lacking(UNSCALE, torch.bfloat16):
            kernels.unscale_([grad], torch.zeros(()), torch.tensor(0.5))
        assert grad.grad_fn is made_by
        assert grad.eq(1).all()


class _Operators(TorchDispatchMode):
    """Counts the operators on lists that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "foreach_mul_" in str(func):
            self.called.append(str(func))
        return func(*args, **(kwargs or {}))


class _Forcing(xamp.GradScaler):
    def force(self, scale: float) -> None:
        assert self._scale is not None
        self._scale.fill_(scale)


def test_a_scaler_by_hand_multiplies_by_one_kernel_until_its_scale_is_no_power_of_two() -> None:
    """With a factor of another dtype than the list's it would be a launch for each tensor."""
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(5)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    scaler = _Forcing(init_scale=2.0**10)
    with Lacking(UNSCALE, torch.bfloat16):
        for scale, operator in ((2.0**10, "Tensor"), (3.0, "List"), (2.0**8, "List")):
            if scale != 2.0**10:
                scaler.force(scale)  # the host does not know to what
            optimizer.zero_grad()
            scaler.scale(sum(p.float().sum() for p in params) * 1.1).backward()
            given = [p.grad.clone() for p in params if p.grad is not None]
            with _Operators() as mode:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert mode.called == [f"aten._foreach_mul_.{operator}"]
            wanted = [(grad.float() * torch.tensor(scale).reciprocal()).bfloat16() for grad in given]
            same([p.grad for p in params], wanted)


def test_a_number_on_another_device_is_marked_as_it_was() -> None:
    for is_one in (True, False):
        number = torch.tensor(0.5)
        kernels.set_power_of_two(number, is_one)
        assert kernels.on(torch.device("cpu"), number) is number
        assert getattr(kernels.on(torch.device("meta"), number), kernels.POWER_OF_TWO) is is_one


# --- training


def _steps_by_hand(overflows: set[int]) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = xamp.GradScaler(init_scale=3.0e4, growth_factor=1.7, growth_interval=7)
    scales = []
    for step in range(300):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8).bfloat16()).square().mean()
        scaler.scale(loss * (math.inf if step in overflows else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [p.detach() for p in model.parameters()], scales


def test_a_scaler_by_hand_trains_bf16_parameters_as_where_the_operator_takes_them() -> None:
    overflows = set(random.Random(1).sample(range(300), 20))
    wanted = _steps_by_hand(overflows)
    with Lacking(UNSCALE, torch.bfloat16) as mode:
        found = _steps_by_hand(overflows)
    assert mode.refused == 0
    assert len(set(wanted[1])) > 20
    same(found, wanted)


def test_tensors_of_another_storage_format_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor([2.0, 4.0])  # stands for a tensor of a format that operators on lists refuse
    monkeypatch.setattr(kernels, "_formats", {})
    kernels.register_formats("cpu", lambda tensor: tensor.clone() if tensor is own else tensor)
    assert not kernels.is_missing("_foreach_mul_", [torch.ones(2)])
    assert kernels.is_missing("_foreach_mul_", [torch.ones(2), own])
    found, plain = torch.zeros(1), torch.tensor([8.0])
    kernels.unscale_([own, plain], found, torch.tensor([0.5]))
    assert (own.tolist(), plain.tolist(), found.item()) == ([1.0, 2.0], [4.0], 0.0)
