"""``xamp.apex.amp_C`` against plain tensors: values in every pair of dtypes, and when the flag is raised or obeyed.

Covers: xamp.apex.amp_C, xamp.apex.apex_C, xamp.apex._multi_tensor, xamp.apex.multi_tensor_apply.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from xamp.apex import amp_C, apex_C
from xamp.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = ((3,), (2, 5), (1,), (0,), ())


def _flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32)


def _tensors(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_scale_and_axpby_compute_in_fp32_and_round_once(source: torch.dtype, target: torch.dtype) -> None:
    xs, ys = _tensors(source), _tensors(target, 1)
    out = [torch.full(size, 7.0, dtype=target) for size in SIZES]
    flag = _flag()
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [xs, out], 1 / 3)
    assert all(torch.equal(o, (x.float() * (1 / 3)).to(target)) for o, x in zip(out, xs, strict=True))
    multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [xs, ys, out], 2.0, -1 / 3, -1)
    expected = [x.float() * 2.0 + y.float() * (-1 / 3) for x, y in zip(xs, ys, strict=True)]
    assert all(torch.equal(o, e.to(target)) for o, e in zip(out, expected, strict=True))
    assert int(flag) == 0


def test_scale_in_place_by_a_tensor_and_of_an_empty_list() -> None:
    xs = _tensors(torch.float32)
    before = [x.clone() for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_scale, _flag(), [xs, xs], torch.tensor([0.5]))
    assert all(torch.equal(x, b * 0.5) for x, b in zip(xs, before, strict=True))
    multi_tensor_applier(amp_C.multi_tensor_scale, _flag(), [[], []], 2.0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_flag_is_raised_and_the_output_is_written(bad: float, dtype: torch.dtype) -> None:
    xs, flag = _tensors(dtype), _flag()
    xs[1][1, 4] = bad
    out = [torch.zeros(size) for size in SIZES]
    multi_tensor_applier(amp_C.multi_tensor_scale, flag, [xs, out], 2.0)
    assert int(flag) == 1
    assert torch.equal(out[0], xs[0].float() * 2)
    for check, raised in ((-1, 1), (0, 0), (1, 1)):
        flag = _flag()
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [out[:1], xs[:1], out[:1]], 1.0, 1.0, check)
        assert int(flag) == 0
        multi_tensor_applier(amp_C.multi_tensor_axpby, flag, [_tensors(dtype)[1:2], xs[1:2], out[1:2]], 1.0, 1.0, check)
        assert int(flag) == raised, check
    flag = _flag()
    assert not bool(torch.isfinite(amp_C.multi_tensor_l2norm(1, flag, [xs])[0]))
    assert int(flag) == 1


def test_channels_last_is_kept() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y, out = torch.randn_like(x), torch.empty_like(x)
    multi_tensor_applier(amp_C.multi_tensor_axpby, _flag(), [[x], [y], [out]], 2.0, 3.0, -1)
    assert torch.equal(out, 2 * x + 3 * y)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_tensor", [True, False, None])
def test_norms(dtype: torch.dtype, per_tensor: bool | None) -> None:
    xs = [x * 100 for x in _tensors(dtype)]
    wide = [x.double() for x in xs]
    each = torch.stack([x.norm() for x in wide]).float()
    for op, factor in (("multi_tensor_l2norm", 1.0), ("multi_tensor_l2norm_mp", 1.0)):
        norm, parts = multi_tensor_applier(getattr(amp_C, op), _flag(), [xs], per_tensor)
        torch.testing.assert_close(norm, each.norm().reshape(1) * factor)
        torch.testing.assert_close(parts, each if per_tensor else torch.zeros(0))
    norm, parts = multi_tensor_applier(
        amp_C.multi_tensor_unscale_l2norm, _flag(), [xs], torch.tensor([0.25]), per_tensor
    )
    torch.testing.assert_close(norm, each.norm().reshape(1) / 4)
    out = [torch.empty_like(x) for x in xs]
    norm, parts = multi_tensor_applier(amp_C.multi_tensor_l2norm_scale, _flag(), [xs, out], 0.5, per_tensor)
    torch.testing.assert_close(norm, each.norm().reshape(1) / 2)
    assert all(torch.equal(o, x * 0.5) for o, x in zip(out, xs, strict=True))
    norm, parts = multi_tensor_applier(amp_C.multi_tensor_maxnorm, _flag(), [xs], per_tensor)
    assert float(norm) == max(float(x.abs().max()) for x in wide if x.numel())


def test_norm_out_blends() -> None:
    xs = [torch.tensor([3.0, 4.0]), torch.tensor([-2.0])]
    out = torch.tensor([1.0, 2.0])
    amp_C.multi_tensor_norm_out(1, _flag(), [xs], out, 0.25, 0.5, 2)
    torch.testing.assert_close(out, torch.tensor([(0.25 + 0.5 * 25) ** 0.5, (0.25 * 4 + 0.5 * 4) ** 0.5]))
    out = torch.tensor([1.0, 2.0])
    amp_C.multi_tensor_norm_out(1, _flag(), [xs], out, 0.25, 0.5, 0)
    torch.testing.assert_close(out, torch.tensor([0.25 + 0.5 * 4, 0.25 * 2 + 0.5 * 2]))


@pytest.mark.parametrize("op", ["sgd", "adam_capturable", "adam_capturable_master", "lamb_mp"])
def test_a_step_that_obeys_the_flag_leaves_everything(op: str) -> None:
    lists = _step_lists(op)
    before = [[t.clone() for t in tensors] for tensors in lists]
    _run(op, torch.ones(1, dtype=torch.int32), lists)
    assert all(
        torch.equal(t, b) for some, old in zip(lists, before, strict=True) for t, b in zip(some, old, strict=True)
    )
    _run(op, _flag(), lists)
    assert not torch.equal(lists[1][0], before[1][0])


@pytest.mark.parametrize("op", ["adam", "adagrad", "lamb", "novograd"])
def test_a_step_that_does_not_read_the_flag_lets_nan_through(op: str) -> None:
    lists = _step_lists(op)
    lists[0][0][0] = float("nan")
    _run(op, torch.ones(1, dtype=torch.int32), lists)
    assert bool(torch.isnan(lists[1][0][0]).any())


def _step_lists(op: str) -> list[list[torch.Tensor]]:
    count = {"sgd": 3, "adagrad": 3, "novograd": 3, "adam_capturable_master": 5}.get(op, 4)
    lists = [[torch.full((3,), 0.5 + index), torch.full((2,), 0.25)] for index in range(count)]
    if op == "adam_capturable_master":
        lists[1] = [t.half() for t in lists[4]]
    return lists


def _run(op: str, flag: torch.Tensor, lists: list[list[torch.Tensor]]) -> None:
    one, step = torch.ones(1), torch.ones(1, dtype=torch.int32)
    arguments: dict[str, tuple[Any, ...]] = {
        "sgd": (0.1, 0.9, 0.0, 0.1, False, False, False, 1.0),
        "adam": (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.1),
        "adam_capturable": (one, 0.9, 0.999, 1e-8, step, 1, 1, 0.1, one),
        "adam_capturable_master": (one, 0.9, 0.999, 1e-8, step, 1, 1, 0.1, one),
        "adagrad": (0.1, 1e-8, 0, 0.1),
        "novograd": (torch.ones(2), 0.1, 0.9, 0.999, 1e-8, 1, 1, 0.1, 1, 0, 2),
        "lamb": (0.1, 0.9, 0.999, 1e-8, 1, 1, 0.1, 1, 1, one, 1.0, False),
        "lamb_mp": (one, 0.9, 0.999, 1e-8, step, 1, 0.1, 1, 1, one, one, False, flag.float(), one),
    }
    multi_tensor_applier(getattr(amp_C, f"multi_tensor_{op}"), flag, lists, *arguments[op])


def test_sgd_writes_16_bit_copies() -> None:
    grads, params, momenta = [torch.ones(3).half()], [torch.full((3,), 2.0)], [torch.zeros(3)]
    copies = [torch.zeros(3).half()]
    amp_C.multi_tensor_sgd(1, _flag(), [grads, params, momenta, copies], 0.0, 0.9, 0.0, 0.1, False, True, False, 0.5)
    torch.testing.assert_close(params[0], torch.full((3,), 2.0 - 0.1 * 0.5))
    assert torch.equal(copies[0], params[0].half())
    assert momenta[0].tolist() == [0.5] * 3


def test_the_two_stages_of_lamb_are_the_one_step() -> None:
    def lists() -> list[list[torch.Tensor]]:
        return [_tensors(torch.float32, seed)[:3] for seed in range(2)] + [
            [torch.zeros(size) for size in SIZES[:3]] for _ in range(3)
        ]

    one, two = lists(), lists()
    norm = amp_C.multi_tensor_l2norm(1, _flag(), [one[0]])[0]
    decays = torch.full((3,), 0.1)
    amp_C.multi_tensor_lamb(1, _flag(), one[:4], 0.5, 0.9, 0.999, 1e-6, 1, 1, 0.1, 1, 1, norm, 1.0)
    before = amp_C.multi_tensor_l2norm(1, _flag(), [two[1]], True)[1]
    amp_C.multi_tensor_lamb_stage1_cuda(1, _flag(), two, decays, 0, 0.9, 0.999, 1e-6, norm, 1.0)
    update = amp_C.multi_tensor_l2norm(1, _flag(), [two[4]], True)[1]
    amp_C.multi_tensor_lamb_stage2_cuda(1, _flag(), [two[1], two[4]], before, update, 0.5, 0.1)
    torch.testing.assert_close(one[1], two[1])


def test_the_scale_backs_off_at_the_second_overflow() -> None:
    scale, growth, left = (
        torch.tensor([1024.0]),
        torch.zeros(1, dtype=torch.int32),
        torch.full((1,), 2, dtype=torch.int32),
    )
    seen = []
    for overflow in (0, 0, 1, 0, 1, 1, 0, 0, 0):
        found = torch.tensor([float(overflow)])
        returned = amp_C.update_scale_hysteresis(scale, growth, left, found, 2.0, 0.5, 3, 2)
        assert returned is scale
        seen.append((float(scale), int(growth), int(left)))
    assert seen == [
        *((1024.0, 1, 2), (1024.0, 2, 2), (1024.0, 0, 1), (1024.0, 1, 2), (1024.0, 0, 1), (512.0, 0, 0)),
        *((512.0, 1, 2), (512.0, 2, 2), (1024.0, 0, 2)),
    ]


def test_the_scale_backs_off_to_zero_not_to_denormal_numbers() -> None:
    scale, growth, left = torch.tensor([2.0**-125]), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    seen = []
    for _ in range(2):
        amp_C.update_scale_hysteresis(scale, growth, left, torch.ones(1), 2.0, 0.5, 3, 1)
        seen.append(float(scale))
    assert seen == [2.0**-126, 0.0]


def test_flat_and_back() -> None:
    xs = _tensors(torch.float32)
    flat = apex_C.flatten(xs)
    assert torch.equal(flat, torch.cat([x.flatten() for x in xs]))
    for x, view in zip(xs, apex_C.unflatten(flat * 2, xs), strict=True):
        assert torch.equal(view, x * 2)


def test_the_applier_is_available() -> None:
    assert MultiTensorApply.available
    assert multi_tensor_applier.chunk_size == 2048 * 32
    multi_tensor_applier.check_avail()
    assert MultiTensorApply(7)(lambda chunk, flag, lists, extra: (chunk, lists, extra), None, [1], 2) == (7, [1], 2)
