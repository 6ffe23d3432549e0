"""Texts such as ``"torch.cuda.FloatTensor"``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import place_of
from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_TYPE = re.compile(r"torch\.(cuda|npu)\.\w+Tensor")


class TypeText(Rule):
    """`"torch.cuda.FloatTensor"` as a text is kept, with a note; `torch.cuda.FloatTensor` itself is renamed."""

    name = "tensor-type-text"
    grade = Grade.NOTED
    met = 11
    kinds = ("SimpleString",)
    examples = (
        Example(
            "half = x.type() == 'torch.cuda.HalfTensor'\n",
            "# TODO(xamp): a type as text names its device; ask for .dtype, and .device.type\n"
            "half = x.type() == 'torch.cuda.HalfTensor'\n",
        ),
    )
    unchanged = ("print('torch.cuda.HalfTensor')\n'torch.cuda.HalfTensor'\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if not _TYPE.fullmatch(text_of(node) or "") or work.is_kept(self, node):
            return
        if work.is_claimed(node):
            return
        place, name = place_of(work, node)
        wanted = place == "compare" or (
            place == "call" and name.rpartition(".")[2] in ("type", "set_default_tensor_type")
        )
        if wanted or (place in ("assign", "default") and "type" in name) or kind(work.parent(node)) == "Element":
            work.say(self, node, Grade.NOTED, "a type as text names its device; ask for .dtype, and .device.type")


RULES = (TypeText(),)
