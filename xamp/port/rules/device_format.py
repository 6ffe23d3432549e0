"""Texts that are put together: ``f"cuda:{i}"``, ``"cuda:%d" % i``, ``"cuda:{}".format(i)``, ``"cuda:" + i``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import ASK, is_spoken, takes_a_device
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import is_device_text
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES", "index_in", "write_device"]

_HOLE = re.compile(r"%[\d.]*[a-z]|\{[^{}\s]*\}")
_ANYWHERE = re.compile(r"(?<![\w.])(cuda|npu)(:|$)")


_WORD = re.compile(r"(cuda|npu):")
_SUM = re.compile(r"(cuda|npu):%[dsi]")
_FORMAT = re.compile(r"(cuda|npu):\{(\w*)(:d?)?\}")
_PARTS_OF_TEXTS = ("BinaryOperation", "Attribute", "ConcatenatedString")
_COUNTS = ("int", "len", "round")


def index_in(work: Work, node: Any) -> Node | None:
    """The expression for the index in a text that names one device: ``i`` of ``f"cuda:{i}"``; None for other texts."""
    what = kind(node)
    if what == "FormattedString":
        return _in_f_string(node)
    if what == "BinaryOperation":
        text, right = text_of(node.left) or "", node.right
        if kind(node.operator) == "Modulo" and _SUM.fullmatch(text):
            is_one = kind(right) == "Tuple" and len(right.elements) == 1
            return right.elements[0].value if is_one else None if kind(right) == "Tuple" else right
        if kind(node.operator) != "Add" or not _WORD.fullmatch(text):
            return None
        return right.args[0].value if kind(right) == "Call" and work.code(right.func) == "str" and right.args else right
    if what == "Call" and kind(node.func) == "Attribute" and node.func.attr.value == "format" and len(node.args) == 1:
        found, arg = _FORMAT.fullmatch(text_of(node.func.value) or ""), node.args[0]
        name = arg.keyword.value if arg.keyword is not None else ""
        return arg.value if found is not None and not arg.star and found[2] in (name, "" if name else "0") else None
    return None


def _in_f_string(node: Any) -> Node | None:
    parts = list(node.parts)
    if len(parts) != 2 or kind(parts[0]) != "FormattedStringText" or not _WORD.fullmatch(parts[0].value):
        return None
    last = parts[1]
    if kind(last) != "FormattedStringExpression" or last.conversion is not None or last.equal is not None:
        return None
    spec = "".join(getattr(each, "value", "?") for each in last.format_spec or ())
    return last.expression if spec in ("", "d") else None


def _is_count(work: Work, node: Any) -> bool:
    """Whether an expression is an int for certain, and not a text of digits."""
    what = kind(node)
    if what == "Integer":
        return True
    if what == "Call":
        code = work.code(node.func)
        return code in _COUNTS or code.endswith(("current_device", "get_rank", "device_count"))
    if what == "Name":
        bindings = work.scopes.bindings(node)
        return bool(bindings) and all(_is_bound_to_count(work, each) for each in bindings)
    return what == "BinaryOperation" and _is_count(work, node.left) and _is_count(work, node.right)


def _is_bound_to_count(work: Work, binding: Any) -> bool:
    node = binding.node
    if binding.value is not None:
        return kind(binding.value) != "Name" and _is_count(work, binding.value)
    if binding.how == "parameter":
        return node.annotation is not None and work.code(node.annotation.annotation) == "int"
    loop = work.parent(node)
    return (
        kind(loop) in ("For", "CompFor")
        and loop.target is node
        and kind(loop.iter) == "Call"
        and work.code(loop.iter.func) == "range"
    )


def write_device(work: Work, node: Node, index: Node, as_text: bool) -> None:
    """Write ``xamp.device(index)`` in place of a node; what stands in the index is rewritten by itself.

    Args:
        work: the file.
        node: what the device takes the place of.
        index: the expression below it that gives the index.
        as_text: write ``str(xamp.device(index))``.
    """
    opening = "str(" if as_text else ""
    whole = "" if _is_count(work, index) else "int("
    start, end = work.source.span(node)
    low, high = work.source.span(index)
    work.splice(start, low, f"{opening}{work.name('xamp.device', node)}({whole}")
    work.splice(high, end, ")" * (1 + bool(opening) + bool(whole)))


class Formatted(Rule):
    """`f"cuda:{i}"`, `"cuda:%d" % i`, `"cuda:{}".format(i)` and `"cuda:" + i` become `str(xamp.device(i))`.

    What comes out is a text as before; on a CPU it is `"cpu"`. Where torch takes a device it is `xamp.device(i)`. Of a
    text that goes on, or is taken apart, only the word is replaced.
    """

    name = "device-format"
    met = 29
    kinds = ("FormattedString", "BinaryOperation", "Call")
    examples = (
        Example(
            "for i in range(n):\n    a = 'cuda:{:d}'.format(i)\n    b = f'cuda:{i}'\n    c = 'npu:' + str(i)\n",
            "import xamp\nfor i in range(n):\n    a = str(xamp.device(i))\n    b = str(xamp.device(i))\n"
            "    c = str(xamp.device(i))\n",
        ),
        Example("a = 'cuda' + str(i)\n", f"# TODO(xamp): {ASK}\na = 'cuda' + str(i)\n"),
        Example(
            "import torch\nc = torch.load(p, map_location=f'cuda:{args.rank}')\nx = x.to('cuda:%d' % args.rank)\n",
            "import torch\nimport xamp\nc = torch.load(p, map_location=xamp.device(int(args.rank)))\n"
            "x = x.to(xamp.device(int(args.rank)))\n",
        ),
        Example(
            "n = f'cuda:{rank}'.split(':')[1]\n",
            "import xamp\nn = f'{xamp.device_type()}:{rank}'.split(':')[1]\n",
        ),
    )
    unchanged = (
        "m = f'cuda: {error}'\nn = 'cuda: %s' % error\nprint(f'cuda:{rank} is full')\n",
        "a = f'{x} cuda:{y}'\n",
        "print(f'cuda:{rank}', 'cuda:%d' % rank)\nd = {f'cuda:{rank}': 1}\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node) or work.is_taken(node) or work.is_claimed(node):
            return
        what = kind(node)
        index = index_in(work, node)
        if index is not None and not self._goes_on(node, work) and not is_spoken(work, node):
            write_device(work, node, index, as_text=not takes_a_device(work, node))
            work.claim(*(each for each in work.source.children(node) if each is not index))
            work.say(self, node, Grade.CERTAIN)
        elif what == "FormattedString":
            self._f_string(node, work)
        elif what == "BinaryOperation":
            self._operation(node, work)
        elif kind(node.func) == "Attribute" and node.func.attr.value == "format":
            self._format(node, work)

    def _goes_on(self, node: Any, work: Work) -> bool:
        """Whether a text is part of a longer one, or is taken apart."""
        return kind(work.parent(node)) in _PARTS_OF_TEXTS

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
        if sign == "Modulo" and _SUM.fullmatch(text):
            work.name("xamp.device_type", node)
            work.replace(node.left, f"f{quote}{{{device}}}:{text.partition(':')[2]}{quote}")
        elif sign == "Add" and _WORD.fullmatch(text):
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
        quote = node.func.value.quote
        work.replace(node.func.value, f"({work.root}.device_type() + {quote}{text[text.index(':') :]}{quote})")
        work.say(self, node, Grade.CERTAIN)

    def _ask(self, node: Node, text: str, work: Work) -> None:
        """A text that is completed at run time, in a form that the rule does not write."""
        if is_device_text(re.sub(_HOLE, "0", text)) and not work.is_claimed(node):
            work.claim(node)
            work.say(self, node, Grade.NOTED, ASK)


RULES = (Formatted(),)
