"""Says what to do where a tensor of another dtype meets parameters that xamp has cast.

torch's error names two dtypes, or none, and no cause. At the levels that cast parameters there are six causes: a method
other than those under the policy was called, a parameter came or was cast after ``initialize``, an argument is an
object that xamp does not look into, an operator is not there in the lower dtype, or the model itself makes fp32
tensors. Whether an error is of dtypes is told by the operands (:mod:`xamp.casting.operands`). Nothing here runs before
an error is raised.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xamp.errors import XampError
from xamp.policy import levels_where, listed
from xamp.torch_compat.norms import BATCH_NORM
from xamp.values.containers import CASTABLE, tensors_in
from xamp.values.lowered import is_low_precision

if TYPE_CHECKING:
    from xamp.casting.operands import Operands

__all__ = ["explain_forward", "explain_method"]

_ABOUT_DTYPES = re.compile(
    r"dtype|data ?type|scalar type|same type|[Ii]nput type|c10::Half|BFloat16|HalfTensor|Half |not implemented for"
)

_ABOUT_OTHERS = re.compile(
    r"shape|\bsizes?\b|dimension|\bdims?\b|channels|stride|contiguous|memory|out of (range|bounds)|CUDA error|[NH]CCL"
)
"""What errors speak of whose cause is another one, whatever dtypes the operands have."""

_NEVER = (XampError, AttributeError, NameError, ImportError, LookupError, OSError, MemoryError, ArithmeticError)
"""Errors that no mismatch of dtypes raises."""

_NAMES = {torch.float16: ("Half", "half", "float16"), torch.bfloat16: ("BFloat16", "bfloat16")}
"""How torch's errors name the lower dtypes."""

_EXPLAINING = ("xamp.casting.explain", "xamp.casting.forward", "xamp.casting.region")
"""The modules whose functions ``method`` explain errors."""


def explain_forward(error: Exception, module: nn.Module, values: tuple[Any, ...]) -> None:
    """Add to ``error``, which a method under the policy raised, what the user can do; or leave it as it is.

    Args:
        error: any error; those that are not of dtypes are left alone.
        module: the model whose method it was.
        values: the arguments, after they were cast.
    """
    operands = _operands(error, module)
    if operands is None:
        return
    text, dtype = _cast_later(module), _dtype_of(module)
    if text is None and dtype is not None:
        if "not implemented for" in str(error):
            text = _no_kernel(dtype)
        else:
            text = _late_module(module) or _unseen_argument(values, dtype) or _own_tensors(dtype)
    if text is not None:
        _append(error, text + _where(operands, module))


def explain_method(error: Exception, module: nn.Module, name: str) -> None:
    """Add to ``error``, which the method ``name`` raised, that it does not run under the policy; or leave it."""
    operands = None if _is_explained_further_up() else _operands(error, module)
    dtype = _dtype_of(module)
    if operands is not None and dtype is not None and _cast_later(module) is None:
        _append(
            error,
            f"{type(module).__name__}.{name}() does not run under the policy, so nothing casts its arguments to "
            f"{dtype}. Name it: xamp.initialize(..., methods=('forward', {name!r}))." + _where(operands, module),
        )


def _is_explained_further_up() -> bool:
    """Return whether the user called another method that explains the error: the one to name is that one."""
    frame = sys._getframe(3)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "method" and frame.f_globals.get("__name__") in _EXPLAINING:
            return True
    return False


def _operands(error: Exception, module: nn.Module) -> Operands | None:
    """Return the operands of what raised ``error`` in ``module``; None if it is explained, or is no error of dtypes."""
    if getattr(error, "_xamp_explained", False) or isinstance(error, _NEVER):
        return None
    from xamp.casting.operands import Operands, operands_of  # no training without errors need load it

    try:
        found = operands_of(error, module)
    except Exception:  # it reads frames of somebody else's code, and is help only
        found = Operands({})
    return found if _is_of_dtypes(str(error), found, module) else None


def _is_of_dtypes(said: str, found: Operands, module: nn.Module) -> bool:
    """Return whether an error that says ``said`` is of the dtypes of the operands ``found``."""
    speaks = _ABOUT_DTYPES.search(said) is not None
    if found.mixed and not _takes_mixed(found.module):
        surely = found.compares if found.raised else found.whole
        return speaks or (surely and _ABOUT_OTHERS.search(said) is None)
    if found.dtypes and not found.raised and "not implemented for" not in said:
        return speaks and not found.whole and found.lower  # an operand that was not found may be of another dtype
    # A mismatch with low-precision parameters names their dtype; one of labels, say, has another cause.
    dtype = _dtype_of(module)
    return speaks and any(name in said for each in ([dtype] if dtype in _NAMES else _NAMES) for name in _NAMES[each])


def _takes_mixed(module: nn.Module | None) -> bool:
    """Return whether ``module`` is a batch norm in fp32, which takes an input of a lower dtype."""
    return isinstance(module, BATCH_NORM) and not any(map(is_low_precision, module.parameters()))


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the parameters of ``module`` were cast to."""
    return next((param.dtype for param in module.parameters() if is_low_precision(param)), None)


def _append(error: Exception, text: str) -> None:
    said = f"{error}\nxamp: {text}"
    if (len(error.args) == 1 and str(error) == str(error.args[0])) or not error.args:
        error.args = (said,)
    if str(error) != said:  # its class makes the text by itself
        if not hasattr(error, "add_note"):
            return
        error.add_note(f"xamp: {text}")
    error._xamp_explained = True  # type: ignore[attr-defined]


def _where(operands: Operands, module: nn.Module) -> str:
    """Say in which part of ``module`` it happened, and which operands have which dtype."""
    name = next((name for name, part in module.named_modules() if part is operands.module), "")
    found = [f"{label} is {dtype}" for dtype, label in operands.dtypes.items()] if operands.mixed else []
    if operands.module is None or not (name or found):
        return ""
    kind = type(operands.module).__name__
    where = f"{name}, a {kind}" if name else kind
    return f" It happened in {where}{': ' if found else ''}{', '.join(found)}."


def _cast_later(module: nn.Module) -> str | None:
    """The text for a parameter that xamp cast, and that ``module.float()`` or ``.double()`` has cast since."""
    for name, param in module.named_parameters():
        if is_low_precision(param) and param.dtype not in _NAMES:
            return (
                f"{name} of {type(module).__name__} was cast to {param.dtype} after xamp.initialize. Call "
                "xamp.session(model).close() instead, which leaves the model in fp32, or take model.state_dict(), "
                "which is fp32 anyway."
            )
    return None


def _late_module(module: nn.Module) -> str | None:
    """The text for a module that has fp32 parameters, though neither ``keep_fp32`` nor the level keeps it so."""
    for name, part in module.named_modules():
        if isinstance(part, BATCH_NORM) or (name and _kept(module, name)):
            continue
        for key, param in part._parameters.items():
            if param is not None and param.dtype is torch.float32 and not is_low_precision(param):
                whole = f"{name}.{key}" if name else key
                return (
                    f"{whole} of {type(module).__name__} is torch.float32: it came after xamp.initialize, which "
                    "cast the others. Call xamp.session(model).close(), change the model, and initialize it again."
                )
    return None


def _kept(module: nn.Module, name: str) -> bool:
    """Return whether the part ``name``, or a module around it, is one that ``keep_fp32`` named."""
    parts = name.split(".")
    around = (module.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1))
    return any(hasattr(type(each), "_xamp_region") for each in around)


def _unseen_argument(values: tuple[Any, ...], dtype: torch.dtype) -> str | None:
    """The text for an argument that has fp32 tensors and is of a kind that xamp does not look into."""
    seen = {id(value) for value in values if tensors_in(value)}
    for value in values:
        tensors = vars(value).values() if hasattr(value, "__dict__") and id(value) not in seen else ()
        inner = [*tensors, *_in_store(value)] if id(value) not in seen else []
        if any(isinstance(each, torch.Tensor) and each.dtype in CASTABLE - {dtype} for each in inner):
            return (
                f"an argument is a {type(value).__name__}, and xamp casts tensors in tuples, lists, dicts and "
                f"dataclasses only. Cast its tensors to {dtype} before the call, or use a level that casts operators "
                f"({listed(levels_where(lambda row: row.casts_operators))})."
            )
    return None


def _in_store(value: Any) -> list[Any]:
    """The values of an object that offers them as a mapping does (a ``Data`` of PyG)."""
    try:
        found = value.to_dict() if callable(getattr(value, "to_dict", None)) else {}
        return list(found.values()) if isinstance(found, dict) else []
    except Exception:  # it is somebody else's code, and this is help only
        return []


def _no_kernel(dtype: torch.dtype) -> str:
    return (
        f"the parameters of this model are {dtype}, in which this operator does not exist here. Keep the module that "
        "calls it in fp32 (keep_fp32=), or use a level that leaves the parameters in fp32 "
        f"({listed(levels_where(lambda row: row.casts_operators))})."
    )


def _own_tensors(dtype: torch.dtype) -> str:
    casting = listed(levels_where(lambda row: row.casts_operators))
    return (
        f"the parameters of this model are {dtype}, and a tensor that the model makes itself, or that was exempt from "
        "casting, is of another dtype. Keep the module that makes it in fp32 (keep_fp32=), or use a level that casts "
        f"operators ({casting})."
    )
