"""Adds the cure to errors about dtypes that leave a managed forward, or a backward inside ``scale_loss``.

torch's error names two dtypes, a number that does not fit, or a kernel that is not there, but not the module. An error
that speaks of a floating dtype gets the name of the innermost module in its traceback, and the cure for the level.
Nothing here runs before an error is raised.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from typing import Any

import torch
from torch import nn

from xamp.errors import XampError
from xamp.policy import levels_where, listed
from xamp.torch_compat.norms import BATCH_NORM
from xamp.values.lowered import is_low_precision, was_copied

__all__ = ["explain_backward", "explain_forward", "explain_method"]

_ABOUT_DTYPES = re.compile(
    r"Half|half precision|[Ll]ow precision|B?Float16|float16|powers of two|either float or double|without overflow|"
    r"dtype|data ?type|scalar ?type|same type|[Ii]nput type|not implemented for|primitive descriptor"
)
# Errors whose cause is another one: labels, indices, shapes; and classes of errors that no dtype raises.
_ABOUT_OTHERS = re.compile(
    r"\b(Long|Int|Short|Byte|Char|Bool|u?int\d+|bool|complex\w*|Complex\w*)\b|shape|size mismatch"
)
_NEVER = (XampError, AttributeError, NameError, ImportError, LookupError, OSError, MemoryError, ArithmeticError)


def explain_forward(error: Exception, module: nn.Module, lower: torch.dtype | None, *, casts: bool) -> None:
    """Add the cure to ``error``, which a method of ``module`` under the policy raised; leave what is not of dtypes.

    ``lower`` is the dtype of the level, None or fp32 where nothing is lowered; ``casts``: it casts parameters.
    """
    if lower in (None, torch.float32) or not _is_about_dtypes(error):
        return
    names = {id(part): name for name, part in module.named_modules()}
    holders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    part: Any = next((each for each in reversed(holders) if id(each) in names), module)
    name = names[id(part)]
    place = f"{name} of {type(module).__name__}, a {type(part).__name__}," if name else type(module).__name__
    cure = (_changed_since(module, lower) if casts else None) or _cure(str(error), name, lower, casts)
    _append(error, f"{place} runs at {lower}: {cure}.")


def explain_method(error: Exception, module: nn.Module, name: str) -> None:
    """Add to ``error``, which the method ``name`` raised, that it does not run under the policy; or leave it."""
    lower = next((param.dtype for param in module.parameters() if is_low_precision(param)), None)
    frame = sys._getframe(1).f_back
    while frame is not None and not (frame.f_code.co_name == "method" and _is_of(frame, "xamp.casting")):
        frame = frame.f_back
    if frame is None and lower is not None and _is_about_dtypes(error):  # no method further up that is the one to name
        does_not = f"{type(module).__name__}.{name}() does not run under the policy, so nothing casts its arguments to "
        cure = f"{does_not}{lower}. Name it: xamp.initialize(..., methods=('forward', {name!r}))"
        _append(error, f"{_changed_since(module, lower) or cure}.")


def explain_backward(error: BaseException, lower: torch.dtype | None, level: str) -> None:
    """Add the cure to ``error``, where a backward inside ``scale_loss`` raised it at ``level``."""
    of_backward = any(_is_of(frame, "torch.autograd") for frame, _ in traceback.walk_tb(error.__traceback__))
    if lower not in (None, torch.float32) and of_backward and _is_about_dtypes(error):
        _append(
            error,
            f"a backward at level {level} met two dtypes, {lower} and another one. Give tensors that the forward makes "
            "itself the dtype of what they meet, let a torch.autograd.Function return gradients in the dtypes of its "
            "inputs (xamp.custom_fwd and xamp.custom_bwd help), or name the module in keep_fp32= of xamp.initialize.",
        )


def _is_about_dtypes(error: BaseException) -> bool:
    """Return whether ``error`` is about floating dtypes, and nobody has explained it."""
    said = str(error)
    for frame, line in () if said else traceback.walk_tb(error.__traceback__):  # a bare assert: its line says what
        said = linecache.getline(frame.f_code.co_filename, line)
    if getattr(error, "_xamp_explained", False) or isinstance(error, _NEVER) or _ABOUT_OTHERS.search(said):
        return False
    return _ABOUT_DTYPES.search(said) is not None


def _is_of(frame: Any, package: str) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}.")


def _changed_since(module: nn.Module, lower: torch.dtype) -> str | None:
    """Return the cure where a parameter has another dtype than the level gave it; None: there is none."""
    parts = [part for part in module.modules() if part is not module and hasattr(type(part), "_xamp_region")]
    kept = {
        id(p) for part in module.modules() if isinstance(part, BATCH_NORM) or part in parts for p in part.parameters()
    }
    params = ((n, p) for n, p in module.named_parameters() if id(p) not in kept and p.dtype.is_floating_point)
    name, param = next(((n, p) for n, p in params if p.dtype is not lower), ("", None))
    if param is None:
        return None
    if was_copied(param):
        cure = (
            "and this copy of a managed model is under its policy still. pickle.loads(pickle.dumps(copy)) is a model "
            "without it; or leave the dtypes of the copy as they are"
        )
    elif is_low_precision(param):
        cure = (
            "cast after xamp.initialize. Call xamp.session(model).close() instead, which leaves the model in fp32, or "
            "take model.state_dict(), which is fp32 anyway"
        )
    else:
        cure = (
            f"and came after xamp.initialize, which cast the others. Give functional_call weights of {lower}, or close "
            "the session, change the model, and initialize it again"
        )
    return f"{name} is {param.dtype}, {cure}"


def _cure(said: str, name: str, lower: torch.dtype, casts: bool) -> str:
    """Return the cure where the parameters are what they should be. ``name``: of the module that raised."""
    own = f"[{name!r}]" if name else "[...] with a module of its own for that code"
    keep = f"keep it in fp32 by keep_fp32={own} of xamp.initialize"
    if "without overflow" in said:
        return f"a constant does not fit this dtype. Take torch.finfo(x.dtype).min or .max, or {keep}"
    if "Double" in said:
        return "torch.float64 is cast by no rule. Cast it to torch.float32 with .float()"
    if not casts:
        return f"this code has no way in that dtype. Cast with .float() there, or {keep}"
    return (
        "an operator does not exist in that dtype, or meets a tensor of another one, which the model makes itself or "
        f"gets in an object that xamp does not look into. Cast that tensor to {lower}, {keep}, or use a level that "
        f"casts operators ({listed(levels_where(lambda row: row.casts_operators))})"
    )


def _append(error: BaseException, text: str) -> None:
    said = f"{error}\nxamp: {text}"
    if (len(error.args) == 1 and str(error) == str(error.args[0])) or not error.args:
        error.args = (said,)
    if str(error) != said:  # its class makes the text by itself
        if not hasattr(error, "add_note"):
            return
        error.add_note(f"xamp: {text}")
    error._xamp_explained = True  # type: ignore[attr-defined]
