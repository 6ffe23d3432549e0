"""``prepare``: training with Hugging Face's accelerate at any level of xamp.

::

    from xamp.integrations.accelerate import prepare

    accelerator = Accelerator()  # without mixed_precision
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader, level="O2")

Everything after it stays as it is: ``accelerator.backward``, ``accelerator.clip_grad_norm_``,
``accelerator.accumulate``, ``accelerator.save_state`` and ``load_state``, which then hold xamp's state too.

What it cannot do: FSDP, DeepSpeed and Megatron as accelerate's plugins, which bring their own mixed precision; an
optimizer that needs a closure at levels with a loss scale or masters. ``accelerator.optimizer_step_was_skipped`` stays
False; ``xamp.session(optimizer).last_step`` tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import PolicyError, UnsupportedPolicy
from xamp.scaling.masters import master_of
from xamp.sessions.clipping import clip_grad_norm_, clip_grad_value_
from xamp.sessions.initialize import initialize
from xamp.sessions.scale_loss import scale_loss
from xamp.sessions.session import session

__all__ = ["drive", "prepare"]

_OWN_ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


def prepare(accelerator: Any, *objects: Any, **settings: Any) -> Any:
    """Put the models and optimizers among ``objects`` under a level, then call ``accelerator.prepare``.

    Args:
        accelerator: an ``accelerate.Accelerator`` without mixed precision of its own.
        *objects: what ``accelerator.prepare`` takes. Models and optimizers must come in one call.
        **settings: the arguments of :func:`xamp.initialize`, such as ``level="O2"``.

    Returns:
        What ``accelerator.prepare`` returns.

    Raises:
        PolicyError: the accelerator has a mixed precision of its own, or there is no model.
        UnsupportedPolicy: the accelerator's plugin brings an engine of its own.
    """
    check_free(accelerator, "prepare(accelerator, ...)")
    models = [found for found in objects if isinstance(found, nn.Module)]
    optimizers = [found for found in objects if isinstance(found, Optimizer)]
    if not models:
        raise PolicyError("prepare(accelerator, ...): no model is among the objects. Give models and optimizers here.")
    for model in models:
        if accelerator.device_placement:
            model.to(accelerator.device)
    initialize(models, optimizers or None, **settings)
    if optimizers:
        drive(accelerator, optimizers)
        accelerator.register_for_checkpointing(session(optimizers[0]))
    return accelerator.prepare(*objects)


def check_free(accelerator: Any, call: str) -> None:
    """Refuse an accelerator that would do xamp's work too."""
    own = str(accelerator.mixed_precision)
    if own != "no":
        raise PolicyError(
            f"{call}: the Accelerator has mixed_precision={own!r}, and would cast and scale a second time. Make it "
            "with mixed_precision='no' (also in `accelerate config`, and fp16=False, bf16=False for a Trainer)."
        )
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in _OWN_ENGINES:
        raise UnsupportedPolicy(
            f"{call}: accelerate runs with {kind}, which has mixed precision of its own. Choose it there, or let "
            "accelerate use DistributedDataParallel."
        )


def drive(accelerator: Any, optimizers: Sequence[Optimizer]) -> None:
    """Make ``backward`` and ``clip_grad_norm_`` of ``accelerator`` work on ``optimizers``, which xamp manages."""
    base = type(accelerator)

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        with scale_loss(loss, optimizers) as scaled:
            base.backward(accelerator, scaled, **kwargs)

    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return clip_grad_norm_(_holders(parameters, optimizers), max_norm, norm_type)

    def clip_value(parameters: Any, clip_value: float) -> None:
        for optimizer in _holders(parameters, optimizers):
            clip_grad_value_(optimizer, clip_value)

    accelerator.backward, accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = backward, clip, clip_value


def _holders(parameters: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return those of ``optimizers`` that step one of ``parameters``, or its master; all where none does."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    own = {id(p) for p in given}
    own |= {id(master) for p in given if (master := master_of(p)) is not None}
    found = [o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
    return found or list(optimizers)
