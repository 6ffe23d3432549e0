"""``x.cuda()`` and ``x.npu()``."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.receivers import OWN, assigned, doubt_about
from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work, arguments

__all__ = ["RULES", "index_of", "is_device_text", "is_index", "is_option"]

_METHODS = ("cuda", "npu")
_TEXT = re.compile(r"(?:cuda|npu)(?::(\d+))?")
_INDEX = re.compile(r"(^|_)(rank|gpu|gpus|idx|index|id|ids|i|n|local|num|number|ordinal|cuda)\d*$|rank|gpu", re.I)
_PART = re.compile(r"(cuda|npu|cpu):?\d*")
_OPTIONS = re.compile(
    r"(^|_)(args?|arguments|opts?|options?|cfg|conf|configs?|params?|hparams|hps?|flags|settings|namespace|self|cls)$",
    re.I,
)
_DEVICE = re.compile(r"dev(ice)?s?\d*$", re.I)


def index_of(node: Node) -> str | None:
    """The index in a text such as ``"cuda:1"``, empty where it has none; None for what is no device."""
    found = _TEXT.fullmatch(text_of(node) or "")
    return None if found is None else found[1] or ""


def is_device_text(text: str) -> bool:
    """Whether a text may name a device, or devices: ``cuda``, ``cuda:``, ``cuda0``, ``cpu:0,cuda:0``."""
    parts = [part.strip() for part in text.split(",")]
    return all(_PART.fullmatch(part) for part in parts) and any(part.startswith(_METHODS) for part in parts)


def is_option(work: Work, node: Node) -> bool:
    """Whether an expression is where a script keeps its options, so that ``.cuda`` of it is a switch."""
    last = node.attr.value if kind(node) == "Attribute" else node.value if kind(node) == "Name" else ""
    if kind(node) == "Name":
        made = [binding.value for binding in work.scopes.bindings(node) if binding.value is not None]
        if any("parse" in work.code(value) or "Namespace" in work.code(value) for value in made):
            return True
    return bool(_OPTIONS.search(str(last)))


def is_index(work: Work, node: Node, seen: tuple[Node, ...] = ()) -> bool | None:
    """Whether an expression is the index of a device; None where that cannot be told, or names itself (``seen``)."""
    what = kind(node)
    if what == "BinaryOperation" and kind(node.left) in ("SimpleString", "FormattedString", "ConcatenatedString"):
        return False  # a text that is put together names a device
    if what in ("Integer", "BinaryOperation"):
        return True
    if what == "Call":
        path = work.path(node.func)
        if path.endswith((".current_device", ".device_count")) or work.code(node.func) in ("int", "len", "get_rank"):
            return True
        if kind(node.func) == "Attribute" and "rank" in node.func.attr.value:
            return True
        return False if path.endswith("device") else None
    if what == "IfExp":
        sides = [is_index(work, each, seen) for each in (node.body, node.orelse)]
        return sides[0] if sides[0] is sides[1] else None
    if what == "Attribute" and node.attr.value == "device" and not is_option(work, node.value):
        return False  # a tensor's
    if what == "Subscript":
        return is_index(work, node.value, seen)
    if what == "Name":
        if node.value == "None":
            return True
        for binding in work.scopes.bindings(node):
            value = binding.value
            if value is None or any(value is each for each in seen):
                continue
            if (found := is_index(work, value, (*seen, value))) is not None:
                return found
    last = node.attr.value if what == "Attribute" else node.value if what == "Name" else ""
    if _DEVICE.search(last):
        return None if what == "Name" or what == "Attribute" else False
    return True if last and _INDEX.search(last) else None


def may_be_none(work: Work, node: Node) -> bool:
    """Whether a name is given None somewhere: as a parameter's default, or by an assignment."""
    for binding in work.scopes.bindings(node) if kind(node) == "Name" else ():
        value = getattr(binding.node, "default", None) if binding.how == "parameter" else binding.value
        if value is not None and work.code(value) == "None":
            return True
    return False


def _whose_device(node: Any) -> Node | None:
    """The tensor ``y`` of ``y.get_device()``, which is an index; else None."""
    if kind(node) != "Call" or kind(node.func) != "Attribute" or node.args:
        return None
    return node.func.value if node.func.attr.value == "get_device" else None


class Method(Rule):
    """`x.cuda()` becomes `x.to(xamp.device())`, an index goes along, and so do the other arguments.

    A class of the file with a method `cuda` of its own keeps it. Where an argument may be a device, not an index, the
    call becomes `.to(argument)`, with a note.
    """

    name = "device-method"
    met = 457
    kinds = ("Call", "Attribute")
    examples = (
        Example(
            "x = x.cuda()\ny = y.cuda(non_blocking=True)\nnet.cuda(args.gpu)\nz = z.cuda(0, non_blocking=True)\n",
            "import xamp\nx = x.to(xamp.device())\ny = y.to(xamp.device(), non_blocking=True)\n"
            "net.to(xamp.device(args.gpu))\nz = z.to(xamp.device(0), non_blocking=True)\n",
        ),
        Example(
            "loss = nn.CrossEntropyLoss().cuda(device=args.gpu)\nx = x.cuda('cuda:1', True)\n",
            "import xamp\nloss = nn.CrossEntropyLoss().to(xamp.device(args.gpu))\n"
            "x = x.to(xamp.device(1), non_blocking=True)\n",
        ),
        Example("x = x.npu(non_blocking=True)\n", "import xamp\nx = x.to(xamp.device(), non_blocking=True)\n"),
        Example(
            "a = a.cuda(b.get_device())\nc = c.cuda(b.device)\nd = d.cuda(0 if small else args.gpu)\n",
            "import xamp\na = a.to(b.device)\nc = c.to(b.device)\nd = d.to(xamp.device(0 if small else args.gpu))\n",
        ),
        Example(
            "def f(x, device):\n    return x.cuda(device)\n",
            "def f(x, device):\n"
            "    # TODO(xamp): device may be a device or an index; for an index write xamp.device(device)\n"
            "    return x.to(device)\n",
        ),
        Example(
            "def f(x, device=None):\n    return x.cuda(device)\n",
            "import xamp\ndef f(x, device=None):\n"
            "    # TODO(xamp): device may be a device or an index; for an index write xamp.device(device)\n"
            "    return x.to(xamp.device() if device is None else device)\n",
        ),
        Example(
            "x = x.cuda(*where)\n",
            "# TODO(xamp): write .to(xamp.device(...)) by hand: the arguments are not known here\nx = x.cuda(*where)\n",
        ),
        Example(
            "move = x.cuda if fast else x.cpu\n",
            "# TODO(xamp): the method is used as a value; write a function that calls .to(xamp.device())\n"
            "move = x.cuda if fast else x.cpu\n",
        ),
    )
    unchanged = (
        "class Batch:\n    def cuda(self):\n        return self\n\n\nBatch().cuda()\n",
        "# x = x.cuda()\nhelp = 'call .cuda() first'\n",
        "use = args.cuda\nif args.cuda:\n    pass\n",
        "def npu(x):\n    return x\n\n\nnpu(1)\nx.npu = True\nx.npus()\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if kind(node) == "Attribute":
            self._value(node, work)
            return
        if kind(node.func) != "Attribute" or node.func.attr.value not in _METHODS or work.is_kept(self, node):
            return
        if work.is_claimed(node) or work.path(node.func) in work.table:
            return
        if doubt := doubt_about(work, node.func):
            if doubt != OWN:
                work.say(self, node, Grade.NOTED, doubt)
            return
        plain, named, open_ended = arguments(node)
        if open_ended or len(plain) > 2 or set(named) - {"device", "non_blocking", "memory_format"}:
            work.say(self, node, Grade.NOTED, "write .to(xamp.device(...)) by hand: the arguments are not known here")
            return
        work.replace(node.func.attr, "to")
        if len(plain) > 1:
            start = work.source.span(plain[1])[0]
            work.splice(start, start, "non_blocking=")
        self._device(node, plain[0] if plain else named.get("device"), work)

    def _device(self, call: Any, arg: Any, work: Work) -> None:
        if arg is None:
            device = work.name("xamp.device", call)
            at = work.source.span(call.args[0])[0] if call.args else work.source.span(call)[1] - 1
            work.splice(at, at, f"{device}(), " if call.args else f"{device}()")
            work.say(self, call, Grade.CERTAIN)
            return
        start, end = work.source.span(arg.value)
        if arg.keyword is not None:
            keyword = work.source.span(arg)[0]
            work.splice(keyword, keyword + work.source.data[keyword:start].index(b"=") + 1, "")
        index = index_of(arg.value)
        if (other := _whose_device(arg.value)) is not None:  # -1 where it is on a CPU
            work.replace(arg.value, f"{work.code(other)}.device")
        elif index is not None:
            work.claim(arg.value)
            work.replace(arg.value, f"{work.name('xamp.device', call)}({index})")
        elif kind(arg.value) in ("FormattedString", "ConcatenatedString") or is_index(work, arg.value) is False:
            pass  # a device already
        elif is_index(work, arg.value):
            work.splice(start, start, f"{work.name('xamp.device', call)}(")
            work.splice(end, end, ")")
        else:
            text = work.code(arg.value)
            if may_be_none(work, arg.value):  # .cuda(None) is the current device, .to(None) is an error
                work.splice(start, start, f"{work.name('xamp.device', call)}() if {text} is None else ")
            work.say(
                self, call, Grade.NOTED, f"{text} may be a device or an index; for an index write xamp.device({text})"
            )
            return
        work.say(self, call, Grade.CERTAIN)

    def _value(self, node: Any, work: Work) -> None:
        """``move = model.cuda``; ``use = args.cuda`` and ``if net.cuda:`` ask for a switch."""
        if node.attr.value not in _METHODS or work.is_kept(self, node) or is_option(work, node.value):
            return
        parent = work.parent(node)
        path = work.path(node)
        if path and not path.startswith(("torch.Tensor.", "torch.nn.Module.")):
            return
        if (
            kind(parent) not in _VALUES
            or getattr(parent, "test", None) is node
            or getattr(parent, "func", None) is node
        ):
            return
        if kind(parent) == "Arg" and parent.keyword is not None and parent.keyword.value in _METHODS:
            return
        if not assigned(work, node.attr.value):  # what the file sets is data
            work.say(self, node, Grade.NOTED, _AS_VALUE)


_VALUES = ("IfExp", "Assign", "AnnAssign", "NamedExpr", "Arg", "Return", "Element", "DictElement", "Lambda", "Yield")
_AS_VALUE = "the method is used as a value; write a function that calls .to(xamp.device())"


RULES = (Method(),)
