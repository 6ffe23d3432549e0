"""FSDP around a model: where xamp works with it, and where it refuses before anything trains wrongly.

Every refusal names a remedy, and here each remedy trains: to the weights of a model that is not sharded. What several
ranks do is in tests/distributed/test_engines.py.

Covers: xamp.sessions.sharding, xamp.distributed.fsdp, xamp.distributed.wrappers.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import compiling
import one_rank
import pytest
import torch
import torch_warnings
from forked_python import python
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import xamp
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.policy import LEVELS, levels_where
from xamp.scaling import unscale
from xamp.scaling.gradients import _Snapshot

pytestmark = torch_warnings.FSDP1

MASTERS = levels_where(lambda row: row.master_weights)
OPERATORS = levels_where(lambda row: row.casts_operators)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank.one_rank():
        yield


def shard(model: nn.Module, how: str, policy: Any = None) -> nn.Module:
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy or MixedPrecisionPolicy())
        return model
    strategy = ShardingStrategy.NO_SHARD  # what FSDP1 does with one rank
    return FullyShardedDataParallel(
        *(model,),
        device_id=torch.device("cpu"),
        sharding_strategy=strategy,
        use_orig_params=True,
        mixed_precision=policy,
    )


def net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 2))


def start(model: nn.Module, level: str, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    xamp.initialize(model, optimizer, level=level, verbosity=0, **options)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.full((4, 8), 0.1 * (step + 1)) * torch.arange(4).unsqueeze(1)
        with xamp.scale_loss(model(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    """What the optimizer steps, by name: the shards, or the masters, where there are any."""
    sharded = isinstance(model, FullyShardedDataParallel)
    found = dict(model.named_parameters()) if sharded else model.state_dict()
    named = sorted((name.replace("_fsdp_wrapped_module.", ""), p) for name, p in found.items())
    full = [getattr(p, "full_tensor", lambda p=p: p)() for name, p in named if name.endswith(("weight", "bias"))]
    return [p.detach().float().clone() for p in full]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def assert_trains_as_whole(sharded: nn.Module, level: str, whole: nn.Module, **options: Any) -> None:
    """``sharded`` starts with the weights of ``whole``; after the same steps they are equal again, to the bit."""
    before = weights(sharded)
    optimizers = [start(model, level, **options) for model in (whole, sharded)]
    for model, optimizer in zip((whole, sharded), optimizers, strict=True):
        train(model, optimizer)
    assert same(weights(whole), weights(sharded))
    assert not same(before, weights(sharded))


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("level", [*OPERATORS, *MASTERS])
def test_sharded_before_trains_as_a_whole_model(level: str, how: str) -> None:
    assert_trains_as_whole(shard(net(), how), level, net())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 2), ()], ids=["matrix", "number"])
def test_gradients_in_parts_are_multiplied_without_a_word(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """torch warns where a number with a dimension meets a DTensor. That somebody wrote is seen, for an undo."""
    place = [Shard(0)] if shape else [Replicate()]
    mesh = init_device_mesh("cpu", (1,))
    grads = [distribute_tensor(torch.full(shape, 3.0, dtype=dtype), mesh, place) for _ in range(2)]
    entry = _Snapshot.of(grads)
    assert entry.is_untouched(grads)
    unscale.multiply_(grads, torch.tensor(1 / 3))
    assert all(grad.to_local().eq(1).all() for grad in grads)
    assert not entry.is_untouched(grads)


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_a_forward_before_initialize_does_no_harm(how: str) -> None:
    model = shard(net(), how)
    with torch.no_grad():
        model(torch.ones(2, 8))
    assert_trains_as_whole(model, "O2", net())


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_a_session_that_ends_gives_fsdp_back_as_it_was(how: str) -> None:
    model = shard(net(), how)
    optimizer = start(model, "O2")
    train(model, optimizer)
    model(torch.ones(2, 8))
    xamp.session(model).close()
    plain: Any = net()
    for p, values in zip((plain[0].bias, plain[0].weight, plain[2].bias, plain[2].weight), weights(model), strict=True):
        p.data.copy_(values)
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    assert torch.equal(model(x), plain(x))


def test_a_call_that_fails_leaves_fsdp_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shard(net(), "fsdp2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monkeypatch.setattr("xamp.sessions.set_up.register", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    with pytest.raises(RuntimeError, match="no"):
        xamp.initialize(model, optimizer, level="O2", verbosity=0)
    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    assert torch.equal(model(x), net()(x))


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_o3_is_refused_and_the_remedy_trains(how: str) -> None:
    model = shard(net(), how)
    with pytest.raises(StateError, match=r"would step torch.float16 parameters. Use O2 or O5"):
        start(model, "O3")
    assert_trains_as_whole(model, "O2", net())


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_a_norm_in_one_piece_with_the_rest_is_refused_and_the_remedies_train(how: str) -> None:
    model = shard(net(norm=True), how)
    with pytest.raises(PolicyError, match=r"there is a BatchNorm1d among them .* Shard each BatchNorm1d by itself"):
        start(model, "O2")
    assert_trains_as_whole(model, "O2", net(norm=True), keep_batchnorm_fp32=False)
    apart: Any = net(norm=True)
    apart[1] = shard(apart[1], how)
    assert_trains_as_whole(shard(apart, how), "O2", net(norm=True))


def test_half_shards_are_refused_and_the_remedy_trains() -> None:
    model = shard(net().bfloat16(), "fsdp2")
    with pytest.raises(PolicyError, match=r"were torch.bfloat16 when FSDP sharded them.* call model.float\(\) before"):
        start(model, "O5")
    assert_trains_as_whole(shard(net().bfloat16().float(), "fsdp2"), "O5", net().bfloat16().float())


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_another_dtype_is_refused_and_the_remedies_train(how: str) -> None:
    told: Any = MixedPrecisionPolicy if how == "fsdp2" else MixedPrecision
    model = shard(net(), how, told(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    with pytest.raises(PolicyError, match=r"was told to compute the model in torch.bfloat16.*fsdp_policy\('O2'\).*O5"):
        start(model, "O2")
    assert_trains_as_whole(model, "O5", net())
    if how == "fsdp2":
        assert_trains_as_whole(shard(net(), how, xamp.fsdp_policy("O2")), "O2", net())
    assert_trains_as_whole(shard(net(), how), "O2", net())


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2", "tensor"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("level", [*MASTERS, *OPERATORS])
def test_sharded_afterwards_is_refused(level: str, used: bool, how: str) -> None:
    """Whether or not it trained before: masters, or old parameters, would move, and the shards would not.

    FSDP1 goes on with the parameters it is given, so it works where they are what the optimizer steps.
    """
    model = net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    xamp.initialize(model, optimizer, level=level, verbosity=0)
    if used:
        train(model, optimizer, 1)
    if how == "tensor":
        sharded: nn.Module = parallelize_module(model, init_device_mesh("cpu", (1,)), {"2": ColwiseParallel()})
    else:
        sharded = shard(model, how)
    before = weights(sharded)
    if how == "fsdp1" and level in OPERATORS:
        train(sharded, optimizer)
        assert not same(before, weights(sharded))
        return
    with pytest.raises(StateError, match=r"the model was sharded since initialize .* Shard first, then make"):
        train(sharded, optimizer)
    assert same(before, weights(sharded))


@pytest.mark.parametrize("level", [*MASTERS, *OPERATORS])
def test_a_module_that_the_user_replaces_is_not_taken_for_sharded(level: str) -> None:
    model = net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    optimizer = start(model, level)
    train(model, optimizer, 1)
    model[2] = nn.Linear(8, 2).to(next(model[2].parameters()).dtype)
    before = weights(model[0])
    train(model, optimizer)
    assert not same(before, weights(model[0]))


def test_a_part_that_is_out_of_the_model_for_one_backward_keeps_its_gradients() -> None:
    """FSDP holds them, scaled, until a later backward reduces them; the sums are those of a plain loop."""
    model, whole = net(), net()
    part: Any = model[2]
    fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    optimizer, plain = start(model, "O0", loss_scale=2.0**10), torch.optim.SGD(whole.parameters(), lr=0.5)
    for backwards in (("inside",), ("outside", "inside")):
        for number, place in enumerate(backwards):
            model[2] = part if place == "inside" else nn.Identity()
            part.set_requires_gradient_sync(place == "inside")
            x = number + torch.linspace(-1, 1, 32).reshape(4, 8)
            found = model(x)
            loss = (found if place == "inside" else part(found)).square().mean()
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            whole(x).square().mean().backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    for one, other in zip(weights(model), weights(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_part_of_a_model_that_is_sharded_as_a_whole() -> None:
    """After a forward the whole parameters stand in the part, whose shards the outer module's group has."""
    part = net()
    model = nn.Sequential(part, nn.Linear(2, 2))
    fully_shard(part[0], mesh=init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    xamp.initialize(part, optimizer, level="O1", verbosity=0)
    before = weights(model)
    train(model, optimizer)
    assert not same(before, weights(model))


def test_looking_for_torchs_states_does_not_unwrap_them() -> None:
    """Something may ask where the module is before somebody imports it."""
    code = (
        "import importlib.util, torch, xamp\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "xamp.initialize(model, optimizer, level='O2', verbosity=0)\n"
        "name = 'torch.distributed.checkpoint.state_dict'\n"
        "import sys; assert name not in sys.modules\n"
        "assert importlib.util.find_spec(name) is not None\n"
        "import torch.distributed.checkpoint.state_dict as found\n"
        "assert hasattr(found._get_optim_state_dict, '_xamp_inner')\n"
        "assert not any('xamp' in type(each).__module__ for each in sys.meta_path)\n"
    )
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("level", [*MASTERS, *OPERATORS])
def test_an_optimizer_for_a_model_that_was_cast_and_then_sharded(level: str) -> None:
    model = net()
    xamp.initialize(model, level=level, verbosity=0)
    sharded = shard(model, "fsdp2")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.5)
    if level in MASTERS:
        with pytest.raises(StateError, match=r"was cast by an earlier initialize and sharded since"):
            xamp.initialize(sharded, optimizer, level=level, verbosity=0)
        return
    xamp.initialize(sharded, optimizer, level=level, verbosity=0)
    before = weights(sharded)
    train(sharded, optimizer)
    assert not same(before, weights(sharded))


@pytest.mark.parametrize("level", LEVELS)
def test_the_policy_says_what_the_level_table_says(level: str) -> None:
    row = LEVELS[level]
    if row.steps_lower:
        with pytest.raises(UnsupportedPolicy, match=r"fsdp_policy\(level='O3'\): .* Use O2 or O5"):
            xamp.fsdp_policy(level)
        return
    policy = xamp.fsdp_policy(level)
    lower = getattr(torch, str(row.dtype)) if row.casts_parameters else None
    assert (policy.param_dtype, policy.output_dtype) == (lower, torch.float32 if lower else None)
    assert policy.reduce_dtype == (torch.float32 if lower else None)
    assert policy.cast_forward_inputs == (lower is not None)
    for alias in row.aliases:
        assert xamp.fsdp_policy(alias) == policy


def test_the_policy_of_auto_casts_nothing() -> None:
    assert xamp.fsdp_policy() == xamp.fsdp_policy("O4") == xamp.fsdp_policy("O0")
    with pytest.raises(PolicyError, match="no such level"):
        xamp.fsdp_policy("O7")


def test_arguments_that_are_spared_reach_the_model_uncast() -> None:
    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            assert times.dtype == torch.float32
            found: torch.Tensor = self.layer(x)
            return found

    model = shard(Told(), "fsdp2", xamp.fsdp_policy("O2"))
    start(model, "O2", cast_model_inputs=["times"])
    assert model(torch.ones(2, 8), torch.ones(2)).dtype == torch.float32


@pytest.mark.parametrize("level", [*MASTERS, *OPERATORS])
def test_a_ddp_of_another_model_that_outlived_its_group_does_no_harm(level: str) -> None:
    other = nn.Linear(2, 2)
    xamp.initialize(other, torch.optim.SGD(other.parameters(), lr=0.1), level="O1", verbosity=0)
    ddp = nn.parallel.DistributedDataParallel(other)
    ddp(torch.ones(1, 2)).sum().backward()
    one_rank.end()
    try:
        model, whole = net(), net()
        train(model, start(model, level))
        assert not same(weights(model), weights(whole))
    finally:
        one_rank.begin()


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().float()


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_lists_of_dtensors_and_plain_tensors_are_refused_before_anything_trains(form: str) -> None:
    """As torch refuses them in the first step; on most devices it steps lists by itself."""
    model = net()
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **{form: True})
    with pytest.raises(UnsupportedPolicy, match=r"2 of 4 in one group are DTensors.* foreach=False"):
        xamp.initialize(model, optimizer, level="O2", verbosity=0)
    model(torch.ones(4, 8)).sum().backward()
    with pytest.raises((RuntimeError, AssertionError), match=r"mixed torch\.Tensor and DTensor|no DeviceMesh"):
        optimizer.step()
    assert all(torch.equal(whole(a), whole(b)) for a, b in zip(before, model.parameters(), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    xamp.initialize(model, optimizer, level="O2", verbosity=0)
    train(model, optimizer)
    assert not any(torch.equal(whole(a), whole(b)) for a, b in zip(before, xamp.master_params(optimizer), strict=True))


def distributed_optim() -> Any:
    """The module, which warns of parts of its own when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("torch.distributed.optim")


@pytest.mark.parametrize("level", LEVELS)
def test_a_zero_that_steps_in_the_backward(level: str) -> None:
    model = net()
    told: dict[str, Any] = {"lr": 0.1, "overlap_with_ddp": True}
    optimizer = distributed_optim().ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **told)
    if level in levels_where(lambda row: row.manages_gradients):
        with pytest.raises(UnsupportedPolicy, match=r"overlap_with_ddp=True\) steps in the backward"):
            xamp.initialize(model, optimizer, level, verbosity=0)
    else:
        xamp.initialize(model, optimizer, level, verbosity=0)
        xamp.session(optimizer).close()


@pytest.mark.parametrize("level", LEVELS)
def test_parameters_with_optimizers_of_their_own(level: str) -> None:
    model = net()
    distributed_optim()._apply_optimizer_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    if level in levels_where(lambda row: row.manages_gradients):
        with pytest.raises(UnsupportedPolicy, match=r"parameter '0\.weight' .* steps in the backward"):
            xamp.initialize(model, optimizer, level, verbosity=0)
    else:
        xamp.initialize(model, optimizer, level, verbosity=0)


@pytest.mark.parametrize("level", MASTERS)
def test_what_replicate_has_run(level: str) -> None:
    for has_run in (False, True):
        model = replicate(net())
        if has_run:
            model(torch.ones(2, 8)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if has_run:
            with pytest.raises(StateError, match=r"replicate\(\) has run this .* before the first forward"):
                xamp.initialize(model, optimizer, level, verbosity=0)
        else:
            xamp.initialize(model, optimizer, level, verbosity=0)


def test_torchs_average_of_a_divided_model_is_fp32() -> None:
    model = parallelize_module(net(), init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    assert {p.dtype for p in average.parameters()} == {torch.float32}
    local = [p._local_tensor if hasattr(p, "_local_tensor") else p for p in average.parameters()]
    assert {p.dtype for p in local} == {torch.float32}
    assert average(torch.ones(2, 8)).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_whole_compiled_step_of_shards(level: str) -> None:
    def losses(is_compiled: bool) -> list[float]:
        compiling.forget()
        model = shard(net(), "fsdp2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        xamp.initialize(model, optimizer, level, init_scale=1024.0, verbosity=0)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            xamp.clip_grad_norm_(optimizer, 0.1)
            optimizer.step()
            return loss.detach()

        run: Any = torch.compile(step, backend="aot_eager" if level == "O2" else "eager") if is_compiled else step
        batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(4)]
        return [float(run(x)) for x in batches]

    eager, compiled = losses(is_compiled=False), losses(is_compiled=True)
    assert compiled == pytest.approx(eager, rel=1e-2)


@pytest.mark.parametrize("how", ["whole", "fsdp1", "fsdp2", "tensor"])
def test_what_a_backward_left_before_an_exception_is_dropped_with_what_it_was_added_to(how: str) -> None:
    model = net()
    if how == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "2": ColwiseParallel()})
    elif how != "whole":
        model = shard(model, how)  # type: ignore[assignment]
    optimizer = start(model, "O1")
    for fails in (False, True):
        with (
            contextlib.suppress(KeyError),
            xamp.scale_loss(model(torch.ones(4, 8)).square().mean(), optimizer) as scaled,
        ):
            scaled.backward()
            if fails:
                raise KeyError
    assert [param.grad for param in optimizer.param_groups[0]["params"]] == [None] * 4


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
def test_an_average_of_shards_is_not_copied(how: str) -> None:
    model = shard(net(), how)
    start(model, "O1")
    average = xamp.ema(model, 0.5)
    with pytest.raises(StateError, match=r"average\.copy\(\): FSDP shards the model.*average\.swapped\(\)"):
        average.copy()
    with average.swapped():
        model(torch.ones(4, 8))


class InDouble(nn.Module):
    """Computes in fp64, and notes in which dtype its weight was gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2).double()
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.linear.weight.dtype)
        made: torch.Tensor = self.linear(x.double())
        return made.float()


@pytest.mark.parametrize("level", MASTERS)
def test_a_unit_in_fp64_is_gathered_in_fp64(level: str) -> None:
    torch.manual_seed(1)
    inner = InDouble()
    model = nn.Sequential(nn.Linear(8, 8), inner)
    shard(inner, "fsdp2")
    shard(model, "fsdp2")
    optimizer = start(model, level)
    with xamp.scale_loss(model(torch.ones(2, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert set(inner.seen) == {torch.float64}


@pytest.mark.parametrize("level", OPERATORS)
def test_what_fsdp2_is_told_to_end_at_a_later_backward_is_waited_for(level: str) -> None:
    torch.manual_seed(1)
    model: Any = shard(net(), "fsdp2")
    optimizer = start(model, level, loss_scale="dynamic")
    model.set_is_last_backward(False)
    with xamp.scale_loss(model(torch.ones(2, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(StateError, match="still scaled, because the wrapper's no_sync postponed its reduction"):
        optimizer.step()
    model.set_is_last_backward(True)
    with xamp.scale_loss(model(torch.ones(2, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert xamp.session(optimizer).last_step is xamp.StepOutcome.APPLIED
