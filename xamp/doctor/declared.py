"""Checks on the device what a backend declares: its dtypes, fused optimizers, overflow mode and other capabilities."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.casting import ops
from xamp.contract import Backend, Capabilities
from xamp.plans import available
from xamp.policy import LEVELS, best_level, levels_where, listed
from xamp.registry.causes import one_line
from xamp.registry.findings import DEFECT, NOTE, WARNING, Finding
from xamp.registry.fused_classes import is_right
from xamp.registry.trials import KERNELS, defect_of, fp8_recipes
from xamp.torch_compat.kernels import missing
from xamp.values.recipes import RECIPES

__all__ = ["find_gaps", "find_mismatches", "one_pass"]

_TUPLES = ("levels", "dtypes", "fast_dtypes", "fused_optimizers", "op_policies", "fp8", "fp8_rehearsed")
_OVERFLOWS = ("inf", "flag")


def find_mismatches(backend: Backend, device: torch.device) -> list[Finding]:
    """Check each capability that ``backend`` declares for ``device``; return a finding for each that is wrong.

    Raises only KeyboardInterrupt.
    """
    try:
        can = backend.capabilities(device)
        malformed = list(_malformed(can))
        if malformed:
            return [_mismatch(*pair) for pair in malformed]
        if "float32" in dict(can.lacking):
            return []  # it declares no level, and nothing can be tried
        unscaling = [*_unscaling(backend, can, device)]
        unscale_ = None if unscaling else backend.unscale_  # what is wrong in fp32 is not told of each dtype
        pairs = [*_names(can), *_computing(can, device, unscale_), *_fused(can, device), *unscaling]
        pairs += _fp8(backend, can, device)
        return [*(_mismatch(*pair) for pair in pairs), *_process_group(can)]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [Finding(DEFECT, f"trying what it declares ended in {one_line(error)}", _REPAIR)]


def find_gaps(backend: Backend, device: torch.device) -> list[Finding]:
    """Return a finding for each dtype that fails on ``device``, and for each operator that xamp does without there.

    Raises nothing: what :func:`find_mismatches` reports as malformed is left out.
    """
    with contextlib.suppress(Exception):
        can = backend.capabilities(device)
        return [*_failing(can), *_done_without(can, device), *_not_in_one_pass(device)]
    return []


def one_pass(backend: Backend, device: torch.device) -> str:
    """Say whether steps at O2 and O5 are taken in one pass; nothing of the host, where torch's own kernels serve.

    Raises nothing.
    """
    with contextlib.suppress(Exception):
        if {"O2", "O5"}.intersection(backend.capabilities(device).levels) and not torch.empty(0, device=device).is_cpu:
            return available.described(device)
    return ""


def _not_in_one_pass(device: torch.device) -> Iterator[Finding]:
    if available.expects(device) and (why := available.refusal(device)):
        text = f"no step is taken in one pass, and the optimizers of xamp.apex are slower: {why}"
        yield Finding(WARNING, text, "install the Triton that this torch was built with, or report it with this line")


def _failing(can: Capabilities) -> Iterator[Finding]:
    for dtype, reason in can.lacking:
        gone = listed([name for name, row in LEVELS.items() if dtype in ("float32", row.dtype)], "and")
        yield Finding(WARNING, f"{dtype} is not declared, and so neither are {gone}: {reason}")


def _done_without(can: Capabilities, device: torch.device) -> Iterator[Finding]:
    for kernel in KERNELS:
        there = [
            dtype for dtype in ("float32", *can.dtypes) if getattr(torch, dtype) in missing(kernel.name, device.type)
        ]
        if there:
            text = (
                f"torch.{kernel.name} does not run in {listed(there, 'and')}: operators on single tensors do its work"
            )
            yield Finding(NOTE, text)


_REPAIR = "the backend's capabilities() must declare what the device does; report it to whoever ships the backend"
_Mismatches = Iterator[tuple[str, str]]  # pairs: what the backend declares, and what is true


def _mismatch(declared: str, case: str) -> Finding:
    return Finding(DEFECT, f"declares {declared}, but {case}", _REPAIR)


def _malformed(can: Capabilities) -> _Mismatches:
    for field in _TUPLES:
        value: object = getattr(can, field)
        if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
            yield f"{field}={value!r}", "it must be a tuple of strings"
    lacking: object = can.lacking
    if not isinstance(lacking, tuple) or not all(isinstance(row, tuple) and len(row) == 2 for row in lacking):
        yield f"lacking={lacking!r}", "it must be a tuple of pairs: a dtype's name, and why it is not there"
    if can.overflow not in _OVERFLOWS:
        yield f"overflow={can.overflow!r}", f"it must be one of {', '.join(_OVERFLOWS)}"


def _names(can: Capabilities) -> _Mismatches:
    """Check what needs no device: levels, dtypes and op policies must exist and fit together."""
    for level in can.levels:
        if level not in LEVELS:
            yield f"level {level!r}", f"there is no such level; there are {', '.join(LEVELS)}"
        elif (dtype := LEVELS[level].dtype) is not None and dtype not in can.dtypes:
            yield f"level {level!r}", f"not {dtype}, which it computes in (dtypes={can.dtypes!r})"
    for level in levels_where(lambda row: row.dtype is None):
        if level not in can.levels and "float32" not in dict(can.lacking):
            yield f"levels={can.levels!r}", f"{level} is missing, which every device can run"
    for dtype in can.fast_dtypes:
        if dtype not in can.dtypes:
            yield f"fast_dtypes={can.fast_dtypes!r}", f"{dtype} is not among its dtypes={can.dtypes!r}"
        elif (meant := best_level((dtype,)).name) not in can.levels:
            yield f"fast_dtypes={can.fast_dtypes!r}", f"not the level that 'auto' means then, {meant}"
    for op_policy in can.op_policies:
        if op_policy not in ops.OP_POLICIES:
            yield f"op_policy {op_policy!r}", f"there is no such op policy; there are {', '.join(ops.OP_POLICIES)}"


def _computing(can: Capabilities, device: torch.device, unscale_: Any) -> _Mismatches:
    keeps_inf = can.overflow == "inf"
    for dtype in can.dtypes:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            yield f"dtype {dtype!r}", "torch has no floating-point dtype of that name"
        elif defect := defect_of(device, dtype, keeps_inf, unscale_):
            yield f"dtype {dtype!r}", defect


def _fp8(backend: Backend, can: Capabilities, device: torch.device) -> _Mismatches:
    for recipe in (*can.fp8, *can.fp8_rehearsed):
        if recipe not in RECIPES:
            yield f"fp8 by {recipe!r}", f"there is no such recipe; there are {', '.join(RECIPES)}"
    right = fp8_recipes(backend, device) if can.fp8 else ()
    for recipe in can.fp8:
        if recipe in RECIPES and recipe not in right:
            yield f"fp8 by {recipe!r}", "its products fail, are wrong, or are multiplied in fp32"


def _unscaling(backend: Backend, can: Capabilities, device: torch.device) -> _Mismatches:
    """Check that ``unscale_`` finds an overflow that the backend makes, and finds none in a finite gradient."""
    made: Any = {"dtype": torch.float32, "device": device}
    half, declared = torch.full((), 0.5, **made), f"overflow={can.overflow!r}"
    for overflows in (False, True):
        grad, found = torch.ones(8, **made), torch.zeros((), **made)
        try:
            backend.clear_overflow(device)
            if overflows:
                backend.make_overflow_(grad)
            backend.unscale_([grad], found, half)
            seen, halved = bool(found.item()), bool(grad.eq(0.5).all().item())
        except Exception as error:
            yield declared, f"unscaling {'an overflow' if overflows else 'a gradient'} fails: {one_line(error)}"
            return
        if seen is not overflows:
            yield declared, f"unscale_ {'overlooks an overflow' if overflows else 'sees one where there is none'}"
        elif not overflows and not halved:
            yield declared, "unscale_ does not multiply the gradient by inv_scale"


def _fused(can: Capabilities, device: torch.device) -> _Mismatches:
    for name in can.fused_optimizers:
        if defect := _fused_defect(name, device):
            yield f"fused optimizer {name!r}", defect


def _fused_defect(name: str, device: torch.device) -> str:
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        return "torch.optim has none of that name"
    cls: Any = kind
    try:
        one = torch.ones((), dtype=torch.float32, device=device)
        weight = torch.nn.Parameter(one.repeat(8))
        weight.grad = one.repeat(8)
        optimizer: Any = kind([weight], lr=0.1, fused=True)  # type: ignore[call-arg]
        optimizer.grad_scale, optimizer.found_inf = None, one
        optimizer.step()
        if not weight.eq(1.0).all().item():
            return "its step changes the parameter where found_inf says to skip it"
        optimizer.found_inf = torch.zeros_like(one)
        optimizer.step()
        if weight.eq(1.0).any().item():
            return "its step changes nothing"
        if cls.__module__.startswith("torch.optim") and not is_right(cls, device, torch.float32):
            return "its steps are not those of the plain form"
        return ""
    except Exception as error:
        return f"its step fails: {one_line(error)}"


def _process_group(can: Capabilities) -> list[Finding]:
    declared, distributed = f"process_group {can.process_group!r}", torch.distributed
    if not can.process_group:  # one process only
        return []
    if not distributed.is_available():
        return [Finding(WARNING, f"declares {declared}, but this torch is built without torch.distributed")]
    if can.process_group not in distributed.Backend.backend_list:
        known = ", ".join(name for name in distributed.Backend.backend_list if name != "undefined")
        return [_mismatch(declared, f"torch.distributed knows none of that name; it knows {known}")]
    if not distributed.is_backend_available(can.process_group):
        return [Finding(WARNING, f"declares {declared}, but this build of torch comes without it: one process only")]
    return []
