"""Which tensors an operator had that raised, and in which module: read from the frames that its error went through.

An error of torch says in many words that dtypes differ, and often not which. The frame that raised knows: a function of
torch's has its operands in its variables, and in the parameters of its ``self``; in code of others they are what the
failing expression names. Python 3.11 and newer say where in a line that is; before, the whole line counts.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from xamp.values.containers import tensors_in

__all__ = ["Operands", "operands_of"]

_OWN = __name__.partition(".")[0]


class Operands(NamedTuple):
    """The operands of an operator that raised.

    Attributes:
        dtypes: the floating dtypes of what was found, each with the name of one tensor that has it.
        module: the innermost module in which it happened; None if it is no part of the model.
        whole: all operands were found; else one may be the result of a call within the expression.
        raised: a ``raise`` or ``assert`` in somebody's own code did it, and no operator.
        compares: that statement reads the dtype of something.
    """

    dtypes: dict[torch.dtype, str]
    module: nn.Module | None = None
    whole: bool = False
    raised: bool = False
    compares: bool = False

    @property
    def mixed(self) -> bool:
        """Whether a lower dtype is among the operands, and another floating one."""
        return len(self.dtypes) > 1 and self.lower

    @property
    def lower(self) -> bool:
        """Whether a lower dtype is among the operands."""
        return torch.float16 in self.dtypes or torch.bfloat16 in self.dtypes


def operands_of(error: BaseException, model: nn.Module) -> Operands:
    """Find out from the traceback of ``error`` what raised it, in ``model``."""
    entries = [entry for entry in _entries(error.__traceback__) if not _is_of(entry.tb_frame, _OWN)]
    parts = {id(part) for part in model.modules()}
    holders = (entry.tb_frame.f_locals.get("self") for entry in reversed(entries))
    module = next((each for each in holders if isinstance(each, nn.Module) and id(each) in parts), None)
    if not entries:
        return Operands({}, module)
    last = entries[-1]
    if _is_of(last.tb_frame, "torch"):
        return Operands(_dtypes(_variables(last.tb_frame)), module, whole=True)
    named, calls, raised = _named(last)
    dtypes = _dtypes(named)
    if raised and not dtypes:
        dtypes = _dtypes(_variables(last.tb_frame))
    compares = any(name.endswith(".dtype") for name in named)
    return Operands(dtypes, module, calls <= 1, raised, compares)


def _entries(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_of(frame: FrameType, package: str) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == package


def _variables(frame: FrameType) -> dict[str, Any]:
    """Return all variables of a frame, and the parameters and buffers of the module whose method it is."""
    found = dict(frame.f_locals)
    holder = found.pop("self", None)
    if isinstance(holder, nn.Module):
        found.update(_own_tensors(holder))
    elif holder is not None:
        found["self"] = holder
    return found


def _own_tensors(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}


def _named(entry: TracebackType) -> tuple[dict[str, Any], int, bool]:
    """Return what the expression names at which ``entry`` was raised, its calls, and whether a ``raise`` did that."""
    code, at = entry.tb_frame.f_code, entry.tb_lasti
    instructions = [*dis.get_instructions(code)]
    failed = next((each for each in instructions if each.offset == at), None)
    if failed is None:
        return {}, 0, False
    offsets = _places(code, entry, instructions, stores=failed.opname.startswith("STORE"))
    within = [each for each in instructions if each.offset in offsets]
    calls = sum(each.opname.startswith(("CALL", "BINARY_OP", "BINARY_MATRIX")) for each in within)
    return _chains(within, entry.tb_frame), calls, failed.opname in ("RAISE_VARARGS", "RERAISE")


def _places(code: CodeType, entry: TracebackType, instructions: list[dis.Instruction], *, stores: bool) -> set[int]:
    """Return the offsets of the instructions that make up the expression at which ``entry`` was raised."""
    positions = getattr(code, "co_positions", None)
    if positions is None:
        return _of_line(entry, instructions)
    places = {2 * at: place for at, place in enumerate(positions())}
    first, last, left, right = places.get(entry.tb_lasti, (None,) * 4)
    if None in (first, last, left, right):
        return set()
    if stores:  # what is stored stands in the same statement, beside what it is stored into
        left, right = 0, 1 << 30
    found = set()
    for at, (begin, end, start, stop) in places.items():
        if None not in (begin, end, start, stop) and (first, left) <= (begin, start) and (end, stop) <= (last, right):
            found.add(at)
    return found


def _of_line(entry: TracebackType, instructions: list[dis.Instruction]) -> set[int]:
    """The same before Python 3.11: all instructions of the line."""
    found, line = set(), None
    for each in instructions:
        line = each.starts_line if isinstance(each.starts_line, int) else line
        if line == entry.tb_lineno:
            found.add(each.offset)
    return found


def _chains(instructions: list[dis.Instruction], frame: FrameType) -> dict[str, Any]:
    """Return the values of the names in ``instructions``, and of their attributes, ``a.b.c`` with ``a`` and ``a.b``."""
    found: dict[str, Any] = {}
    name, value = "", None
    for each in instructions:
        if each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")) and name:
            attribute = str(each.argval)
            name, value = f"{name}.{attribute}", _attribute(value, attribute)
            found[name] = value
        elif each.opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF")):
            for part in each.argval if isinstance(each.argval, tuple) else (each.argval,):
                name, value = str(part), frame.f_locals.get(part, frame.f_globals.get(part))
                found[name] = value
        elif not each.opname.startswith(("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG")):
            name, value = "", None
    return found


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a module or of an object that keeps it in ``__dict__``: no property is run."""
    if isinstance(value, nn.Module):
        for held in (value._parameters, value._buffers, value._modules):
            if name in held:
                return held[name]
    return getattr(value, "__dict__", {}).get(name)


def _dtypes(named: dict[str, Any]) -> dict[torch.dtype, str]:
    """Return the floating dtypes of tensors in ``named``; a module that is called gives what its parameters are."""
    found: dict[torch.dtype, str] = {}
    for name, value in named.items():
        given = [*value.parameters()][:1] if isinstance(value, nn.Module) else tensors_in(value)
        label = f"what {name} gives" if isinstance(value, nn.Module) else name
        for tensor in given:
            if tensor.dtype.is_floating_point and name != "self":
                found.setdefault(tensor.dtype, label)
    return found
