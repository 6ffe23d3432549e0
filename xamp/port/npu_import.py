"""Why an ``import torch_npu`` stays: an answer hangs on it, or a name that stays, or all of a script."""

from __future__ import annotations

import itertools
import re
from typing import Any

from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["NAMED", "WHETHER", "why_it_stays"]

NAMED = "torch.npu that stays"  # what work.found has the nodes under
WHETHER = "whether this fails says what follows, so it stays; xamp.device_type() == 'npu' asks for the device in use"
_NAMED = "torch.npu stays below, and torch has it by this import, so it stays too; take out both"
_ALONE = (
    "nothing else here would import torch_npu, so it stays; where the script asks xamp.device() for its device, "
    "xamp's backend imports it"
)
_SCRIPT = re.compile(rb"\b__main__\b|\bsys\.argv\b|\.parse_(?:known_)?args\(")
_MOVES = re.compile(rb"\.to\(|\bdevice\b")
_SETS = ("Assign", "AnnAssign", "AugAssign", "Return")
_BINDS = (*_SETS, "Import", "ImportFrom", "FunctionDef", "ClassDef")


def why_it_stays(work: Work, alias: Node, is_alone: bool) -> str:
    """The note for an ``import torch_npu`` that stays; empty where it may go.

    Args:
        work: the file.
        alias: ``torch_npu`` in the statement.
        is_alone: whether nothing else of the file is xamp's after the port.
    """
    if _is_question(work, alias):
        return WHETHER
    if any(not work.is_taken(node) for node in work.found.get(NAMED, ())):
        return _NAMED
    data = work.source.data
    return _ALONE if is_alone and _SCRIPT.search(data) and _MOVES.search(data) else ""


def _is_question(work: Work, alias: Node) -> bool:
    """``try: import torch_npu; HAS_NPU = True`` with ``except ImportError: HAS_NPU = False``."""
    below: Any = alias
    inside = itertools.takewhile(lambda each: kind(each) not in ("FunctionDef", "Module"), work.source.above(alias))
    for above in inside:
        if kind(above) in ("Try", "TryStar") and above.body is below:
            if above.orelse is not None or _has(work, above.body, _SETS):
                return True
            if any(_has(work, each, _BINDS) for each in above.handlers):
                return True
        below = above
    return False


def _has(work: Work, node: Node, kinds: tuple[str, ...]) -> bool:
    """Whether a statement of such a kind stands in a block; ``torch_npu = None`` is none."""
    waiting: list[Any] = [node]
    while waiting:
        each = waiting.pop()
        if kind(each) in kinds and not work.code(each).startswith("torch_npu ="):
            return True
        waiting += work.source.children(each)
    return False
