"""Steps over lists of tensors in one pass, where the kernels of :mod:`xamp.onepass` can run.

The tables of a step are kept for the next one with the same tensors. They hold its tensors' memory, so they are let go
with what the optimizer owns: the first of its states, or the first parameter where there are none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from xamp import onepass
from xamp.onepass.rules import unread
from xamp.plans import available
from xamp.plans.graphs import begin_in_graph, plan_for_graphs
from xamp.registry.causes import NotNow
from xamp.registry.fused_classes import is_right
from xamp.registry.registry import HOST
from xamp.torch_compat import pieces
from xamp.torch_compat.pieces import Lists, Piece
from xamp.torch_compat.torch_private import operators
from xamp.values.log import say

__all__ = ["are_alike", "found_inf", "is_capturing", "is_one", "may_run", "norm", "prepared", "scale_", "step"]

_KNOWN = (torch.float32, torch.float16, torch.bfloat16)

_FUSED: Mapping[tuple[str, bool], Any] = {
    ("sgd", False): torch.optim.SGD,
    ("adam", False): torch.optim.Adam,
    ("adam", True): torch.optim.AdamW,
}

_on_host = False
"""Whether tensors of the host are stepped too, by Triton's interpreter: set by tests only."""

_plans: Any = WeakIdKeyDictionary()
"""By what lets plans go, for each rule: what :func:`_kept_of` returns."""

_TENSOR: Any = torch.Tensor
_DTYPE = operator.attrgetter("dtype")


def step(*given: Any, **options: Any) -> bool:
    """Do what :func:`prepared` returns for the same arguments; return False, and change nothing, where that is None."""
    run = prepared(*given, **options)
    if run is not None:
        run()
    return run is not None


def prepared(
    rule: onepass.Rule,
    lists: Lists,
    numbers: Mapping[str, Any],
    counted: tuple[Any, Any] = (1, False),
    copies: Lists = (),
    skip: torch.Tensor | None = None,
    scale: Any = None,
    divisor: torch.Tensor | None = None,
) -> Callable[[], None] | None:
    """Return what steps parameters and states in one pass; None where the kernels cannot, and then nothing changes.

    A graph that is being captured can hold it where an earlier step of the same tensors was taken so.

    Args:
        rule: what is computed.
        lists: gradients, parameters, and the states in the order of the rule.
        numbers: the options, by the names that torch's fused kernels give them.
        counted: the count of this step, from 1, a number or a tensor, and whether the moments' bias is corrected by it.
        copies: lists of tensors that the new parameters are written to, besides; the kernels take one at most.
        skip: where this is not zero, on the device, nothing changes.
        scale: a number or a tensor; the gradients are multiplied by it first.
        divisor: one element; the gradients are divided by it first.
    """
    if not len(lists[0]) or len(copies) > 1 or not may_run(device := lists[1][0].device):
        return None
    grads, owner = lists[0], lists[min(2, len(lists) - 1)][0]
    stepped = [*itertools.chain(*lists[1:], *copies)]
    plan, versioned = _kept_of(rule, [*lists[1:], *copies], stepped, len(copies), owner)[:2]
    options = _options(numbers) | {"step": counted[0], "bias_correction": counted[1]}
    if plan is None or not _are_plain(grads) or not plan.suits(grads):
        return None
    if why := unread(options, device):
        _tell(rule.name, device.type, why)
        return None
    if is_capturing(device) and not begin_in_graph(plan, owner):
        return None

    def run() -> None:
        factor = None if divisor is None else _scalar(divisor, device).reciprocal()
        plan.step(
            grads,
            [options],
            None if (flag := found_inf(skip)) is None else _scalar(flag, device),
            None if scale is None or is_one(scale) else _scalar(scale, device),
            factor,
        )
        # What keeps copies of a tensor asks for its version, which kernels do not raise.
        written = stepped if versioned else [tensor for tensor in stepped if not tensor.is_inference()]
        torch.autograd.graph.increment_version(written)

    return run


def norm(owner: object, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the L2 norm over ``grads``, fp32, shape ``[1]``, by one pass over them; None where the kernels cannot.

    Args:
        owner: the optimizer. The tables are kept for as long as it lives.
        params: the parameters of which these are all the gradients.
        grads: as many.
    """
    if not len(params) or not may_run(params[0].device):
        return None
    plan = _kept_of(onepass.Rule("sgd"), [params], params, 0, owner)[0]
    if plan is None or not _are_plain(grads) or not plan.suits(grads):
        return None
    if is_capturing(params[0].device) and not begin_in_graph(plan, owner):
        return None
    return plan.norm(grads).reshape(1)


def scale_(tensors: Sequence[torch.Tensor], factor: Any, limit: int, skip: torch.Tensor | None) -> None:
    """Multiply tensors by ``factor`` in fp32, in pieces of ``limit`` elements; not where ``skip`` is not zero."""

    def rule(piece: Piece) -> None:
        operators.foreach_mul_(piece[1], factor)

    pieces.apply(rule, [tensors, tensors], limit, skip=skip)


def found_inf(skip: torch.Tensor | None) -> torch.Tensor | None:
    """Return the flag as fused kernels read it: fp32, without dimensions, 1 where ``skip`` is not zero."""
    return None if skip is None else skip.reshape(()).ne(0).float()


def are_alike(lists: Lists) -> bool:
    """Return whether torch's fused kernels can step these: plain tensors of one device, in one order, without gaps."""
    device = lists[0][0].device
    for row in zip(*lists, strict=True):
        if any(type(t.detach()) is not torch.Tensor or t.device != device or t.dtype not in _KNOWN for t in row):
            return False
        # torch gives a new tensor the strides of a tensor without gaps.
        strides = row[0].stride() if row[0].is_contiguous() else torch.empty_like(row[0], device="meta").stride()
        if any(tensor.stride() != strides for tensor in row):
            return False
    return True


def may_run(device: torch.device) -> bool:
    """Return whether the kernels run on ``device`` now: they do not in compiled code."""
    if (device.type == HOST and not _on_host) or torch.compiler.is_compiling():
        return False
    return _refusal(device.type, "adam") == ""


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is being captured on ``device`` now."""
    ask = _capture_check(device)
    return ask is not None and ask()


def _capture_check(device: torch.device) -> Callable[[], bool] | None:
    found: Callable[[], bool] | None = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return found


@functools.cache
def _refusal(device_type: str, rule: str) -> str:
    """Say why the kernels of a rule do not run on a device; tell the user, once, where they should."""
    why = available.refusal(device_type, rule)
    if why and available.expects(device_type):
        _tell(rule, device_type, why)
    return why


@functools.cache
def _tell(rule: str, device_type: str, why: str) -> None:
    text = "steps by %s on %s are taken by torch's operators and not in one pass, which is slower: %s"
    say(text, rule, device_type, why, level=logging.WARNING)


def _kept_of(
    rule: onepass.Rule, lists: Lists, tensors: Sequence[torch.Tensor], copies: int, owner: object
) -> tuple[onepass.Plan | None, bool, Sequence[Any], Sequence[Any]]:
    """Return the plan of ``tensors``, those of all lists, of which the last ``copies`` are written to only.

    Beside it whether autograd counts the writes into all; where they lay; and they, weakly: the owner is one of them.
    The plan is kept until ``owner`` is gone; None: no kernel takes them.
    """
    plans = _plans.setdefault(owner, {})
    plan, versioned, places, refs = plans.get(rule, (None, False, [()], ()))
    same = len(tensors) == len(refs) and all(map(operator.is_, tensors, map(weakref.ref.__call__, refs)))
    if same and [*map(_TENSOR.data_ptr, tensors)] == places[0] and [*map(_TENSOR.stride, tensors)] == places[2]:
        return plan, versioned, places, refs
    if not _are_plain(tensors):
        return None, False, (), ()
    now = [[*map(each, tensors)] for each in (_TENSOR.data_ptr, _TENSOR.size, _TENSOR.stride, _DTYPE)]
    if now != places:
        if is_capturing(tensors[0].device):
            return None, False, (), ()  # nothing can be made in a capture
        plan = None
        plans.pop(rule, None)  # an old plan holds its tensors' memory, which the new one may need
        plan = _new_plan(rule, lists, copies)
    plans[rule] = plan, not any(map(_TENSOR.is_inference, tensors)), now, [*map(weakref.ref, tensors)]
    return plans[rule]  # type: ignore[no-any-return]


def _new_plan(rule: onepass.Rule, lists: Lists, copies: int) -> onepass.Plan | None:
    rows = []
    # Detached: what a plan holds must not keep alive the tensor for which the plan is kept.
    for param, *others in zip(*([t.detach() for t in tensors] for tensors in lists), strict=True):
        states, low = others[: len(others) - copies], others[-1] if copies else None
        moving = [states.pop()] if rule.name == "novograd" else []
        if any(size.dtype != torch.float32 or size.device != param.device for size in moving):
            return None
        dtypes = {state.dtype for state in states}
        if len(dtypes) > 1 or (rule.name == "lamb" and dtypes != {torch.float32}):
            return None
        rows.append(onepass.Row(param, low, (*states, *moving)))
    device = rows[0].param.device
    if _refusal(device.type, rule.name):
        return None
    if (form := _FUSED.get((rule.name, rule.decoupled))) is not None and device.type != HOST:
        # A captured step does not come here, and in a capture nothing can be tried: torch's form is tried before.
        with contextlib.suppress(NotNow):
            is_right(form, device, torch.float32)
    try:
        return plan_for_graphs(rule, rows, _capture_check(device))
    except ValueError:  # of a dtype, a device or an order in memory that the kernels do not take
        return None


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all are plain tensors, by their classes: a shard or a wrapper stays one when it is detached."""
    kinds = {} if {*map(type, tensors)} == {torch.Tensor} else {type(tensor): tensor for tensor in tensors}
    return all(type(tensor.detach()) is torch.Tensor for tensor in kinds.values())


def _options(numbers: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: numbers[key] for key in numbers if key not in ("beta1", "beta2", "beta3", "is_first_step")}
    if "beta1" in numbers:
        found["betas"] = numbers["beta1"], numbers["beta2"]
    return found | {"grad_averaging": numbers.get("beta3") != 1.0, "first": numbers.get("is_first_step", False)}


def is_one(scale: Any) -> bool:
    """Return whether ``scale``, a number or a tensor, is known to be 1 without a wait for the device."""
    return not isinstance(scale, torch.Tensor) and scale == 1.0


def _scalar(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device, torch.float32)
    return torch.full((), value, dtype=torch.float32, device=device)
