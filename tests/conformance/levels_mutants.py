"""A broken engine for the clauses of tier ``levels``."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import Any

import torch
from mutants import Mutant, patched

import xamp
from xamp import policy
from xamp.casting import active, autocast, forward, functions
from xamp.casting import region as regions
from xamp.casting.region_mark import Mark
from xamp.policy import compile_policy
from xamp.scaling.engine import Engine
from xamp.sessions import initialize, lowering
from xamp.values import containers
from xamp.values.undo import Undo


def _downgraded(self: lowering.ModelCasts, kept_whole: bool, in_fp8: bool) -> Any:
    """fp16 asked for is fp32 in silence."""
    return _region(self, True, in_fp8)


def _leave_it_on(entered: Any) -> None:
    """Ends a region and leaves autocast on."""
    mark, *_ = entered
    _leave(entered)
    if mark.device_type is not None:
        torch.set_autocast_enabled(mark.device_type, True)


def _for_all(*args: Any, **kwargs: Any) -> Any:
    """Switches autocast on for the whole thread."""
    made = _initialize_it(*args, **kwargs)
    torch.set_autocast_enabled("cpu", True)
    return made


def _main_thread_only(mark: Any, number: int, cached: Any = True) -> Any:
    """Sets the state of the thread in which it was first used."""
    if threading.current_thread() is not threading.main_thread():
        mark = Mark(None, None)
    return _enter(mark, number, cached)


def _cast_every_float(value: Any, dtype: torch.dtype, device_type: str | None = None) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return _cast_floats(value, dtype, device_type)


def _keeps_nothing(*args: Any) -> Any:
    return dataclasses.replace(compile_policy(*args), keep_fp32=())


def _own_dtype(_: Any, level: policy.Level) -> torch.dtype:
    return getattr(torch, level.dtype or "float32")  # type: ignore[no-any-return]


def _eager(module: Any, region: Any) -> Any:
    """Puts the methods of Python classes under the policy, and no others."""
    return (lambda: None) if isinstance(module, torch.jit.ScriptModule) else _enter_policy(module, region)


def _apply_for_good(self: Any, undo: Undo, *without_fp8: Any) -> None:
    """Applies the plan, and forgets how to take back what was done."""
    _apply(self, Undo(), *without_fp8)


def _of_another_device(device_type: str | None, dtype: Any, portable: bool = False, *_: Any) -> Any:
    return Mark(None if device_type is None else "xpu", dtype, portable=portable)


def _bf16_by_default(on: bool, dtype: Any, *named: Any) -> Any:
    return _in_use(on, dtype or torch.bfloat16, *named)


_enter_policy = forward.enter_policy
_leave, _enter = active.leave, active.enter
_apply, _region, _in_use = lowering.ModelCasts.apply, lowering.ModelCasts._region, autocast._in_use
_initialize_it = initialize.initialize
_cast_floats = containers.cast_floats

MUTANTS = [
    Mutant("downgrades in silence", "levels.effective", patched(lowering.ModelCasts, "_region", _downgraded)),
    Mutant("knows one dtype a level", "levels.dtype_asked_for", patched(policy, "_lower_dtype", _own_dtype)),
    Mutant("scripted code runs without the policy", "levels.script_module", patched(lowering, "enter_policy", _eager)),
    Mutant("leaks autocast state", "levels.state_after_forward", patched(active, "leave", _leave_it_on)),
    Mutant("casts for the whole process", "levels.plain_code_beside", patched(xamp, "initialize", _for_all)),
    Mutant("casts in one thread", "levels.threads", patched(active, "enter", _main_thread_only)),
    Mutant("casts float64", "levels.float64_stays", patched(Engine, "caster", staticmethod(lambda: _cast_every_float))),
    Mutant("keeps nothing in fp32", "levels.keep_fp32", patched(initialize, "compile_policy", _keeps_nothing)),
    Mutant("undoes nothing", "levels.all_or_nothing", patched(lowering.ModelCasts, "apply", _apply_for_good)),
    Mutant(
        "casts where it is told not to",
        "levels.disabled_inside",
        patched(xamp, "disable_casts", contextlib.nullcontext),
    ),
    Mutant(
        "promotes to the lower dtype",
        "levels.registered_function",
        patched(functions, "_widest", lambda *_: torch.float16),
    ),
    Mutant("sets another device's autocast", "levels.custom_operator", patched(regions, "mark_of", _of_another_device)),
    Mutant("another default dtype", "levels.autocast", patched(autocast, "_in_use", _bf16_by_default)),
]
