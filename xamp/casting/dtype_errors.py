"""Adds the cure to errors about dtypes that leave a managed forward, or a backward inside ``scale_loss``.

torch's error names two dtypes, a number that does not fit, or a kernel that is not there, and neither the module nor
xamp, whose casts led to it. One rule: an error that speaks of a floating dtype gets the name of the innermost module
in its traceback, and one sentence with the cure for the level. Nothing here runs before an error is raised.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from xamp.errors import XampError
from xamp.policy import levels_where, listed
from xamp.torch_compat.norms import BATCH_NORM
from xamp.values.lowered import is_low_precision, was_copied

__all__ = ["explain_backward", "explain_forward", "explain_method"]

_LOWER = re.compile(r"Half|half precision|[Ll]ow precision|B?Float16|float16|powers of two")
_ABOUT_DTYPES = re.compile(
    r"dtype|data ?type|scalar ?type|same type|[Ii]nput type|not implemented for|without overflow|primitive descriptor|"
    r"either float or double"
)
_ABOUT_OTHERS = re.compile(
    r"\b(Long|Int|Short|Byte|Char|Bool|u?int\d+|bool|complex\w*|Complex\w*)\b|shape|size mismatch"
)
"""What errors speak of whose cause is another one: labels, indices."""

_NEVER = (XampError, AttributeError, NameError, ImportError, LookupError, OSError, MemoryError, ArithmeticError)
"""Errors that no dtype raises."""


def explain_forward(error: Exception, module: nn.Module, lower: torch.dtype | None, *, casts: bool) -> None:
    """Add the cure to ``error``, which a method under the policy raised, or leave it as it is.

    Args:
        error: any error.
        module: the model whose method it was.
        lower: the dtype of the level; None or fp32: nothing is lowered.
        casts: whether the level casts parameters.
    """
    if lower in (None, torch.float32) or not _is_about_dtypes(error):
        return
    part = _innermost(error, module)
    changed = _changed_since(module, lower) if casts else None
    _append(error, f"{_name_of(part, module)} runs at {lower}: {changed or _cure(error, part, module, lower, casts)}.")


def explain_method(error: Exception, module: nn.Module, name: str) -> None:
    """Add to ``error``, which the method ``name`` raised, that it does not run under the policy; or leave it."""
    lower = next((param.dtype for param in module.parameters() if is_low_precision(param)), None)
    if lower is None or _is_explained_further_up() or not _is_about_dtypes(error):
        return
    _append(
        error,
        _changed_since(module, lower)
        or f"{type(module).__name__}.{name}() does not run under the policy, so nothing casts its arguments to "
        f"{lower}. Name it: xamp.initialize(..., methods=('forward', {name!r})).",
    )


def explain_backward(error: BaseException, lower: torch.dtype | None, level: str) -> None:
    """Add the cure to ``error``, where a backward inside ``scale_loss`` raised it at ``level``."""
    of_backward = any(_is_of(frame, "torch.autograd") for frame in _frames(error))
    if lower in (None, torch.float32) or not of_backward or not _is_about_dtypes(error):
        return
    _append(
        error,
        f"a backward at level {level} met two dtypes, {lower} and another one. Give tensors that the forward makes "
        "itself the dtype of what they meet, let a torch.autograd.Function return gradients in the dtypes of its "
        "inputs (xamp.custom_fwd and xamp.custom_bwd help), or name the module in keep_fp32= of xamp.initialize.",
    )


def _is_about_dtypes(error: BaseException) -> bool:
    """Return whether ``error`` is about floating dtypes, and nobody has explained it."""
    if getattr(error, "_xamp_explained", False) or isinstance(error, _NEVER):
        return False
    said = str(error)
    if not said and (frames := list(_frames(error))):  # a bare assert: what it asserts stands in its line
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        said = linecache.getline(frames[-1].f_code.co_filename, 0 if last is None else last.tb_lineno)
    if _ABOUT_OTHERS.search(said):
        return False
    return _LOWER.search(said) is not None or _ABOUT_DTYPES.search(said) is not None


def _is_explained_further_up() -> bool:
    """Return whether the user called another method that explains the error: the one to name is that one."""
    frame = sys._getframe(2).f_back
    while frame is not None and not (frame.f_code.co_name == "method" and _is_of(frame, "xamp.casting")):
        frame = frame.f_back
    return frame is not None


def _frames(error: BaseException) -> Iterator[FrameType]:
    """Yield the frames that ``error`` went through, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_of(frame: FrameType, package: str) -> bool:
    return f"{frame.f_globals.get('__name__', '')}.".startswith(f"{package}.")


def _innermost(error: BaseException, module: nn.Module) -> nn.Module:
    """Return the innermost part of ``module`` whose method ``error`` went through."""
    parts = {id(part) for part in module.modules()}
    holders = [frame.f_locals.get("self") for frame in _frames(error)]
    return next((each for each in reversed(holders) if isinstance(each, nn.Module) and id(each) in parts), module)


def _name_of(part: nn.Module, module: nn.Module) -> str:
    name = next((name for name, each in module.named_modules() if each is part), "")
    return f"{name} of {type(module).__name__}, a {type(part).__name__}," if name else type(module).__name__


def _changed_since(module: nn.Module, lower: torch.dtype) -> str | None:
    """Return the cure where a parameter has another dtype than the level gave it; None: there is none."""
    kept: set[int] = set()
    for part in module.modules():
        if isinstance(part, BATCH_NORM) or (part is not module and hasattr(type(part), "_xamp_region")):
            kept.update(map(id, part.parameters()))
    for name, param in module.named_parameters():
        if param.dtype is lower or not param.dtype.is_floating_point or id(param) in kept:
            continue
        what = f"{name} is {param.dtype}"
        if was_copied(param):
            return (
                f"{what}, and this copy of a managed model is under its policy still. pickle.loads(pickle.dumps(copy)) "
                "is a model without it; or leave the dtypes of the copy as they are"
            )
        if is_low_precision(param):
            return (
                f"{what}, cast after xamp.initialize. Call xamp.session(model).close() instead, which leaves the model "
                "in fp32, or take model.state_dict(), which is fp32 anyway"
            )
        return (
            f"{what}, and came after xamp.initialize, which cast the others. Give functional_call weights of {lower}, "
            "or close the session, change the model, and initialize it again"
        )
    return None


def _cure(error: BaseException, part: nn.Module, module: nn.Module, lower: torch.dtype, casts: bool) -> str:
    """Return the cure where the parameters are what they should be."""
    if "without overflow" in str(error):
        return f"a constant does not fit this dtype. Take torch.finfo(x.dtype).min or .max, or {_keep(part, module)}"
    if "Double" in str(error):
        return "torch.float64 is cast by no rule. Cast it to torch.float32 with .float()"
    if not casts:
        return f"this code has no way in that dtype. {_keep(part, module).capitalize()}, or cast with .float() there"
    casting = listed(levels_where(lambda row: row.casts_operators))
    return (
        f"an operator does not exist in that dtype, or meets a tensor of another one, which the model makes itself or "
        f"gets in an object that xamp does not look into. Cast that tensor to {lower}, {_keep(part, module)}, or use "
        f"a level that casts operators ({casting})"
    )


def _keep(part: nn.Module, module: nn.Module) -> str:
    name = next((name for name, each in module.named_modules() if each is part), "")
    own = f"[{name!r}]" if name else "[...] with a module of its own for that code"
    return f"keep it in fp32 by keep_fp32={own} of xamp.initialize"


def _append(error: BaseException, text: str) -> None:
    said = f"{error}\nxamp: {text}"
    if (len(error.args) == 1 and str(error) == str(error.args[0])) or not error.args:
        error.args = (said,)
    if str(error) != said:  # its class makes the text by itself
        if not hasattr(error, "add_note"):
            return
        error.add_note(f"xamp: {text}")
    error._xamp_explained = True  # type: ignore[attr-defined]
