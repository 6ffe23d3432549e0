"""What the wrappers of a session tell of its ranks, in a process group of one rank.

Covers: xamp.distributed.wrappers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from one_rank import one_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.distributed import ddp
from xamp.distributed.wrappers import Wrappers


def test_ranks_meet_by_the_names_in_the_ddps_that_hold_their_parameters() -> None:
    """A DDP of another model, which one rank may still have, does not count."""
    model, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Conv1d(1, 1, 1)
    with one_rank():
        part, strange = DistributedDataParallel(model[1]), DistributedDataParallel(other)
        wrappers = Wrappers([weakref.ref(model)], None)
        group, params = part.process_group, list(model.parameters())
        assert wrappers.names_within(group, params, [part, strange]) == ["bias", "weight"]
        assert wrappers.names_within(group, params, [strange]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert wrappers.names_within(group, list(other.parameters()), [strange]) == ["bias", "weight"]


def test_a_wrapper_that_scale_loss_is_given_is_known_without_a_forward() -> None:
    """All of it may be compiled."""
    with one_rank():
        net: Any = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        wrapper = DistributedDataParallel(net)
        xamp.initialize(net, optimizer, level="O1", verbosity=0)
        assert wrapper not in ddp.noted
        with xamp.scale_loss(net(torch.ones(1, 2)).float().sum(), optimizer, model=wrapper) as scaled:
            scaled.backward()
        assert wrapper in ddp.noted
        optimizer.step()


def test_a_parameter_of_no_model_is_not_lost_by_sharding() -> None:
    model = nn.Linear(2, 2)
    assert Wrappers([weakref.ref(model)], None).lost([nn.Parameter(torch.ones(1))], lambda _: None) == []
