"""Texts that are put together: ``f"cuda:{i}"``, ``"cuda:%d" % i``, ``"cuda:{}".format(i)``, ``"cuda:" + i``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import ASK, is_spoken
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import is_device_text
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_HOLE = re.compile(r"%[\d.]*[a-z]|\{[^{}\s]*\}")
_ANYWHERE = re.compile(r"(?<![\w.])(cuda|npu)(:|$)")


class Formatted(Rule):
    """`f"cuda:{i}"`, `"cuda:%d" % i`, `"cuda:{}".format(i)` and `"cuda:" + i`: only the word is replaced.

    What comes out is a text as before, for scripts store it and compare it.
    """

    name = "device-format"
    met = 29
    kinds = ("FormattedString", "BinaryOperation", "Call")
    examples = (
        Example("a = 'cuda' + str(i)\n", f"# TODO(xamp): {ASK}\na = 'cuda' + str(i)\n"),
        Example(
            "a = 'cuda:{:d}'.format(rank)\n",
            "import xamp\na = (xamp.device_type() + ':{:d}'.format(rank))\n",
        ),
        Example(
            "a = f'cuda:{rank}'\nb = 'cuda:%d' % rank\nc = 'cuda:{}'.format(rank)\nd = 'npu:' + str(rank)\n",
            "import xamp\na = f'{xamp.device_type()}:{rank}'\nb = f'{xamp.device_type()}:%d' % rank\n"
            "c = (xamp.device_type() + ':{}'.format(rank))\nd = xamp.device_type() + ':' + str(rank)\n",
        ),
    )
    unchanged = (
        "m = f'cuda: {error}'\nn = 'cuda: %s' % error\nprint(f'cuda:{rank} is full')\n",
        "a = f'{x} cuda:{y}'\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node) or work.is_taken(node):
            return
        what = kind(node)
        if what == "FormattedString":
            self._f_string(node, work)
        elif what == "BinaryOperation":
            self._operation(node, work)
        elif kind(node.func) == "Attribute" and node.func.attr.value == "format":
            self._format(node, work)

    def _f_string(self, node: Any, work: Work) -> None:
        parts = list(node.parts)
        if len(parts) < 2 or kind(work.parent(node)) == "ConcatenatedString":
            return
        texts = "".join(part.value for part in parts if kind(part) == "FormattedStringText")
        if is_spoken(work, node):
            return
        if not re.fullmatch(r"(cuda|npu):\d*", texts) or kind(parts[0]) != "FormattedStringText":
            if _ANYWHERE.search(texts) and not re.search(r"\s", texts):
                work.say(self, node, Grade.NOTED, ASK)
            return
        start, _ = work.source.span(parts[0])
        word = parts[0].value.partition(":")[0]
        work.splice(start, start + len(word), f"{{{work.name('xamp.device_type', node)}()}}")
        work.say(self, node, Grade.CERTAIN)

    def _operation(self, node: Any, work: Work) -> None:
        text = text_of(node.left)
        if text is None or is_spoken(work, node):
            return
        device = f"{work.root}.device_type()"
        sign = kind(node.operator)
        quote = node.left.quote
        if sign == "Modulo" and re.fullmatch(r"(cuda|npu):%[dsi]", text):
            work.name("xamp.device_type", node)
            work.replace(node.left, f"f{quote}{{{device}}}:{text.partition(':')[2]}{quote}")
        elif sign == "Add" and re.fullmatch(r"(cuda|npu):", text):
            work.name("xamp.device_type", node)
            work.replace(node.left, f"{device} + {quote}:{quote}")
        else:
            self._ask(node.left, text, work)
            return
        work.say(self, node, Grade.CERTAIN)

    def _format(self, node: Any, work: Work) -> None:
        text = text_of(node.func.value)
        if text is None or is_spoken(work, node):
            return
        if not re.fullmatch(r"(cuda|npu):\{\w*(:\w*)?\}", text):
            self._ask(node.func.value, text, work)
            return
        work.name("xamp.device_type", node)
        word = text.partition(":")[0]
        start, end = work.source.span(node)
        high = work.source.span(node.func.value)[1]
        rest = f"{node.func.value.quote}{text[len(word) :]}{node.func.value.quote}"
        bare = kind(work.parent(node)) == "Arg"
        opening, closing = ("", "") if bare else ("(", ")")
        work.splice(start, high, f"{opening}{work.root}.device_type() + {rest}")
        if closing:
            work.splice(end, end, closing)
        work.say(self, node, Grade.CERTAIN)

    def _ask(self, node: Node, text: str, work: Work) -> None:
        """A text that is completed at run time, in a form that the rule does not write."""
        if is_device_text(re.sub(_HOLE, "0", text)) and not work.is_claimed(node):
            work.claim(node)
            work.say(self, node, Grade.NOTED, ASK)


RULES = (Formatted(),)
