"""``xamp.fsdp_policy``: a level in the words of ``fully_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xamp.errors import UnsupportedPolicy
from xamp.policy import levels_where, listed, parse_level
from xamp.scaling import fsdp

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["fsdp_policy"]


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
    row = parse_level(level)  # None: "auto" means one of the levels that leave parameters in fp32
    if row is not None and row.steps_lower:
        raise UnsupportedPolicy(
            f"fsdp_policy(level={row.name!r}): there the optimizer steps parameters of the lower precision, and FSDP "
            f"keeps fp32 shards. Use {listed(levels_where(lambda other: other.master_weights))}."
        )
    if row is None or row.dtype is None or not row.casts_parameters:
        return fsdp.mixed_precision(None, cast_forward_inputs=False)  # type: ignore[no-any-return]
    dtype: torch.dtype = getattr(torch, row.dtype)
    return fsdp.mixed_precision(dtype, output_dtype=torch.float32, cast_forward_inputs=True)  # type: ignore[no-any-return]
