"""Arguments whose ``repr``, ``float``, ``len`` or ``==`` raises or lies: typed errors, and nothing has changed.

Covers: xamp.sessions.initialize, xamp.sessions.formats, xamp.sessions.clipping, xamp.values.shown.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from snapshot import Snapshot
from torch import nn

import xamp
from xamp.errors import CheckpointError, PolicyError, StateError, XampError


class Hostile:
    """Raises whatever it is asked."""

    def _raise(self, *_: object) -> Any:
        raise OSError("hostile")

    __repr__ = __str__ = __float__ = __int__ = __index__ = __len__ = __bool__ = __iter__ = __eq__ = __lt__ = _raise
    __getitem__ = __contains__ = _raise
    __hash__ = None  # type: ignore[assignment]


class Listed(list):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise OSError("hostile")

    def __repr__(self) -> str:
        raise OSError("hostile")


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


ARGUMENTS = [
    *("loss_scale", "dtype", "keep_batchnorm_fp32", "keep_fp32", "master_weights", "cast_model_inputs"),
    *("cast_model_outputs", "methods", "num_losses", "init_scale", "growth_factor", "backoff_factor"),
    *("growth_interval", "min_loss_scale", "max_loss_scale", "on_static_overflow", "op_policy", "fused"),
    *("delegate", "enabled", "verbosity", "opt_level", "level", "backend"),
]


@pytest.mark.parametrize("value", [Hostile(), Listed([1])], ids=["object", "list"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_hostile_argument_is_a_typed_error(name: str, value: object) -> None:
    model, optimizer = made()
    before = Snapshot(model, optimizer)
    arguments: dict[str, Any] = {"level": "O2", name: value}
    with pytest.raises(XampError):
        xamp.initialize(model, optimizer, **arguments)
    before.assert_same()


def test_hostile_lists_of_models() -> None:
    model, optimizer = made()
    for models, optimizers in ((Listed([model]), optimizer), (model, Listed([optimizer])), (Hostile(), optimizer)):
        with pytest.raises(PolicyError):
            xamp.initialize(models, optimizers, level="O2")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["x", None, [1.0], Hostile()], ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
def test_a_norm_that_is_no_number(name: str, value: Any) -> None:
    model, optimizer = made()
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    with xamp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    before = Snapshot(model, optimizer)
    with pytest.raises(PolicyError, match=rf"^clip_grad_norm_\({name}=.*must be a number"):
        xamp.clip_grad_norm_(optimizer, **{"max_norm": 1.0, name: value})
    before.assert_same()
    assert xamp.clip_grad_norm_(optimizer, 1.0, "inf") > 0  # type: ignore[arg-type]  # as torch takes it


class Mapped(dict):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        raise OSError("hostile")

    keys = __contains__ = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "state",
    [
        Hostile(),
        Mapped(scale=1.0),
        {"scale": Hostile(), "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "_growth_tracker": 0},
        {"format": Hostile(), "schema": Hostile()},
        {"format": "xamp", "schema": 10**10000},
        {Listed: 1, "x": 2},
    ],
    ids=["object", "mapping", "number", "format", "schema", "key"],
)
def test_a_hostile_state_is_refused_and_nothing_was_loaded(state: Any) -> None:
    model, optimizer = made()
    xamp.initialize(model, optimizer, "O2", verbosity=0)
    before = Snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=r"Nothing was loaded\.$"):
        xamp.load_state_dict(state, model)
    before.assert_same()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_session_says_that_it_cannot_be_pickled(level: str) -> None:
    model, optimizer = made()
    xamp.initialize(model, optimizer, level, verbosity=0)
    found = xamp.session(model)
    for call in (lambda: pickle.dumps(found), lambda: copy.copy(found), lambda: copy.deepcopy(found)):
        with pytest.raises(StateError, match=r"cannot be pickled or copied\. Save session\.state_dict\(\)"):
            call()
