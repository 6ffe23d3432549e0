"""``xamp.apex``'s optimizers in one pass, in Triton's interpreter: against loops in fp64 and torch's operators."""

from __future__ import annotations

import gc
import importlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apex_training
import pytest
import torch
from apex_oracles import ORACLES, make_case, trained

from xamp import onepass
from xamp.apex import amp, amp_C, optimizers
from xamp.plans import available, lists

CASES: list[tuple[str, dict[str, Any]]] = [
    ("FusedAdam", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    ("FusedAdam", {"capturable": True, "weight_decay": 0.1, "bias_correction": False}),
    ("FusedAdam", {"capturable": True, "master_weights": True}),
    ("FusedSGD", {"lr": 2e-3}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-3, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    ("FusedLAMB", {"lr": 3e-3}),
    ("FusedLAMB", {"weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False, "grad_averaging": False}),
    ("FusedLAMB", {"adam_w_mode": False, "weight_decay": 0.1, "max_grad_norm": 5.0}),
    ("FusedMixedPrecisionLamb", {"lr": 3e-3, "max_grad_norm": 5.0}),
    ("FusedAdagrad", {"lr": 3e-2, "weight_decay": 0.1}),
    ("FusedAdagrad", {"adagrad_w_mode": True, "weight_decay": 0.1}),
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels run in the interpreter, for tensors of the host. Triton reads its variable at its first import."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    importlib.import_module("xamp.onepass.kernels")
    assert available.refusal("cpu") == ""
    lists._refusal.cache_clear()
    monkeypatch.setattr(lists, "_on_host", True)
    yield
    lists._refusal.cache_clear()


def plans_of(param: torch.Tensor) -> list[onepass.Plan]:
    return [plan for _, plan in lists._plans.get(param, {}).values() if plan is not None]


def stepped(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_a_loop_in_fp64_and_of_the_other_path(
    case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, options = case
    params, steps = make_case(5)
    seen: list[torch.Tensor] = []

    def make(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(optimizers, name)(own, **options)
        masters = getattr(made, "param_groups_master", [{"params": [None]}])[0]["params"][0]
        seen.append(own[0] if masters is None else masters)
        return made

    found = trained(make, params, steps)
    assert len(plans_of(seen[0])) == 1
    monkeypatch.setattr(lists, "_on_host", False)
    other = trained(make, params, steps)
    assert not plans_of(seen[1])
    expected = ORACLES[name](params, steps, **options)
    assert max(float((after - before).abs().max()) for after, before in zip(expected, params, strict=True)) > 1e-3
    for mine, same, theirs in zip(found, other, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-7)
        torch.testing.assert_close(mine, same, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad", "FusedMixedPrecisionLamb"])
def test_weights_of_16_bits_take_a_step_that_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    params, steps = make_case(1)
    low = [param.to(dtype) for param in params]
    grads = [[grad.to(dtype) for grad in steps[0]]]
    options = {"reduced_precision_dtype": dtype} if name == "FusedMixedPrecisionLamb" else {}
    found = trained(lambda own: getattr(optimizers, name)(own, lr=0.1, **options), low, grads)
    for mine, theirs in zip(found, ORACLES[name](low, grads, lr=0.1), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4)


def test_masters_move_and_the_model_gets_them() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = optimizers.FusedAdam([param], lr=1e-4, capturable=True, master_weights=True)
    for _ in range(4):
        stepped(optimizer, [param], [torch.ones(3)])
    master = optimizer.param_groups_master[0]["params"][0]
    assert len(plans_of(master)) == 1
    torch.testing.assert_close(master, torch.full((3,), 1.0 - 4e-4), rtol=0, atol=1e-7)
    assert torch.equal(param.detach(), master.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_grad_scaler_scales_and_skips_on_the_device(dtype: torch.dtype) -> None:
    """A raised flag changes no bit, and gradients come back unscaled, as from Apex's kernel."""
    lr, step, inv = torch.tensor(0.1), torch.tensor([1], dtype=torch.int32), torch.tensor([2.0**-17])
    grad = torch.tensor([2.0, -4.0, 1.0]).mul(2.0**10).to(dtype)
    for flag in (1, 0):
        tensors = [[grad.clone()], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)]]
        before = [each[0].clone() for each in tensors]
        noop = torch.tensor([flag], dtype=torch.int32)
        amp_C.multi_tensor_adam_capturable(1, noop, tensors, lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.0, inv)
        assert len(plans_of(tensors[1][0])) == 1
        if flag:
            assert all(torch.equal(each[0], old) for each, old in zip(tensors, before, strict=True))
        else:
            assert torch.equal(tensors[0][0], (grad.float() * 2.0**-17).to(dtype))
            torch.testing.assert_close(tensors[1][0], torch.tensor([0.9, 1.1, 0.9]), rtol=0, atol=2e-7)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_sgd_scales_writes_a_copy_and_heeds_the_flag(scale: float) -> None:
    for flag, moved in ((1, 0.0), (0, 0.5 * scale)):
        low, param, moving = torch.zeros(5, dtype=torch.float16), torch.zeros(5), torch.full((5,), 7.0)
        noop = torch.tensor([flag], dtype=torch.int32)
        given = [[torch.ones(5, dtype=torch.float16)], [param], [moving], [low]]
        amp_C.multi_tensor_sgd(1, noop, given, 0.0, 0.9, 0.0, 0.5, False, True, False, scale)
        assert len(plans_of(param)) == 1
        assert param.tolist() == [-moved] * 5
        assert low.tolist() == [-moved] * 5
        assert moving.tolist() == [7.0 if flag else scale] * 5


def test_a_plan_is_kept_made_anew_for_what_moved_and_let_go_with_its_parameter() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optimizers.FusedAdam([param], lr=0.5, betas=(0.0, 0.0), eps=1e-12)
    stepped(optimizer, [param], [torch.ones(4)])
    first = plans_of(param)
    stepped(optimizer, [param], [torch.ones(4)])
    assert plans_of(param) == first
    param.data = param.detach().clone()
    optimizer.state[param]["exp_avg"] = torch.zeros(4)
    stepped(optimizer, [param], [torch.ones(4)])
    assert plans_of(param) != first
    assert param.tolist() == [-0.5] * 4  # with these betas each step is of the size of the learning rate
    kept = weakref.ref(plans_of(param)[0])
    del first, param, optimizer
    gc.collect()
    assert kept() is None


def test_versions_are_raised_as_by_any_write() -> None:
    param, low = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    before = param._version, low._version
    given = [[torch.ones(3)], [param], [torch.zeros(3)], [low]]
    amp_C.multi_tensor_sgd(1, None, given, 0.0, 0.9, 0.0, 0.5, False, True, False, 1.0)
    assert param.tolist() == [-0.5] * 3
    assert param._version > before[0]
    assert low._version > before[1]


class _Shard(torch.Tensor):
    """A tensor of another class, whose memory is not for the kernels."""


@pytest.mark.parametrize("kind", ["float64", "expanded", "with gaps", "another class"])
def test_what_the_kernels_do_not_take_steps_as_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[torch.Tensor, list[onepass.Plan]]:
        param, grad = torch.linspace(0, 1, 6).view(2, 3), torch.linspace(-1, 2, 6).view(2, 3)
        if kind == "float64":
            param, grad = param.double(), grad.double()
        elif kind == "expanded":
            grad = torch.ones(1).expand(2, 3)
        elif kind == "with gaps":
            param = torch.linspace(0, 1, 12).view(2, 6)[:, ::2]
        else:
            param = param.as_subclass(_Shard)
        moments = [torch.zeros(2, 3, dtype=param.dtype) for _ in range(2)]
        amp_C.multi_tensor_adam(
            1, None, [[grad], [param], [moments[0]], [moments[1]]], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1
        )
        return param.as_subclass(torch.Tensor), plans_of(param) if kind != "expanded" else []

    found, plans = run()
    assert plans == []
    monkeypatch.setattr(lists, "_on_host", False)
    assert torch.equal(found, run()[0])


def test_nothing_changes_on_a_cpu_but_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_on_host", False)
    param = torch.nn.Parameter(torch.ones(4))
    stepped(optimizers.FusedAdam([param]), [param], [torch.ones(4)])
    assert not plans_of(param)


RECORDED = json.loads((Path(__file__).parents[2] / "data" / "apex" / "training.json").read_text(encoding="utf-8"))
TRAJECTORIES = [
    f"{level} dynamic losses=1 optimizers={count} {kind}"
    for level, count, kind in (("O1", 1, "adam"), ("O2", 1, "sgd"), ("O2", 1, "adam"), ("O2", 2, "sgd"))
]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAJECTORIES)
def test_amp_trains_as_apex_was_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales, skipped steps and counts are equal. Recorded were torch's optimizers, whose rules these are too."""
    case = next(case for case in apex_training.CASES if case.name == name)
    made: list[torch.optim.Optimizer] = []

    def optimizer(run: apex_training.Run, model: torch.nn.Module) -> torch.optim.Optimizer:
        params = [{"params": group["params"]} for group in plain(run, model).param_groups]
        if case.kind == "sgd":
            made.append(optimizers.FusedSGD(params, lr=0.05, momentum=0.9))
        else:
            made.append(optimizers.FusedAdam(params, lr=0.01, eps=1e-3, adam_w_mode=False))
        return made[-1]

    plain, threads = apex_training.Run._optimizer, torch.get_num_threads()
    monkeypatch.setattr(apex_training.Run, "_optimizer", optimizer)
    try:
        found = apex_training.run(amp, case)
    finally:
        torch.set_num_threads(threads)
    assert all(any(plans_of(param) for param in one.param_groups[0]["params"]) for one in made)
    recorded = RECORDED["cases"][name]
    for fact in ("scales", "unskipped", "skipped"):
        assert found[fact] == recorded[fact]
    for name, line in recorded["values"].items():
        mine, theirs = ([float.fromhex(x) for x in each.split()[1:]] for each in (found["values"][name], line))
        assert mine == pytest.approx(theirs, rel=3e-2, abs=3e-2)  # after 6 steps, as the whole suite of cases has it
