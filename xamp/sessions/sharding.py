"""Levels and sessions under torch's sharding: ``xamp.fsdp_policy``, and ``torch.distributed.checkpoint.state_dict``.

The functions of that module (``get_state_dict``, ``set_optimizer_state_dict`` and others) name an optimizer's state by
the parameters of the model, which they look up in ``param_groups``. They are given a view of the optimizer in which
each master's place is taken by its parameter. Optimizers without masters pass unchanged.

With ``full_state_dict`` or ``broadcast_from_rank0`` they write what they load into the shards of the model's own
parameters first. In the place of a low-precision one they are given its fp32 values.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from xamp.distributed import fsdp
from xamp.errors import UnsupportedPolicy
from xamp.policy import levels_where, listed, parse_level
from xamp.scaling import masters
from xamp.scaling.optimizer import state_of

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["fsdp_policy", "wrap_states"]


def fsdp_policy(level: str = "auto") -> MixedPrecisionPolicy:
    """Return ``level`` as torch's ``MixedPrecisionPolicy`` for ``fully_shard``.

    ::

        policy = xamp.fsdp_policy("O2")
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = xamp.initialize(model, optimizer, level="O2")

    At O2 and O5 the sharded parameters stay fp32 and are the masters. FSDP gathers them in fp16 or bf16, casts inputs
    to that and outputs to fp32, and adds gradients up in fp32. At O0, O1 and O4 FSDP casts nothing. ``initialize`` sets
    the same where ``fully_shard`` was given no policy; it also does what no policy can: inside the model, no output is
    cast to fp32 and back, and arguments and outputs are cast as ``cast_model_inputs`` and ``cast_model_outputs`` say.

    Args:
        level: as for ``initialize``.

    Raises:
        PolicyError: no level has that name.
        UnsupportedPolicy: the level has no masters, so its shards would not be fp32.
    """
    row = parse_level(level, call="fsdp_policy")  # None: "auto" means one of the levels that leave parameters in fp32
    if row is not None and row.steps_lower:
        raise UnsupportedPolicy(
            f"fsdp_policy(level={row.name!r}): there the optimizer steps parameters of the lower precision, and FSDP "
            f"keeps fp32 shards. Use {listed(levels_where(lambda other: other.master_weights))}."
        )
    if row is None or row.dtype is None or not row.casts_parameters:
        return fsdp.mixed_precision(None, cast_forward_inputs=False)  # type: ignore[no-any-return]
    dtype: torch.dtype = getattr(torch, row.dtype)
    return fsdp.mixed_precision(dtype, output_dtype=torch.float32, cast_forward_inputs=True)  # type: ignore[no-any-return]


_TAKE_OPTIMIZERS = ("_get_optim_state_dict", "_load_optim_state_dict")
_FILL_TENSORS = ("_broadcast_state_dict", "_distribute_state_dict")


class _View:
    """An optimizer that holds masters, as if it held the parameters themselves: in ``param_groups`` and ``state``."""

    def __init__(self, optimizer: Any, param_of: dict[int, Any]) -> None:
        self._optimizer = optimizer
        self.param_groups = [
            {**group, "params": [param_of.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups
        ]
        # Never empty: torch makes a state where there is none, by a step.
        self.state = collections.defaultdict[Any, Any](dict, {"is made": True})
        self.state.update((param_of.get(id(p), p), state) for p, state in optimizer.state.items())

    def __getattr__(self, name: str) -> Any:  # state_dict and load_state_dict
        return getattr(self._optimizer, name)


def wrap_states(module: Any) -> None:
    """Wrap the functions of ``torch.distributed.checkpoint.state_dict`` that look parameters up or fill them."""
    for names, wrapper in ((_TAKE_OPTIMIZERS, _with_views), (_FILL_TENSORS, _with_exact)):
        for name in names:
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "_xamp_inner"):
                wrapped: Any = functools.wraps(function)(wrapper(module, function))
                wrapped._xamp_inner = function
                setattr(module, name, wrapped)


def _with_views(module: Any, function: Any) -> Any:
    def wrapped(model: Any, optimizers: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        return function(model, tuple(_view_of(module, one) for one in optimizers), *args, **kwargs)

    return wrapped


def _with_exact(_: Any, function: Any) -> Any:
    def wrapped(loaded: Any, held: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        for key, value in held.items():
            if masters.is_low_precision(value):  # a copy: should the load fail, the master is what it was
                held[key] = masters.exact(value).detach().clone()
        return function(loaded, held, *args, **kwargs)

    return wrapped


def _view_of(module: Any, optimizer: Any) -> Any:
    state = state_of(optimizer)
    if state is None or not state.gradients.params.pairs:
        return optimizer
    module._init_optim_state(optimizer)  # what torch itself does first, and here to the masters
    return _View(optimizer, {id(master): param for param, master in state.gradients.params.pairs})
