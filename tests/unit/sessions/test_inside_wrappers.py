"""A DDP, or an FSDP1, that has the model inside it and was not given to ``initialize``: nothing in the model tells.

Covers: xamp.sessions.checks, xamp.distributed.ddp.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_warnings
from one_rank import one_rank
from snapshot import Snapshot
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.apex import amp
from xamp.distributed import ddp as ddps
from xamp.errors import StateError
from xamp.policy import levels_where
from xamp.sessions.session import end_session

pytestmark = torch_warnings.FSDP1

CAST = levels_where(lambda row: row.casts_parameters)
PLAIN = levels_where(lambda row: not row.casts_parameters)


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with one_rank():
        yield


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def start(model: nn.Module, level: str) -> Any:
    """The session of ``model`` and a new optimizer."""
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level, verbosity=0)
    return xamp.session(optimizer)


def refuses(model: nn.Module, level: str, message: str) -> None:
    optimizer = sgd(model)
    before = Snapshot(model, optimizer)
    with pytest.raises(StateError, match=message):
        xamp.initialize(model, optimizer, level, verbosity=0)
    before.assert_same()


WRAPPED = r"DistributedDataParallel already wraps this .* bare model and wrap what it returns, and delete a wrapper"


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("has_run", [False, True])
def test_a_ddp_around_the_model_or_more(has_run: bool, level: str) -> None:
    model = net()
    ddp = DistributedDataParallel(model)
    assert ddp.module is model
    if has_run:
        ddp(torch.ones(2, 8)).sum().backward()
    for inside in (model, model[0]):
        refuses(inside, level, WRAPPED)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_under_apex_too(level: str) -> None:
    """The real Apex takes it, and then no gradient is reduced."""
    model = net()
    ddp = DistributedDataParallel(model)
    before = Snapshot(model)
    if level == "O1":
        assert amp.initialize(ddp.module, sgd(model), opt_level=level, verbosity=0)[0] is model
        xamp.session(model).close()
        return
    with pytest.raises(StateError, match=WRAPPED):
        amp.initialize(ddp.module, sgd(model), opt_level=level, verbosity=0)
    before.assert_same()


@pytest.mark.parametrize("level", PLAIN)
def test_levels_that_do_not_cast_take_it(level: str) -> None:
    ddp = DistributedDataParallel(net())
    assert start(ddp.module, level).policy.level == level


@pytest.mark.parametrize("level", CAST)
def test_what_replicate_has_run_with_more_around(level: str) -> None:
    whole: Any = replicate(net())
    whole(torch.ones(2, 8)).sum().backward()
    refuses(whole[0], level, WRAPPED)


def test_what_the_ddp_does_not_reduce_is_taken() -> None:
    whole = nn.ModuleList([net().requires_grad_(False), net(), net()])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        *(whole, [name for name, _ in whole.named_parameters() if name.startswith("1.")])
    )
    ddp = DistributedDataParallel(whole)
    xamp.initialize(whole[0], None, "O3", verbosity=0)
    start(whole[1], "O2")
    refuses(whole[2], "O2", WRAPPED)
    assert ddp.module is whole


def test_which_gradients_a_ddp_is_known_to_reduce() -> None:
    model = net()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    assert ddps.reduced(ddp) == {id(p) for p in model[2].parameters()}
    model[0].requires_grad_(True)
    assert ddps.reduced(ddp) == set()


def test_what_was_frozen_since_is_refused() -> None:
    """DDP does not tell which parameters it took, and these may be among them."""
    whole = nn.ModuleList([net(), net()])
    ddp = DistributedDataParallel(whole)
    whole[0].requires_grad_(False)
    refuses(whole[0], "O2", WRAPPED)
    assert ddp.module is whole


def test_a_ddp_that_nobody_holds_any_more() -> None:
    model = net()
    ddp: Any = DistributedDataParallel(model)
    ddp.__dict__["itself"] = ddp
    del ddp
    assert start(model, "O2")


def test_a_ddp_that_could_not_be_made() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(RuntimeError, match="any parameter that requires a gradient") as kept:
        DistributedDataParallel(model)
    model.requires_grad_(True)
    assert start(model, "O2")
    assert kept.tb is not None


@pytest.mark.parametrize("level", CAST)
def test_close_tells_of_a_ddp_once_and_it_is_in_nobodys_way(level: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    session = start(model, level)
    ddp = DistributedDataParallel(model)
    with caplog.at_level(logging.WARNING, "xamp"):
        session.close()
        session.close()
    (told,) = caplog.messages
    assert "To train on, wrap the model again: DistributedDataParallel(model)." in told
    caplog.clear()
    with caplog.at_level(logging.WARNING, "xamp"):
        start(ddp.module, level).close()  # the old one is there still
    assert caplog.messages == []


@pytest.mark.parametrize("how", ["no ddp", "a ddp of the past", "a level that casts nothing", "wrapped again"])
def test_close_says_nothing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    session = start(model, "O1" if "casts nothing" in how else "O2")
    ddp = None if how == "no ddp" else DistributedDataParallel(model)
    if "past" in how:
        ddp = None
        gc.collect()
    with caplog.at_level(logging.WARNING, "xamp"):
        if how == "wrapped again":
            assert end_session(session.engine)  # as the adapters do, whose library makes the DDP anew
        else:
            session.close()
    assert caplog.messages == []
    assert ddp is None or ddp.module is model


def sharded(model: nn.Module, original: bool) -> FullyShardedDataParallel:
    strategy = ShardingStrategy.NO_SHARD  # what FSDP1 does with one rank
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=original
    )


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.fsdp")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.fsdp")
@pytest.mark.parametrize("level", [*CAST, *PLAIN])
@pytest.mark.parametrize("original", [True, False])
def test_the_inside_of_fsdp1(original: bool, level: str) -> None:
    whole = sharded(net(), original)
    if level in CAST:
        refuses(whole.module, level, r"Give xamp\.initialize the FullyShardedDataParallel module itself; O0, O1 and O4")
    else:
        assert start(whole.module, level).policy.level == level


@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.fsdp")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.fsdp")
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_parts_that_fsdp1_shards_are_taken(level: str) -> None:
    model = net()
    model[2] = sharded(model[2], original=True)
    optimizer = sgd(model)
    xamp.initialize(model, optimizer, level, verbosity=0)
    with xamp.scale_loss(model(torch.ones(2, 8)).square().mean(), optimizer) as scaled:
        scaled.backward()
    assert {p.dtype for p in model[0].parameters()} == {torch.float16 if level == "O2" else torch.bfloat16}
    assert {p.dtype for p in model[2].parameters()} == {torch.float32}
