"""Lines that name a device and of which no other rule says anything: the reason why each stays, for the report."""

from __future__ import annotations

import bisect
import re
from typing import Any

from xamp.port.places import is_spoken, place_of
from xamp.port.rule import Grade, Rule
from xamp.port.source import Node, kind
from xamp.port.vendor_names import MENTIONS
from xamp.port.work import Work

__all__ = ["RULES", "sweep"]

_LOOKS_UP = ("getattr", "hasattr", "setattr", "delattr", "import_module", "find_spec", "find_module", "find_loader")
_LEAVES = ("Name", "SimpleString", "FormattedStringText", "ImportAlias", "ImportFrom")
_COMMENT = "a comment"
_SPOKEN = "a text that people read"
_KEY = "a key, or a name of an option"
_LOOKED_UP = "a name that is looked up"
_TEXT = "a text that names no device"
_OWN = "a name of the script's own"
_ELSEWHERE = "a name of another file, which is ported by itself; of another package, see which devices it is for"
_TORCH = "a part of torch for CUDA that no rule knows; see whether the device in use has it"
_PART = "part of what line {0} tells of"
_KEPT = "a comment of the line keeps it"


class Mentions(Rule):
    """Every other line that names CUDA or Ascend is in the report of `--report`, with the reason why it stays.

    A part of torch that no rule knows gets a line on the terminal too.
    """

    name = "mentions"
    grade = Grade.NEUTRAL
    met = 0
    unchanged = ("# cuda\nuse_cuda = True\nprint('cuda')\n",)


class OtherFiles(Rule):
    """Files that are no Python are read line by line: a variable for the NPU beside CUDA's, and notes in the report.

    No comment goes into such a file. Libraries and programs of one vendor are the rule `one-vendor`'s there too.
    """

    name = "other-files"
    grade = Grade.NOTED
    met = 0
    unchanged = ("# run by: CUDA_VISIBLE_DEVICES=0 python train.py\n",)


def sweep(work: Work) -> None:
    """Say of each line that names a device, and of which nothing is said, why it stays."""
    leaves = [(*work.source.span(node), node) for node in work.source.nodes if kind(node) in _LEAVES]
    leaves.sort(key=lambda each: each[:2])
    starts = [start for start, _, _ in leaves]
    for found in MENTIONS.finditer(work.source.data):
        line = work.source.line(found.start())
        if work.is_told(line):
            continue
        at = bisect.bisect_right(starts, found.start()) - 1
        node = next((each for low, high, each in reversed(leaves[: at + 1][-3:]) if low <= found.start() < high), None)
        first = work.part_of(line)
        grade, reason = _reason(work, node) if first is None else (Grade.NEUTRAL, _PART.format(first))
        span = found.span() if node is None else _shown(work, node, found)
        into = work.stays if grade is Grade.NEUTRAL else work.findings
        into.append(work.found_at(RULES[0], *span, grade, reason))


def _shown(work: Work, node: Node, found: re.Match[bytes]) -> tuple[int, int]:
    """The part of a leaf on the line of the word."""
    start, end = work.source.span(node)
    low = max(start, work.source.line_start(found.start()))
    return low, min(end, work.source.next_line(found.start()) - 1)


def _reason(work: Work, node: Any) -> tuple[Grade, str]:
    if node is None:
        return Grade.NEUTRAL, _COMMENT
    if work.is_kept(RULES[0], node):
        return Grade.NEUTRAL, _KEPT
    what = kind(node)
    if what in ("ImportAlias", "ImportFrom"):
        return Grade.NEUTRAL, _ELSEWHERE
    if what == "Name":
        return _of_name(work, node)
    place, name = place_of(work, node)
    if kind(work.parent(node)) in ("Index", "DictElement") or place in ("key", "compare"):
        return Grade.NEUTRAL, _KEY
    if place == "call" and name.rpartition(".")[2] in _LOOKS_UP:
        return Grade.NEUTRAL, _LOOKED_UP
    if kind(work.parent(node)) in ("Expr", "ConcatenatedString", "FormattedString") or is_spoken(work, node):
        return Grade.NEUTRAL, _SPOKEN
    return Grade.NEUTRAL, _TEXT


def _of_name(work: Work, node: Any) -> tuple[Grade, str]:
    chain = node
    while kind(work.parent(chain)) == "Attribute":
        chain = work.parent(chain)
    path = work.path(chain)
    if any(kind(each) in ("Import", "ImportFrom") for each in work.source.above(node)):
        return Grade.NEUTRAL, _ELSEWHERE
    if path.startswith(("torch.", "torch_npu.")) and re.search(r"(?i)cuda|nccl|cudnn", path):
        return Grade.NOTED, _TORCH
    return Grade.NEUTRAL, _ELSEWHERE if path else _OWN


RULES = (Mentions(), OtherFiles())
