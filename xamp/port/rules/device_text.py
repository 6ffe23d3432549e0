"""Texts that name a device: ``"cuda"``, ``"cuda:0"``, ``f"cuda:{i}"``, ``"cuda:%d" % i``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import index_of
from xamp.port.rules.torch_device import is_choice
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES", "place_of"]

_PREFIX = re.compile(r"(?:cuda|npu):")
_LIKE_DEVICE = re.compile(r"dev(ice)?s?(_?(type|name|str|string))?\d*$|^(map_)?loc(ation)?$|accelerator$", re.I)


def is_like_device(name: str) -> bool:
    """Whether a name is one for devices."""
    return bool(_LIKE_DEVICE.search(name))


def last_name(work: Work, node: Node) -> str:
    """The last part of a chain of names; of a subscript with a text, that text."""
    what = kind(node)
    if what == "Attribute":
        return str(node.attr.value)
    if what == "Name":
        return str(node.value)
    if what == "Subscript" and len(node.slice) == 1 and kind(node.slice[0].slice) == "Index":
        return text_of(node.slice[0].slice.value) or last_name(work, node.value)
    if what == "Call" and work.code(node.func) == "str" and node.args:
        return last_name(work, node.args[0].value)
    return ""


def place_of(work: Work, node: Node) -> tuple[str, str]:
    """Where an expression stands, and the name that tells what it is for.

    Returns:
        ``("call", callee)``, ``("keyword", name)``, ``("default", parameter)``, ``("assign", target)``,
        ``("return", function)``, ``("key", "")``, ``("compare", "")``, ``("element", "")``, ``("value", key)`` of a
        dict, ``("option", flag)`` for ``default=`` of an option of argparse, or ``("other", class)``.
    """
    inner, parent = node, work.parent(node)
    while kind(parent) in ("IfExp", "BooleanOperation") and not (kind(parent) == "IfExp" and parent.test is inner):
        inner, parent = parent, work.parent(parent)
    what = kind(parent)
    if what == "Arg":
        return _argument(work, parent)
    if what == "Param":
        return "default", str(parent.name.value)
    if what in ("Assign", "AnnAssign", "NamedExpr"):
        target = parent.targets[0].target if what == "Assign" else parent.target
        return "assign", last_name(work, target)
    if what == "Return":
        function = next((each for each in work.source.above(parent) if kind(each) == "FunctionDef"), None)
        return "return", str(function.name.value) if function is not None else ""
    if what == "DictElement":
        return ("key", "") if parent.key is inner else ("value", text_of(parent.key) or "")
    if what == "Lambda":
        return _lambda(work, parent)
    if what in ("Comparison", "ComparisonTarget"):
        return "compare", ""
    return ("element" if what == "Element" else "other"), what


def _lambda(work: Work, node: Node) -> tuple[str, str]:
    return place_of(work, node)


def _argument(work: Work, arg: Node) -> tuple[str, str]:
    call = work.parent(arg)
    if kind(call) != "Call":
        return "other", kind(call)
    callee = work.path(call.func) or work.code(call.func)
    if arg.keyword is None:
        return "call", callee
    name = str(arg.keyword.value)
    if name == "default" and callee.endswith(
        ("add_argument", "option", "DEFINE_string", "Option", "Argument", "field")
    ):
        flags = [text_of(each.value) or "" for each in call.args if each.keyword is None]
        return "option", flags[0].strip("-").replace("-", "_") if flags else ""
    return "keyword", name


def is_device_place(work: Work, node: Node) -> bool | None:
    """Whether what stands at a node is a device; None where that cannot be told; False where it is none."""
    place, name = place_of(work, node)
    if place == "call":
        return (
            True
            if name.endswith((".to", "torch.device", "to_device")) or is_like_device(name) or "device" in name
            else None
        )
    if place == "keyword":
        if name in ("help", "description", "message", "title", "choices", "dest", "metavar"):
            return False
        return True if is_like_device(name) else None
    if place == "option":
        return True if is_like_device(name) or name in ("dev", "gpu", "cuda") else None
    if place in ("default", "assign", "return", "value"):
        return True if is_like_device(name) or (place == "return" and "device" in name) else None
    return False if place in ("key", "compare") else None


class Text(Rule):
    """A text that names the device becomes `xamp.device_type()`, or `xamp.device()` where torch takes a device.

    It must stand where a device stands: `.to(...)`, `device=...`, a parameter, variable or option called `device`, or
    one that is chosen by `torch.cuda.is_available()`. Keys of dicts, help texts and messages are never touched. Where
    it cannot be told what the text is for, it stays, with a note.
    """

    name = "device-text"
    met = 195
    kinds = ("SimpleString", "IfExp")
    examples = (
        Example(
            "import torch\nx = torch.zeros(3, device='cuda')\nnet.to('cuda:1')\n\n\n"
            "def f(x, device='cuda'):\n    return x\n",
            "import torch\nimport xamp\nx = torch.zeros(3, device=xamp.device())\nnet.to(xamp.device(1))\n\n\n"
            "def f(x, device=xamp.device_type()):\n    return x\n",
        ),
        Example(
            "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n",
            "import torch\nimport xamp\ndevice = xamp.device_type()\n",
        ),
        Example(
            "parser.add_argument('--device', default='cuda', help='cuda or cpu')\nargs.device = 'cuda:0'\n",
            "import xamp\nparser.add_argument('--device', default=xamp.device_type(), help='cuda or cpu')\n"
            'args.device = f"{xamp.device_type()}:0"\n',
        ),
        Example(
            "import torch\nd = 'cuda' if args.gpu and torch.cuda.is_available() else 'cpu'\n",
            "import torch\nimport xamp\nd = xamp.device_type() if args.gpu and xamp.is_available() else 'cpu'\n",
        ),
        Example(
            "run('cuda')\n",
            "# TODO(xamp): does this text name a device? Then write xamp.device_type()\nrun('cuda')\n",
        ),
    )
    unchanged = (
        "parser.add_argument('--no_cuda', help='cuda')\nstate = {'cuda': 1}\nstate['cuda'] = 2\nprint('cuda')\n",
        "'''cuda'''\nraise ValueError('cuda')\nlogger.info('npu')\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) == "IfExp":
            self._choice(node, work)
            return
        index = index_of(node)
        if index is None or work.is_claimed(node) or work.is_taken(node) or self._is_text(node, work):
            return
        verdict = is_device_place(work, node)
        if verdict is None and self._is_chosen(node, work):
            verdict = True
        if verdict is True:
            self._write(node, index, work)
        elif verdict is None:
            work.say(self, node, Grade.NOTED, "does this text name a device? Then write xamp.device_type()")

    def _choice(self, node: Any, work: Work) -> None:
        if not is_choice(work, node) or work.is_taken(node):
            return
        device = work.name("xamp.device_type", node)
        index = index_of(node.body)
        if index == "" and "#" not in work.code(node):
            work.replace(node, f"{device}()")
            work.say(self, node, Grade.CERTAIN)

    def _write(self, node: Any, index: str, work: Work) -> None:
        place, name = place_of(work, node)
        direct = kind(work.parent(node)) == "Arg"
        if direct and (
            name.endswith(".to") if place == "call" else place == "keyword" and name in ("device", "map_location")
        ):
            new = f"{work.name('xamp.device', node)}({index})"
        elif index and any(kind(each) == "FormattedStringExpression" for each in work.source.above(node)):
            work.say(self, node, Grade.NOTED, "write xamp.device_type() here by hand")
            return
        else:
            device = f"{work.name('xamp.device_type', node)}()"
            new = f'f"{{{device}}}:{index}"' if index else device
        work.replace(node, new)
        work.say(self, node, Grade.CERTAIN)

    def _is_chosen(self, node: Node, work: Work) -> bool:
        """Whether the text is one side of a choice whose other side is ``"cpu"``, or that asks for the device."""
        around = work.parent(node)
        if kind(around) != "IfExp" or around.test is node:
            return False
        other = around.orelse if around.body is node else around.body
        return (text_of(other) or "").partition(":")[0] in ("cpu", "mps") or "is_available()" in work.code(around.test)

    def _is_text(self, node: Node, work: Work) -> bool:
        """Whether the text is read by people, or is part of a longer one."""
        parent = work.parent(node)
        if kind(parent) in (
            "Expr",
            "ConcatenatedString",
            "Subscript",
            "Index",
            "SubscriptElement",
            "Assert",
            "BinaryOperation",
            "Annotation",
        ):
            return True
        place, name = place_of(work, node)
        if place != "call":
            return kind(parent) == "Attribute"
        last = name.rpartition(".")[2]
        return (
            last in _SPEAKING
            or last.endswith(("Error", "Exception", "Warning"))
            or last in ("getattr", "hasattr", "setattr")
        )


_SPEAKING = {
    *(
        "print",
        "info",
        "warning",
        "warn",
        "error",
        "debug",
        "critical",
        "exception",
        "log",
        "write",
        "echo",
        "add_argument",
    ),
    *(
        "add_scalar",
        "format",
        "join",
        "startswith",
        "endswith",
        "replace",
        "split",
        "get",
        "pop",
        "index",
        "count",
        "find",
    ),
    *(
        "setdefault",
        "update_config",
        "search",
        "match",
        "append_log",
        "import_module",
        "find_spec",
        "range_push",
        "section",
    ),
}


class Formatted(Rule):
    """`f"cuda:{i}"`, `"cuda:%d" % i`, `"cuda:{}".format(i)` and `"cuda:" + i`: only the word is replaced.

    What comes out is a text as before, for scripts store it and compare it.
    """

    name = "device-format"
    met = 29
    kinds = ("FormattedString", "BinaryOperation", "Call")
    examples = (
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
        if len(parts) < 2 or node.start.lower() not in ("f'", 'f"') or kind(parts[0]) != "FormattedStringText":
            return
        texts = "".join(part.value for part in parts if kind(part) == "FormattedStringText")
        if (
            not re.fullmatch(r"(cuda|npu):\d*", texts)
            or not _PREFIX.match(parts[0].value)
            or self._is_spoken(node, work)
        ):
            return
        start, _ = work.source.span(parts[0])
        word = parts[0].value.partition(":")[0]
        work.splice(start, start + len(word), f"{{{work.name('xamp.device_type', node)}()}}")
        work.say(self, node, Grade.CERTAIN)

    def _operation(self, node: Any, work: Work) -> None:
        text = text_of(node.left)
        if text is None or self._is_spoken(node, work):
            return
        device = f"{work.root}.device_type()"
        sign = kind(node.operator)
        quote = node.left.value[0]
        if sign == "Modulo" and re.fullmatch(r"(cuda|npu):%[dsi]", text) and len(node.left.value) == len(text) + 2:
            work.name("xamp.device_type", node)
            work.replace(node.left, f"f{quote}{{{device}}}:{text.partition(':')[2]}{quote}")
        elif sign == "Add" and re.fullmatch(r"(cuda|npu):", text):
            work.name("xamp.device_type", node)
            work.replace(node.left, f"{device} + {quote}:{quote}")
        else:
            return
        work.say(self, node, Grade.CERTAIN)

    def _format(self, node: Any, work: Work) -> None:
        text = text_of(node.func.value)
        if text is None or not re.fullmatch(r"(cuda|npu):\{\w*\}", text) or self._is_spoken(node, work):
            return
        work.name("xamp.device_type", node)
        word = text.partition(":")[0]
        start, end = work.source.span(node)
        inner = work.source.span(node.func.value)[0]
        quote = node.func.value.value[0]
        bare = kind(work.parent(node)) == "Arg"
        opening, closing = ("", "") if bare else ("(", ")")
        work.splice(start, inner + 1 + len(word), f"{opening}{work.root}.device_type() + {quote}")
        if closing:
            work.splice(end, end, closing)
        work.say(self, node, Grade.CERTAIN)

    def _is_spoken(self, node: Node, work: Work) -> bool:
        place, name = place_of(work, node)
        if place == "keyword":
            return name in ("help", "description", "message", "title")
        return place == "key" or (place == "call" and name.rpartition(".")[2] in _SPEAKING)


RULES = (Formatted(), Text())
