"""``xamp.apex.optimizers`` against torch's optimizers and loops in fp64: 100 steps, every argument, within 1e-6.

Covers: xamp.apex.optimizers, xamp.apex._multi_tensor_steps, xamp.apex._multi_tensor_lamb.
"""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from apex_oracles import ORACLES, make_case, trained

from xamp.apex import optimizers
from xamp.errors import CheckpointError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("FusedAdam", {}),
    ("FusedAdam", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.1}),
    ("FusedAdam", {"bias_correction": False}),
    ("FusedAdam", {"betas": (0.5, 0.9), "eps": 1e-3}),
    ("FusedAdam", {"set_grad_none": False}),
    ("FusedAdam", {"capturable": True, "weight_decay": 0.1}),
    ("FusedAdam", {"capturable": True, "adam_w_mode": False, "weight_decay": 0.1, "bias_correction": False}),
    ("FusedAdam", {"capturable": True, "master_weights": True}),
    ("FusedLAMB", {}),
    ("FusedLAMB", {"lr": 3e-3, "weight_decay": 0.0}),
    ("FusedLAMB", {"weight_decay": 0.0, "use_nvlamb": True}),
    ("FusedLAMB", {"adam_w_mode": False, "weight_decay": 0.1}),
    ("FusedLAMB", {"bias_correction": False, "grad_averaging": False}),
    ("FusedLAMB", {"betas": (0.5, 0.9), "eps": 1e-3, "max_grad_norm": 5.0}),
    ("FusedLAMB", {"set_grad_none": False}),
    ("FusedMixedPrecisionLamb", {}),
    ("FusedMixedPrecisionLamb", {"lr": 3e-3, "weight_decay": 0.0, "use_nvlamb": True, "adam_w_mode": False}),
    ("FusedMixedPrecisionLamb", {"bias_correction": False, "grad_averaging": False, "max_grad_norm": 5.0}),
    ("FusedMixedPrecisionLamb", {"betas": (0.5, 0.9), "eps": 1e-3, "reduced_precision_dtype": torch.float32}),
    ("FusedNovoGrad", {}),
    ("FusedNovoGrad", {"lr": 3e-3, "weight_decay": 0.1}),
    ("FusedNovoGrad", {"reg_inside_moment": True, "weight_decay": 0.1}),
    ("FusedNovoGrad", {"grad_averaging": False, "bias_correction": False}),
    ("FusedNovoGrad", {"norm_type": 0, "betas": (0.95, 0.98), "eps": 1e-3}),
    ("FusedNovoGrad", {"init_zero": True, "set_grad_none": False}),
    ("FusedSGD", {"lr": 2e-4}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "dampening": 0.3, "set_grad_none": True}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True}),
    ("FusedSGD", {"lr": 2e-4, "momentum": 0.9, "materialize_master_grads": False}),
    ("FusedAdagrad", {}),
    ("FusedAdagrad", {"lr": 3e-2, "eps": 1e-4, "weight_decay": 0.1}),
    ("FusedAdagrad", {"adagrad_w_mode": True, "weight_decay": 0.1, "set_grad_none": False}),
]
NOT_STEPPED = {"params", "amsgrad", "max_grad_norm", "step"}  # refused, of an older interface, or tested by itself


def _ids(case: tuple[str, dict[str, Any]]) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_a_hundred_steps_are_those_of_a_loop_in_fp64(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    params, steps = make_case()
    found = trained(lambda own: getattr(optimizers, name)(own, **options), params, steps)
    expected = ORACLES[name](params, steps, **options)
    moved = max(float((after - before).abs().max()) for after, before in zip(expected, params, strict=True))
    assert moved > 3e-3
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_every_argument_stands_in_a_case() -> None:
    for name in ORACLES:
        tried = {key for found, options in CASES if found == name for key in options}
        known = set(inspect.signature(getattr(optimizers, name)).parameters) - NOT_STEPPED
        assert known - tried == set(), name


def _same(name: str, torch_name: str, **options: Any) -> tuple[str, dict[str, Any], str, dict[str, Any]]:
    return name, options, torch_name, options


TORCH: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    _same("FusedAdam", "AdamW", weight_decay=0.1),
    ("FusedAdam", {}, "AdamW", {"weight_decay": 0.0}),
    ("FusedAdam", {"adam_w_mode": False, "weight_decay": 0.1}, "Adam", {"weight_decay": 0.1}),
    _same("FusedSGD", "SGD", lr=0.01, momentum=0.9, nesterov=True),
    _same("FusedSGD", "SGD", lr=0.01, momentum=0.9, dampening=0.5),
    _same("FusedAdagrad", "Adagrad", weight_decay=0.1),
    _same("NpuFusedSGD", "SGD", lr=0.01, momentum=0.9, weight_decay=0.1),
    _same("NpuFusedAdam", "Adam", weight_decay=0.1, amsgrad=True),
    ("NpuFusedAdamW", {}, "AdamW", {"weight_decay": 0.01}),
    _same("NpuFusedAdadelta", "Adadelta", weight_decay=0.1),
    _same("NpuFusedRMSprop", "RMSprop", momentum=0.5, centered=True),
]


@pytest.mark.parametrize(("name", "options", "torch_name", "torch_options"), TORCH)
def test_a_hundred_steps_are_torchs(
    name: str, options: dict[str, Any], torch_name: str, torch_options: dict[str, Any]
) -> None:
    params, steps = make_case()
    found = trained(lambda own: getattr(optimizers, name)(own, **options), params, steps)
    expected = trained(lambda own: getattr(torch.optim, torch_name)(own, **torch_options), params, steps)
    assert all(map(torch.equal, found, expected))


def test_lamb_limits_the_norm_of_all_groups_together() -> None:
    params, steps = make_case(20)

    def two_groups(own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return optimizers.FusedLAMB([{"params": own[:2]}, {"params": own[2:]}], max_grad_norm=0.5)

    expected = ORACLES["FusedLAMB"](params, steps, max_grad_norm=0.5)
    torch.testing.assert_close(trained(two_groups, params, steps), expected, rtol=0, atol=1e-6)


def test_adam_limits_the_norm_of_a_group_as_before_2019() -> None:
    params, steps = make_case(20)
    clipped = []
    for grads in steps:
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        clipped.append([grad / max(1.0, (norm + 1e-6) / 0.5) for grad in grads])
    found = trained(lambda own: optimizers.FusedAdam(own, max_grad_norm=0.5, eps=0.1), params, steps)
    torch.testing.assert_close(found, ORACLES["FusedAdam"](params, clipped, eps=0.1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB", "FusedSGD", "FusedNovoGrad", "FusedAdagrad"])
def test_parameters_of_16_bits_take_one_step_in_fp32(name: str, dtype: torch.dtype) -> None:
    params, steps = make_case(1)
    low = [param.to(dtype) for param in params]
    grads = [[grad.to(dtype) for grad in steps[0]]]
    found = trained(lambda own: getattr(optimizers, name)(own, lr=0.5), low, grads)
    for mine, theirs in zip(found, ORACLES[name](low, grads, lr=0.5), strict=True):
        # The step is computed in fp32 and rounded once.
        torch.testing.assert_close(mine, theirs, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps / 4)


def test_the_moments_of_adam_are_fp32_and_stay_so_through_a_load() -> None:
    params, steps = make_case(3)
    low = [torch.nn.Parameter(param.half()) for param in params]
    optimizer = optimizers.FusedAdam(low)
    for param, grad in zip(low, steps[0], strict=True):
        param.grad = grad.half()
    optimizer.step()
    again = optimizers.FusedAdam([torch.nn.Parameter(param.detach().clone()) for param in low])
    again.load_state_dict(optimizer.state_dict())
    for param, other in zip(low, again.param_groups[0]["params"], strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert again.state[other][key].dtype == torch.float32
            assert torch.equal(again.state[other][key], optimizer.state[param][key])


@pytest.mark.parametrize(
    "name", [*ORACLES, "Lamb", "NpuFusedAdamP", "NpuFusedBertAdam", "NpuFusedLamb", "NpuFusedRMSpropTF"]
)
def test_a_resumed_run_is_the_run(name: str) -> None:
    params, steps = make_case(9)
    make = getattr(optimizers, name)
    whole = [torch.nn.Parameter(param.clone()) for param in params]
    first = make(whole, lr=1e-2)
    for grads in steps[:5]:
        _step(first, whole, grads)
    saved, values = pickle.loads(pickle.dumps(first.state_dict())), [param.detach().clone() for param in whole]
    resumed = [torch.nn.Parameter(value) for value in values]
    second = make(resumed, lr=5e-2)
    second.load_state_dict(saved)
    for grads in steps[5:]:
        _step(first, whole, grads)
        _step(second, resumed, grads)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def _step(optimizer: Any, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("name", [name for name in ORACLES if name != "FusedMixedPrecisionLamb"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_does_as_the_constructor_was_told(name: str, to_none: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = getattr(optimizers, name)([param], lr=0.1, set_grad_none=to_none)
    param.grad = torch.ones(2)
    optimizer.zero_grad()
    assert (param.grad is None) == to_none
    param.grad = torch.ones(2)
    optimizer.zero_grad(set_to_none=not to_none)
    assert (param.grad is None) != to_none


@pytest.mark.parametrize("name", ORACLES)
def test_parameters_without_a_gradient_stay(name: str) -> None:
    params, steps = make_case(6)
    own = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = getattr(optimizers, name)(own, lr=1e-2)
    for number, grads in enumerate(steps):
        for index, (param, grad) in enumerate(zip(own, grads, strict=True)):
            param.grad = None if index == 2 and number < 3 else grad
        optimizer.step()
        assert torch.equal(own[2], params[2]) == (number < 3)


REFUSED: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
    *(
        (RuntimeError, "does not support the AMSGrad variant", name, {"amsgrad": True})
        for name in ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb")
    ),
    (RuntimeError, "only supported with the capturable version", "FusedAdam", {"master_weights": True}),
    (RuntimeError, "only support l2/inf norm", "FusedNovoGrad", {"norm_type": 1}),
    (ValueError, "Nesterov momentum requires a momentum and zero damp", "FusedSGD", {"lr": 0.1, "nesterov": True}),
    (ValueError, "lr", "FusedSGD", {}),
    (ValueError, "lr", "NpuFusedSGD", {}),
    (ValueError, "Choices: warmup_cosine", "NpuFusedBertAdam", {"lr": 0.1, "schedule": "none"}),
]


@pytest.mark.parametrize(("kind", "message", "name", "options"), REFUSED)
def test_what_apex_refuses(kind: type[Exception], message: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        getattr(optimizers, name)([torch.nn.Parameter(torch.ones(2))], **options)


def test_steps_that_apex_refuses() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="FusedAdam has been updated"):
        optimizers.FusedAdam([param]).step(scale=2.0)
    param.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizers.FusedAdam([param]).step()


def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizers.FusedAdam([param])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 2.0
    assert float(param.detach()[0]) < 1.0


def test_capturable_adam_steps_by_the_scale_of_a_grad_scaler() -> None:
    param, twin = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = optimizers.FusedAdam([param], lr=0.1, capturable=True, weight_decay=0.1)
    reference = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(4):
        optimizer.zero_grad()
        reference.zero_grad()
        scale = float("inf") if number == 2 else 1.0
        scaler.scale((param * torch.tensor([1.0, -2.0, 0.5]) * scale).sum()).backward()
        with pytest.warns(FutureWarning, match="GradScaler is going to stop passing itself"):
            scaler.step(optimizer)
        if number != 2:  # Apex's kernel leaves them unscaled too
            assert param.grad is not None
            assert param.grad.tolist() == [1.0, -2.0, 0.5]
        scaler.update()
        if number != 2:
            (twin * torch.tensor([1.0, -2.0, 0.5])).sum().backward()
            reference.step()
    torch.testing.assert_close(param.detach(), twin.detach(), rtol=0, atol=1e-6)
    assert int(optimizer.param_groups[0]["step"]) == 3


def test_adam_steps_masters_of_16_bit_parameters() -> None:
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = optimizers.FusedAdam([param], lr=1e-4, capturable=True, master_weights=True)
    for _ in range(10):
        param.grad = torch.ones(3, dtype=torch.float16)
        optimizer.step()
    master = optimizer.param_groups_master[0]["params"][0]
    torch.testing.assert_close(master, torch.full((3,), 1.0 - 1e-3), rtol=0, atol=1e-6)  # fp16 alone would not move
    assert torch.equal(param.detach(), master.half())


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLAMB"])
def test_the_state_of_the_real_one_loads(name: str) -> None:
    """Its keys, and none that torch added since; its steps are counted in the group."""
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    params, steps = make_case(6)
    own = [torch.nn.Parameter(param.clone()) for param in params]
    first = getattr(optimizers, name)(own, **options)
    for grads in steps[:3]:
        _step(first, own, grads)
    moments = {i: {k: first.state[p][k].clone() for k in ("exp_avg", "exp_avg_sq")} for i, p in enumerate(own)}
    group = {**options, "bias_correction": True, "step": 3, "params": [0, 1, 2, 3]}
    if name == "FusedLAMB":
        group |= {"grad_averaging": True, "max_grad_norm": 1.0}
    resumed = [torch.nn.Parameter(param.detach().clone()) for param in own]
    optimizer = getattr(optimizers, name)(resumed, lr=0.5)
    optimizer.load_state_dict(pickle.loads(pickle.dumps({"state": moments, "param_groups": [group]})))
    for grads in steps[3:]:
        _step(optimizer, resumed, grads)
    assert optimizer.param_groups[0]["step"] == 6
    expected = ORACLES[name](params, steps, **options)
    torch.testing.assert_close(resumed, expected, rtol=0, atol=1e-6, check_dtype=False)


def test_a_state_of_another_optimizer_is_refused_and_changes_nothing() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizers.FusedLAMB([param], lr=0.5)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(CheckpointError, match=r"FusedLAMB.load_state_dict: group 0 of the state has no betas, .*anew"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    novograd = optimizers.FusedNovoGrad([param])
    state = novograd.state_dict()
    state["param_groups"][0]["exp_avg_sq"] = [torch.zeros(0), torch.zeros(3)]
    with pytest.raises(CheckpointError, match="3 norms for 1 parameters"):
        novograd.load_state_dict(state)


def test_novograd_keeps_its_norms_as_apex_does() -> None:
    low, full = torch.nn.Parameter(torch.ones(2).half()), torch.nn.Parameter(torch.ones(3))
    optimizer = optimizers.FusedNovoGrad([full, low])
    full.grad, low.grad = torch.full((3,), 2.0), torch.full((2,), 3.0).half()
    optimizer.step()
    halves, others = optimizer.state_dict()["param_groups"][0]["exp_avg_sq"]
    assert halves.tolist() == pytest.approx([18**0.5])
    assert others.tolist() == pytest.approx([12**0.5])
