"""``xamp.apex``'s optimizers in one pass, in Triton's interpreter: against loops in fp64 and torch's operators.

Covers: xamp.plans.lists, xamp.plans.derived, xamp.updates.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apex_training
import pytest
import torch
from apex_oracles import ORACLES, SHORT_CASES, make_case, trained
from torch.multiprocessing.reductions import StorageWeakRef

from xamp import onepass
from xamp.apex import _multi_tensor, amp, amp_C, optimizers
from xamp.plans import available, lists


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels run in the interpreter, for tensors of the host. Triton reads its variable at its first import."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    importlib.import_module("xamp.onepass.kernels")
    assert available.refusal("cpu") == ""
    lists._refusal.cache_clear()
    monkeypatch.setattr(lists, "_on_host", True)
    monkeypatch.setattr(available, "plan", _noting)
    _made.clear()
    _refused.clear()
    yield
    lists._refusal.cache_clear()


_made: dict[int, list[weakref.ReferenceType[onepass.Plan]]] = {}
"""The plans that were made, by the address of the first parameter."""

_refused: list[str] = []
"""Why others were not."""


def _noting(rule: onepass.Rule, rows: Sequence[onepass.Row], *more: Any) -> onepass.Plan:
    """Make a plan and note it, or why there is none."""
    try:
        made = onepass.Plan(rule, rows, *more)
    except ValueError as error:
        _refused.append(str(error))
        raise
    _made.setdefault(rows[0].param.data_ptr(), []).append(weakref.ref(made))
    return made


def made_for(param: torch.Tensor) -> list[weakref.ReferenceType[onepass.Plan]]:
    """Return the plans that were made to step ``param`` and others; they may be gone."""
    return _made.get(param.data_ptr(), [])


def stepped(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], grads: list[torch.Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


@pytest.mark.parametrize("case", SHORT_CASES, ids=str)
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
    many = 2 if "LAMB" in name or "Lamb" in name else 1  # theirs takes a norm, too
    assert len(made_for(seen[0])) == many
    monkeypatch.setattr(lists, "_on_host", False)
    other = trained(make, params, steps)
    assert not made_for(seen[1])
    expected = ORACLES[name](params, steps, **options)
    assert max(float((after - before).abs().max()) for after, before in zip(expected, params, strict=True)) > 1e-3
    for mine, same, theirs in zip(found, other, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-7)
        torch.testing.assert_close(mine, same, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD", "FusedAdagrad", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
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
    assert len(made_for(master)) == 1
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
        assert len(made_for(tensors[1][0])) == 1
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
        assert len(made_for(param)) == 1
        assert param.tolist() == [-moved] * 5
        assert low.tolist() == [-moved] * 5
        assert moving.tolist() == [7.0 if flag else scale] * 5


def test_norms_of_novograd_stay_one_tensor_and_those_without_gradient_stay() -> None:
    """The first, then a parameter in the middle has no gradient: there the norms do not lie side by side."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = optimizers.FusedNovoGrad(params, lr=0.0, betas=(0.9, 0.75))
    norms, kept = [2.0, 4.0, 6.0], None
    for number, missing in enumerate((None, 0, 1, None), 1):
        for index, param in enumerate(params):
            size = float(number + index)
            param.grad = None if index == missing else torch.full((4,), size)  # of norm twice the size
            if index != missing:
                before = 2.0 * size if number == 1 else norms[index]
                norms[index] = (0.75 * before**2 + 0.25 * (2.0 * size) ** 2) ** 0.5
        optimizer.step()
        found = optimizer.param_groups[0]["exp_avg_sq"][1]
        assert found.tolist() == pytest.approx(norms, rel=1e-6)
        assert kept in (None, found.data_ptr())
        kept = found.data_ptr()
    assert made_for(params[0])
    assert made_for(params[1])


@pytest.mark.parametrize(("value", "raised"), [(3.0, 0), (float("inf"), 1), (float("nan"), 1)])
def test_novograd_raises_the_flag_at_what_is_not_finite(value: float, raised: int) -> None:
    flag, norms = torch.zeros(1, dtype=torch.int32), torch.tensor([4.0, 1.0])
    grads = [torch.tensor([value, 4.0]), torch.tensor([1.0])]
    given = [grads, [torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.zeros(1)]]
    amp_C.multi_tensor_novograd(1, flag, given, norms, 0.5, 0.9, 0.5, 0.0, 1, 0, 0.0, 1, 1, 2)
    assert len(made_for(given[1][0])) == 1
    assert flag.tolist() == [raised]
    assert norms[1] == 1.0
    if not raised:
        assert norms[0].item() == pytest.approx(((16 + 25) / 2) ** 0.5, rel=1e-7)
        torch.testing.assert_close(given[1][0], 1.0 - 0.05 * grads[0] / norms[0], rtol=1e-6, atol=0)
    assert given[1][1].item() == pytest.approx(1.0 - 0.05, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_of_lamb_is_taken_in_one_pass(dtype: torch.dtype) -> None:
    """Over all groups, of squares that fp32 and fp16 do not hold; where something else is asked, as ever."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (5, 3000, 0, 1)]
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 3e4).to(dtype)
    params[3].grad = torch.tensor([3e4 if dtype == torch.float16 else 3e21], dtype=dtype)
    owner = optimizers.FusedLAMB(params)
    found = _multi_tensor.grad_norm(owner, params)
    expected = torch.cat([param.grad for param in params if param.grad is not None]).double().norm()
    assert found.shape == (1,)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)
    assert len(made_for(params[0])) == 1
    params[1].grad, first = None, params[0].grad
    assert first is not None
    assert _multi_tensor.grad_norm(owner, params[:1]).item() == pytest.approx(float(first.double().norm()))
    wide = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    wide.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert _multi_tensor.grad_norm(owner, [wide]).tolist() == [5.0]
    assert _multi_tensor.grad_norm(owner, []).tolist() == [0.0]


def test_a_plan_is_kept_and_made_anew_for_what_moved() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optimizers.FusedAdam([param], lr=0.5, betas=(0.0, 0.0), eps=1e-12)
    for _ in range(3):
        stepped(optimizer, [param], [torch.ones(4)])
    assert len(made_for(param)) == 1
    param.data = param.detach().clone()
    optimizer.state[param]["exp_avg"] = torch.zeros(4)
    stepped(optimizer, [param], [torch.ones(4)])
    assert len(made_for(param)) == 1  # at its new place
    assert param.tolist() == [-1.0] * 4  # with these betas each step is of the size of the learning rate


KEPT: dict[str, dict[str, Any]] = {"FusedAdam": {}, "FusedSGD": {"lr": 0.1, "momentum": 0.9}, "FusedLAMB": {}}
KEPT |= {"FusedAdagrad": {}, "FusedNovoGrad": {}}


def test_other_strides_at_the_same_place_are_seen() -> None:
    def moved(turned: bool) -> torch.Tensor:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(8, 8))
        memory, optimizer = param.data, optimizers.FusedSGD([param], lr=0.1)
        param.grad = torch.randn(8, 8)
        optimizer.step()
        param.grad = None
        if turned:
            param.data = param.data.t()
        grad = torch.randn(8, 8)
        param.grad = grad if turned else grad.t()
        optimizer.step()
        return memory

    torch.testing.assert_close(moved(True), moved(False))


@pytest.mark.parametrize("name", KEPT)
def test_states_go_with_their_optimizer_and_plans_with_these(name: str) -> None:
    """The model lives on, and a new optimizer steps it: the memory of the old moments must be free."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = getattr(optimizers, name)(params, **KEPT[name])
    for _ in range(2):
        stepped(optimizer, params, [torch.ones(4), torch.ones(4)])
    plans = made_for(params[0])
    assert plans[-1]() is not None
    moments = [value for state in optimizer.state.values() for value in state.values()]
    memory = [StorageWeakRef(moment.untyped_storage()) for moment in moments]
    assert len(memory) >= 2
    del optimizer, moments
    gc.collect()
    assert [plan() for plan in plans] == [None] * len(plans)
    assert all(storage.expired() for storage in memory)


def test_plans_of_an_optimizer_without_states_go_with_its_parameters() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    stepped(optimizers.FusedSGD([param], lr=0.5), [param], [torch.ones(4)])
    plans = made_for(param)
    assert [plan() is not None for plan in plans] == [True]
    del param
    gc.collect()
    assert plans[0]() is None


def test_versions_are_raised_as_by_any_write() -> None:
    param, low = torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)
    before = param._version, low._version
    given = [[torch.ones(3)], [param], [torch.zeros(3)], [low]]
    amp_C.multi_tensor_sgd(1, None, given, 0.0, 0.9, 0.0, 0.5, False, True, False, 1.0)
    assert param.tolist() == [-0.5] * 3
    assert param._version > before[0]
    assert low._version > before[1]


NPU: list[tuple[str, dict[str, Any], Any]] = [
    ("NpuFusedSGD", {"lr": 2e-3}, torch.optim.SGD),
    ("NpuFusedSGD", {"lr": 2e-3, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}, torch.optim.SGD),
    ("NpuFusedSGD", {"lr": 2e-3, "momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ("NpuFusedAdam", {"lr": 3e-3, "weight_decay": 0.1}, torch.optim.Adam),
    ("NpuFusedAdam", {"lr": 3e-3, "amsgrad": True, "betas": (0.5, 0.9)}, torch.optim.Adam),
    ("NpuFusedAdamW", {"lr": 3e-3}, torch.optim.AdamW),
]


@pytest.mark.parametrize("case", NPU, ids=str)
def test_ascends_names_take_torchs_steps_in_one_pass(
    case: tuple[str, dict[str, Any], Any],
) -> None:
    """Those of fp64; one parameter comes later, and one is left out once. Hooks run once, states are torch's."""
    name, options, torchs = case
    params, steps = make_case(5)
    mine = [torch.nn.Parameter(param.clone()) for param in params]
    theirs = [torch.nn.Parameter(param.double()) for param in params]
    optimizer, reference = getattr(optimizers, name)(mine, **options), torchs(theirs, **options, foreach=False)
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for number, grads in enumerate(steps):
        left_out = {0: 1, 3: 2}.get(number)
        for index, grad in enumerate(grads):
            mine[index].grad = None if index == left_out else grad
            theirs[index].grad = None if index == left_out else grad.double()
        assert optimizer.step(lambda: 7) == 7
        reference.step()
    assert made_for(mine[0])
    assert seen == [1] * 5
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=0, atol=2e-7)
        assert set(optimizer.state[one]) == set(reference.state[other])
        for key, value in optimizer.state[one].items():
            if value is not None:
                torch.testing.assert_close(value.double(), reference.state[other][key].double(), rtol=1e-6, atol=1e-6)


ASCEND: list[tuple[str, dict[str, Any]]] = [
    ("NpuFusedBertAdam", {"lr": 3e-3}),
    ("NpuFusedBertAdam", {"lr": 3e-3, "warmup": 0.3, "t_total": 6, "max_grad_norm": 1.0, "weight_decay": 0.1}),
    ("NpuFusedLamb", {"lr": 3e-3, "adam": True, "weight_decay": 0.1, "use_global_grad_norm": True}),
    ("Lamb", {"lr": 3e-3, "adam": True}),
]


@pytest.mark.parametrize("case", ASCEND, ids=str)
def test_ascends_adams_of_bert_and_lamb_are_adamw_without_correction(case: tuple[str, dict[str, Any]]) -> None:
    """Beside their loops over single parameters in fp64, for which there is no kernel."""
    name, options = case
    params, steps = make_case(5)
    make = functools.partial(getattr(optimizers, name), **options)
    mine = [torch.nn.Parameter(param.clone()) for param in params]
    theirs = [torch.nn.Parameter(param.double()) for param in params]
    optimizer, reference = make(mine), make(theirs)
    for number, grads in enumerate(steps):
        for index, grad in enumerate(grads):
            mine[index].grad = None if (number, index) == (3, 0) else grad  # then the counts differ
            theirs[index].grad = None if (number, index) == (3, 0) else grad.double()
        optimizer.step()
        reference.step()
    assert made_for(mine[0])
    assert not made_for(theirs[0])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.detach().double(), other.detach(), rtol=0, atol=2e-7)
        assert optimizer.state[one]["step"] == reference.state[other]["step"]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"differentiable": True}])
def test_ascends_names_step_as_torch_where_a_group_asks_for_that(options: dict[str, Any]) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = optimizers.NpuFusedSGD([{"params": [param], **options}], lr=0.5)
    stepped(optimizer, [param], [torch.ones(3)])
    assert param.tolist() == [0.5] * 3
    assert not made_for(param)


def test_a_flag_that_is_lent_is_for_torchs_step() -> None:
    """Whoever lends one alone means the step of torch's, which refuses it where it is not fused."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = optimizers.NpuFusedSGD([param], lr=0.5)
    optimizer.found_inf = torch.ones(())
    with pytest.raises(AssertionError):
        stepped(optimizer, [param], [torch.ones(3)])
    assert param.tolist() == [1.0] * 3
    assert not made_for(param)


def test_lists_of_nothing_are_stepped_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_host in (True, False):
        monkeypatch.setattr(lists, "_on_host", on_host)
        flag = torch.zeros(1, dtype=torch.int32)
        amp_C.multi_tensor_adam(1, flag, [[], [], [], []], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
        assert flag.tolist() == [0]


class _Shard(torch.Tensor):
    """A tensor of another class, whose memory is not for the kernels."""


@pytest.mark.parametrize("kind", ["float64", "expanded", "with gaps", "another class"])
def test_what_the_kernels_do_not_take_steps_as_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.Tensor:
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
        assert not made_for(param) or kind == "expanded"
        return param.as_subclass(torch.Tensor)

    found = run()
    monkeypatch.setattr(lists, "_on_host", False)
    assert torch.equal(found, run())


def test_sgd_without_gradients_of_masters_steps_by_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """At O2 of Apex: scaled fp16 gradients, read once, against a loop in fp64."""

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(6, 3)
        made = optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9, materialize_master_grads=False)
        model, optimizer = amp.initialize(model, made, opt_level="O2", loss_scale=2.0**9, verbosity=0)
        expected = [param.detach().half().double() for param in model.parameters()]  # Apex's masters start from there
        momenta = [torch.zeros_like(one) for one in expected]
        for number in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
                scaled.backward()
            for index, param in enumerate(model.parameters()):
                momenta[index] = 0.9 * momenta[index] + param.grad.double() / 2.0**9
                expected[index] = expected[index] - 0.1 * momenta[index]
            optimizer.step()
        return [master.detach().double() for master in amp.master_params(optimizer)], expected, optimizer

    found, expected, optimizer = run()
    assert made_for(next(iter(amp.master_params(optimizer))))
    _made.clear()
    monkeypatch.setattr(lists, "_on_host", False)
    for mine, theirs in ((found, expected), run()[:2]):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-7)
    assert not _made


def test_nothing_changes_on_a_cpu_but_for_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "_on_host", False)
    param = torch.nn.Parameter(torch.ones(4))
    stepped(optimizers.FusedAdam([param]), [param], [torch.ones(4)])
    assert not made_for(param)


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
    assert _refused == []
    assert all(any(made_for(param) for param in one.param_groups[0]["params"]) for one in made)
    recorded = RECORDED["cases"][name]
    for fact in ("scales", "unskipped", "skipped"):
        assert found[fact] == recorded[fact]
    for name, line in recorded["values"].items():
        mine, theirs = ([float.fromhex(x) for x in each.split()[1:]] for each in (found["values"][name], line))
        assert mine == pytest.approx(theirs, rel=3e-2, abs=3e-2)  # after 6 steps, as the whole suite of cases has it
