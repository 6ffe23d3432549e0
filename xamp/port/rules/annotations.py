"""Types that are written as texts: ``scaler: "torch.cuda.amp.GradScaler"``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_NAME = re.compile(r"(?<![\w.])(?:torch\.cuda|torch\.npu|torch_npu|apex)(?:\.\w+)+")


class QuotedType(Rule):
    """A type in quotes that names Apex, CUDA or the NPU is kept, with a note: nothing looks into the text."""

    name = "quoted-type"
    grade = Grade.NOTED
    met = 1
    kinds = ("SimpleString",)
    examples = (
        Example(
            "def train(scaler: 'torch.cuda.amp.GradScaler'):\n    pass\n",
            "# TODO(xamp): a type in quotes names torch.cuda.amp.GradScaler; write the name that the ported file has\n"
            "def train(scaler: 'torch.cuda.amp.GradScaler'):\n    pass\n",
        ),
        Example(
            "stream: Optional['torch.cuda.Stream'] = None\n",
            "# TODO(xamp): a type in quotes names torch.cuda.Stream; write the name that the ported file has\n"
            "stream: Optional['torch.cuda.Stream'] = None\n",
        ),
    )
    unchanged = (
        "def train(scaler: 'torch.amp.GradScaler', name: Literal['torch.cuda.amp']) -> 'Model':\n    pass\n",
        "print('torch.cuda.amp.GradScaler')\nnames: dict[str, int] = {'torch.cuda.Stream': 1}\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        found = _NAME.search(text_of(node) or "")
        if found is None or work.is_kept(self, node):
            return
        for outer in work.source.above(node):
            if kind(outer) == "Subscript" and work.code(outer.value).rpartition(".")[2] == "Literal":
                return
            if kind(outer) == "Annotation":
                name = found[0]
                told = f"a type in quotes names {name}; write the name that the ported file has"
                work.say(self, node, Grade.NOTED, told)
                return


RULES = (QuotedType(),)
