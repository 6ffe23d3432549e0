"""What xamp must know of DistributedDataParallel (DDP): which there are, and what each does with gradients.

A user may put DDP around a model at any time, and DDP leaves no trace in the model or its parameters. So xamp notes a
DDP while it runs the forward of a model, or where a call is given one.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.errors import StateError
from xamp.policy import Policy, levels_where, listed
from xamp.torch_compat.compiler import keep_eager
from xamp.torch_compat.torch_private.distributed import active_ddp, composed_states
from xamp.values.log import say
from xamp.values.own_hooks import keep_from_pickles

__all__ = [
    "around",
    "averages",
    "end",
    "has_replicated",
    "held",
    "note_given",
    "note_wrapper",
    "note_wrapper_while_tracing",
    "noted",
    "postpones",
    "reduced",
    "refuse_join",
    "search",
    "warn_of_memory",
]

_STAGE = "torch.distributed.pipelining.stage"
_AVERAGING = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")
"""The functions of torch's default_hooks."""
_MEMORY = ("use_error_feedback", "warm_start")
"""What the state of a comm hook calls it that it keeps numbers for the next backward."""

noted: Any = WeakIdKeyDictionary()
"""By DDP: whether its last forward with gradients enabled asked for a reduction. None: ask the DDP when needed."""
_ended: Any = WeakIdKeyDictionary()
"""The DDPs that reduce nothing any more; see :func:`end`."""


@keep_eager
def note_wrapper() -> None:
    """Remember the DDP that runs a forward now, and whether the backward will reduce: DDP decides that in forward."""
    ddp = active_ddp()
    if ddp is not None:
        note_forward(ddp)


@keep_eager
def note_forward(ddp: Any, args: object = None) -> None:
    """Remember ``ddp`` at its forward, also as its hook, which gets the arguments too."""
    del args
    if torch.is_grad_enabled():
        noted[ddp] = bool(ddp.require_backward_grad_sync) or _in_pipeline()


def _in_pipeline() -> bool:
    """Return whether a pipeline stage runs this forward: in ``no_sync``, and reduces after the last micro-batch.

    It tells DDP's reducer of that directly, before the last backward, so that no forward of DDP's ever does.
    """
    if _STAGE not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != _STAGE:
        frame = frame.f_back
    return frame.f_globals.get("__name__") == _STAGE


def note_wrapper_while_tracing(identity: int) -> None:
    """Remember the DDP while a forward is compiled. The graph will not call this again, so a hook notes the next ones.

    No graph contains the hook, because the compiler cannot trace how DDP runs its module. ``identity`` is the ``id`` of
    that DDP: that the caller has asked for it binds the graph to this DDP, and another one is compiled anew.
    """
    del identity
    ddp = active_ddp()
    if ddp is not None:
        note_forward(ddp)
        if note_forward not in ddp._forward_pre_hooks.values():
            ddp.register_forward_pre_hook(note_forward)
            keep_from_pickles(ddp._forward_pre_hooks, lambda hook: hook is note_forward)


# torch.compiler.assume_constant_result sets this attribute: the compiler runs the function while it traces, and takes
# the result as a constant. Calling the decorator would import the compiler with every import of xamp.
note_wrapper_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def note_given(wrapper: object) -> None:
    """Remember ``wrapper`` if it is a DDP. Whether it reduces is read from it when needed."""
    if isinstance(wrapper, DistributedDataParallel) and wrapper not in noted:
        noted[wrapper] = None


def search(params: Iterable[torch.Tensor]) -> list[Any]:
    """Return the DDPs that hold any of ``params``, where none was noted. This searches all objects."""
    ids = {id(p) for p in params}
    kinds: list[type] = [DistributedDataParallel]
    for kind in kinds:  # which grows
        kinds += kind.__subclasses__()
    # An object refers to its class. This takes half the time of going through gc.get_objects().
    found: list[Any] = [each for each in gc.get_referrers(*kinds) if any(type(each) is kind for kind in kinds)]
    ddps = (ddp for ddp in found if "reducer" in vars(ddp))  # none whose making has failed
    return [ddp for ddp in ddps if any(id(p) in ids for p in ddp.module.parameters())]


def held(ddp: Any) -> set[int]:
    """Return the ids of the parameters in ``ddp``, without those that it was told to ignore."""
    ignored: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}


def reduced(ddp: Any) -> set[int]:
    """Return the ids of the parameters whose gradients ``ddp`` reduces; empty where it does not tell.

    It took those that required a gradient when it was made, and tells how many. If others do now, nobody knows which.
    """
    taken = held(ddp)
    trained = {id(p) for p in ddp.module.parameters() if p.requires_grad} & taken
    return trained if len(trained) == ddp._get_ddp_logging_data().get("num_parameter_tensors") else set()


def around(params: Iterable[torch.Tensor]) -> dict[Any, set[int]]:
    """Return the DDPs that reduce gradients of any of ``params``, or may, each with the ids of all that it reduces.

    Once such a parameter gets another dtype, DDP reduces its gradient no more, and nothing says so: its hook was on the
    node that adds gradients up, and torch makes that anew. This searches all objects.
    """
    params = list(params)
    if not search(params):
        return {}
    gc.collect()  # those of an earlier session that nobody holds any more
    ids = {id(p) for p in params}
    found = {ddp: reduced(ddp) or held(ddp) for ddp in search(params) if ddp not in _ended}
    return {ddp: taken for ddp, taken in found.items() if not ids.isdisjoint(taken)}


def end(ddps: Iterable[Any]) -> None:
    """Remember that ``ddps`` reduce nothing any more: their parameters were given another dtype."""
    for ddp in ddps:
        _ended[ddp] = True
        noted.pop(ddp, None)


def has_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` has run the forward of ``module``: so has its DDP, which is no module."""
    return any(hasattr(state, "_ddp_weakref") and state.has_initialized for state in composed_states(module))


def postpones(ddp: Any) -> bool:
    """Return whether ``ddp`` has yet to reduce the gradients of its last backward."""
    reduces = noted.get(ddp)
    return not (ddp.require_backward_grad_sync if reduces is None else reduces)


def averages(ddp: Any) -> bool:
    """Return whether ``ddp`` gives all its ranks the same gradients: it has no comm hook, or one that averages."""
    for hook, state in ddp._comm_hooks:  # those that are registered by an enumerator average too, and are not in it
        is_own = getattr(hook, "__module__", "").endswith("ddp_comm_hooks.default_hooks")
        averages = is_own and getattr(hook, "__name__", "") in _AVERAGING and state in (None, ddp.process_group)
        if not averages:
            return False
    return True


def warn_of_memory(ddps: Iterable[DistributedDataParallel]) -> None:
    """Warn of each comm hook that keeps numbers of one backward for the next, as PowerSGD does.

    After one overflow they hold inf or nan, and so do all gradients from then on.
    """
    for ddp in ddps:
        for hook, state in ddp._comm_hooks:
            kept = [name for name in _MEMORY if getattr(state, name, False)]
            if kept:
                say(
                    "DistributedDataParallel has the comm hook %s with %s, which keeps parts of each gradient for the "
                    "next backward. After one overflow these are inf or nan, and every later step is skipped. Make its "
                    "state as PowerSGDState(..., use_error_feedback=False, warm_start=False), or use a level without "
                    "loss scaling.",
                    getattr(hook, "__name__", type(hook).__name__),
                    " and ".join(f"{name}=True" for name in kept),
                    level=logging.WARNING,
                )


def refuse_join(policy: Policy, has_masters: bool, optimizers: Iterable[Optimizer]) -> None:
    """Raise a StateError under torch's ``Join`` where the level has a moving scale or masters, or an optimizer joins.

    At its end ``Join`` gives all ranks the weights of the last one, and neither its scale nor its masters. An optimizer
    that joins is stepped by ``Join`` itself, with the gradients of the rank's last batch.
    """
    unmanaged = listed(levels_where(lambda row: not row.manages_gradients), "and")  # these leave gradients as they are
    joining = [one for one in optimizers if getattr(getattr(one, "_join_config", None), "enable", False)]
    if joining and policy.manages_gradients:
        raise StateError(
            f"scale_loss: this {type(joining[0]).__name__} is under torch's Join, which steps it on a rank that has "
            f"run out of batches, with gradients that came through no scale_loss. At level {policy.level} give Join "
            "the DistributedDataParallel alone, with an optimizer that every rank has whole, or give every rank as "
            f"many batches as the others; or use level {unmanaged}."
        )
    if policy.dynamic or has_masters:
        what = "a dynamic loss scale" if policy.dynamic else "master weights"
        raise StateError(
            f"scale_loss: the model's DistributedDataParallel is under torch's Join, and level {policy.level} has "
            f"{what}. A rank that runs out of batches would miss what the others make of it, and the ranks would part. "
            "Give every rank as many batches as the others (DistributedSampler(..., drop_last=True)) and leave Join "
            f"out; or use level {unmanaged}, or O1 with a static scale, such as initialize(..., loss_scale=1024.0)."
        )
