"""Comparisons with a device: ``device.type == "cuda"``, ``"cuda" in device``, ``x.is_cuda``."""

from __future__ import annotations

from typing import Any

from xamp.port.flags import operands
from xamp.port.owners import is_tensor, short
from xamp.port.places import ASK, is_like_device, last_name, needs_brackets
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.builds import KEPT, guards_build
from xamp.port.rules.device_method import is_device_text
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_DEVICES = ("cuda", "npu")
_TESTS = ("If", "While", "Assert", "IfExp", "BooleanOperation", "UnaryOperation")


_MISSING = "asks for a device that is not there, so the text stays as users write it; add the other devices' names"


class Compare(Rule):
    """`device.type == "cuda"` asks for an accelerator: it becomes a test of the device in use.

    On a CPU it stays false, as it was. Tests such as `device.type != "cpu"` stay. Joined to
    `not torch.cuda.is_available()` the text stays as users write it, with a note.
    """

    name = "device-compare"
    met = 69
    kinds = ("Comparison", "Call")
    examples = (
        Example(
            "if device.type == 'cuda':\n    pass\nif 'cuda' in str(device) and fast:\n    pass\n",
            "import xamp\nif xamp.is_available() and device.type == xamp.device_type():\n    pass\n"
            "if xamp.is_available() and xamp.device_type() in str(device) and fast:\n    pass\n",
        ),
        Example(
            "slow = args.device != 'cuda'\n",
            "import xamp\nslow = not xamp.is_available() or args.device != xamp.device_type()\n",
        ),
        Example(
            "if args.device.startswith('cuda'):\n    pass\n",
            "import xamp\nif xamp.is_available() and args.device.startswith(xamp.device_type()):\n    pass\n",
        ),
        Example(
            "import torch\nif args.device == 'cuda' and not torch.cuda.is_available():\n    args.device = 'cpu'\n",
            f"import torch\nimport xamp\n# TODO(xamp): {_MISSING}\n"
            "if args.device == 'cuda' and not xamp.is_available():\n    args.device = 'cpu'\n",
        ),
        Example(
            "if device.type in ('cuda',) and half:\n    pass\nif device.type not in ['cuda', 'mps']:\n    pass\n"
            "if args.device in ('cuda', 'cpu'):\n    pass\n",
            "import xamp\nif xamp.is_available() and device.type in (xamp.device_type(),) and half:\n    pass\n"
            "if not xamp.is_available() or device.type not in [xamp.device_type(), 'mps']:\n    pass\n"
            "if args.device in (xamp.device_type(), 'cpu'):\n    pass\n",
        ),
        Example(
            "if mode == 'cuda':\n    pass\n",
            f"# TODO(xamp): {ASK}\nif mode == 'cuda':\n    pass\n",
        ),
        Example(
            "if first.device.type == second == 'cuda':\n    pass\n",
            f"# TODO(xamp): {ASK}\nif first.device.type == second == 'cuda':\n    pass\n",
        ),
    )
    unchanged = (
        "if device.type != 'cpu':\n    pass\nif device == 'cpu':\n    pass\n",
        "if 'cuda' in checkpoint:\n    pass\nif 'cuda' in str(error):\n    pass\n",
        "if device.type in ('cpu', 'mps'):\n    pass\nif device.type in kinds:\n    pass\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if kind(node) == "Call":
            self._start(node, work)
        else:
            self._comparison(node, work)

    def _start(self, node: Any, work: Work) -> None:
        """``device.startswith("cuda")``."""
        if kind(node.func) != "Attribute" or node.func.attr.value != "startswith" or len(node.args) != 1:
            return
        text = node.args[0].value
        if text_of(text) not in _DEVICES or not is_like_device(last_name(work, node.func.value)):
            return
        if work.is_kept(self, node) or work.is_taken(node) or work.is_claimed(text):
            return
        work.claim(text)
        self._decide(node, text, False, work)

    def _comparison(self, node: Any, work: Work) -> None:
        if work.is_kept(self, node):
            return
        if len(node.comparisons) != 1:
            self._chain(node, work)
            return
        right, sign = node.comparisons[0].comparator, kind(node.comparisons[0].operator)
        left = node.left
        text, other = (left, right) if is_device_text(text_of(left) or "") else (right, left)
        if sign in ("In", "NotIn") and kind(right) in ("Tuple", "List", "Set"):
            self._among(node, right, sign == "NotIn", work)
            return
        if sign not in ("Equal", "NotEqual", "In", "NotIn") or not is_device_text(text_of(text) or ""):
            return
        if work.is_claimed(text):
            return
        if text_of(text) not in _DEVICES:  # "cuda:0": the index belongs to it
            work.claim(text)
            work.say(self, node, Grade.NOTED, ASK)
            return
        if sign in ("In", "NotIn") and text is not left:
            return
        name = last_name(work, other)
        work.claim(text)
        if not (is_like_device(name) or (name == "type" and "dev" in work.code(other))):
            if sign in ("Equal", "NotEqual"):
                work.say(self, node, Grade.NOTED, ASK)
            return
        self._decide(node, text, sign in ("NotEqual", "NotIn"), work)

    def _among(self, node: Any, places: Any, negative: bool, work: Work) -> None:
        """``device.type in ("cuda", "xpu")``: the first text that is rewritten stands for the device in use."""
        texts = [each.value for each in places.elements]
        named = [each for each in texts if text_of(each) in _DEVICES and not work.is_claimed(each)]
        name = last_name(work, node.left)
        if not named or not (is_like_device(name) or (name == "type" and "dev" in work.code(node.left))):
            return
        work.claim(*named)
        if any(kind(each) == "Call" for each in texts):  # xamp.device_type() stands there
            return
        takes_cpu = any((text_of(each) or "").partition(":")[0] == "cpu" for each in texts)
        self._decide(node, named[0], negative, work, takes_cpu)

    def _decide(self, node: Any, text: Node, negative: bool, work: Work, takes_cpu: bool = False) -> None:
        if self._asks_for_a_missing_one(node, negative, work):
            work.say(self, node, Grade.NOTED, _MISSING)
        else:
            self._write(node, text, negative, work, takes_cpu)

    def _chain(self, node: Any, work: Work) -> None:
        """``a == b == "cuda"``: to be split by hand."""
        for each in (node.left, *(part.comparator for part in node.comparisons)):
            if is_device_text(text_of(each) or "") and not work.is_claimed(each):
                work.claim(each)
                work.say(self, node, Grade.NOTED, ASK)

    def _asks_for_a_missing_one(self, node: Node, negative: bool, work: Work) -> bool:
        """``device == "cuda" and not torch.cuda.is_available()``: rewritten, the test could never be true."""
        sign = "Or" if negative else "And"
        top = node
        while kind(parent := work.parent(top)) == "BooleanOperation" and kind(parent.operator) == sign:
            top = parent
        if any(self._is_answer(each, not negative, work) for each in operands(top, sign) if each is not node):
            return True
        if self._is_known_to_miss(node, negative, work):
            return True
        if kind(parent) != "If" or parent.test is not top:
            return False
        block = parent.orelse if negative else parent.body
        waiting = [block] if block is not None else []
        while waiting:
            each = waiting.pop()
            if self._is_answer(each, True, work) or (
                kind(each) == "Assert" and self._is_answer(each.test, False, work)
            ):
                return True
            waiting += work.source.children(each)
        return False

    def _is_known_to_miss(self, node: Node, negative: bool, work: Work) -> bool:
        """Whether a comparison stands where the device is known not to be there: ``if not is_available(): ...``."""
        below, above = node, work.parent(node)
        while not negative and above is not None and kind(above) not in ("FunctionDef", "ClassDef", "Module"):
            in_branch = kind(above) == "If" and below is not above.test
            if in_branch and self._is_answer(above.test, below is above.body, work):
                return True
            below, above = above, work.parent(above)
        return False

    def _is_answer(self, node: Any, negative: bool, work: Work) -> bool:
        """Whether a node is ``torch.cuda.is_available()`` or a name for it, or ``not`` that; counts do as well."""
        if kind(node) == "UnaryOperation" and kind(node.operator) == "Not":
            return negative and self._is_answer(node.expression, False, work)
        if kind(node) == "Comparison" and len(node.comparisons) == 1 and _is_count(node.left, work):
            sign, bound = kind(node.comparisons[0].operator), work.code(node.comparisons[0].comparator)
            none = {("Equal", "0"), ("LessThan", "1"), ("LessThanEqual", "0")}
            some = {("GreaterThan", "0"), ("GreaterThanEqual", "1"), ("NotEqual", "0")}
            return (sign, bound) in (none if negative else some)
        if kind(node) == "Name":
            values = _values_of(node, work)
            return bool(values) and all(self._is_answer(value, negative, work) for value in values)
        if negative or kind(node) != "Call":
            return False
        asks = work.path(node.func).endswith(("cuda.is_available", "npu.is_available", "xamp.is_available"))
        return asks or _is_count(node, work)

    def _write(self, node: Any, text: Node, negative: bool, work: Work, takes_cpu: bool) -> None:
        if guards_build(work, node):
            work.say(self, node, Grade.NOTED, KEPT)
            return
        root = work.name("xamp.device_type", node).partition(".")[0]
        if takes_cpu:  # nothing is asked of a device that is none
            work.replace(text, f"{root}.device_type()")
            work.say(self, node, Grade.CERTAIN)
            return
        opening, closing = ("(", ")") if needs_brackets(work, node, "Or" if negative else "And") else ("", "")
        start, end = work.source.span(node)
        test, sign = (f"not {root}.is_available()", "or") if negative else (f"{root}.is_available()", "and")
        is_first = b":=" not in work.source.data[start:end]  # what is assigned there must be so on a CPU too
        work.splice(start, start, f"{opening}{test} {sign} " if is_first else opening)
        work.replace(text, f"{root}.device_type()")
        work.splice(end, end, closing if is_first else f" {sign} {test}{closing}")
        work.say(self, node, Grade.CERTAIN)


def _is_count(node: Any, work: Work) -> bool:
    """Whether a node is ``torch.cuda.device_count()``."""
    return kind(node) == "Call" and work.path(node.func).endswith(
        (".cuda.device_count", ".npu.device_count", ".accel.device_count")
    )


def _values_of(name: Any, work: Work) -> list[Node]:
    """The values that the file assigns to a name, unless they are names themselves."""
    found: list[Node] = []
    for node in work.source.nodes:
        if kind(node) != "Assign" or any(kind(each.target) != "Name" for each in node.targets):
            continue
        if any(each.target.value == name.value for each in node.targets):
            found.append(node.value)
    return [] if any(kind(value) == "Name" for value in found) else found


_ALSO = "is false on other accelerators"


class IsCuda(Rule):
    """`x.is_cuda` of a tensor becomes `x.device.type != 'cpu'`, is it on an accelerator, with a note.

    What follows may be for CUDA only. The same for `x.is_npu`. Where the file does not show that `x` is a tensor, the
    place stays, with a note that names it.
    """

    name = "is-cuda"
    grade = Grade.NOTED
    met = 8
    kinds = ("Attribute",)
    examples = (
        Example(
            "import torch\nx = torch.ones(2)\nif not x.is_cuda:\n    pass\n",
            "import torch\nx = torch.ones(2)\n# TODO(xamp): was .is_cuda; see that what follows is not for CUDA only\n"
            "if not (x.device.type != 'cpu'):\n    pass\n",
        ),
        Example(
            "def f(x):\n    return x.is_npu and x.unsqueeze(0)\n",
            "def f(x):\n    # TODO(xamp): was .is_npu; see that what follows is not for Ascend only\n"
            "    return x.device.type != 'cpu' and x.unsqueeze(0)\n",
        ),
        Example(
            "args = parser.parse_args()\nif args.is_npu:\n    pass\n",
            f"args = parser.parse_args()\n# TODO(xamp): args.is_npu: a tensor's {_ALSO}; where this is a tensor's, ask "
            "for .device.type != 'cpu'\nif args.is_npu:\n    pass\n",
        ),
    )
    unchanged = (
        "is_cuda = 1\nx.is_cuda = True\n",
        "class Options:\n    is_npu = False\n\n    def __init__(self):\n        self.is_cuda = True\n",
        "def f(is_cuda=True):\n    return g(is_npu=is_cuda)\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        parent = work.parent(node)
        if node.attr.value not in ("is_cuda", "is_npu") or work.path(node):
            return
        if work.is_kept(self, node) or work.is_claimed(node):
            return
        if kind(parent) in ("AssignTarget", "Del") or (
            kind(parent) in ("AnnAssign", "AugAssign") and parent.target is node
        ):
            return
        asked = short(work, node)
        if kind(parent) in ("Attribute", "Call", "FormattedStringExpression") or not is_tensor(work, node.value):
            text = f"{asked}: a tensor's {_ALSO}; where this is a tensor's, ask for .device.type != 'cpu'"
            work.say(self, node, Grade.NOTED, text)
            return
        start, _ = work.source.span(node)
        low, high = work.source.span(node.attr)
        opening, closing = ("(", ")") if needs_brackets(work, node, "Comparison") else ("", "")
        work.splice(start, start, opening)
        work.splice(low, high, f"device.type != 'cpu'{closing}")
        name = node.attr.value
        whose = "CUDA" if name == "is_cuda" else "Ascend"
        work.say(self, node, Grade.NOTED, f"was .{name}; see that what follows is not for {whose} only")


RULES = (Compare(), IsCuda())
