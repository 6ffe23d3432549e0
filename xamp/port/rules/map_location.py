"""``torch.load`` and where it puts what it loads."""

from __future__ import annotations

from typing import Any

from xamp.port.places import is_map_location
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import is_index
from xamp.port.source import Node, kind
from xamp.port.work import Work, arguments

__all__ = ["RULES"]

_MISSING = "torch.load without map_location: a file saved on another kind of device fails; add map_location='cpu'"
_KEYS = "a key names the device that saved the file; map_location='cpu', or one device, serves files of all devices"


class MapLocation(Rule):
    """`map_location=lambda storage, loc: storage.cuda(i)` becomes `map_location=xamp.device(i)`.

    A `torch.load` without `map_location` is told in the report, once for a file.
    """

    name = "map-location"
    met = 199
    kinds = ("Lambda", "Call", "Dict", "DictComp")
    examples = (
        Example(
            "import torch\nc = torch.load(p, map_location=lambda storage, loc: storage.cuda(args.gpu))\n",
            "import torch\nimport xamp\nc = torch.load(p, map_location=xamp.device(args.gpu))\n",
        ),
        Example(
            "import torch\nc = torch.load(p, lambda s, l: s.cuda())\n",
            "import torch\nimport xamp\nc = torch.load(p, xamp.device())\n",
        ),
    )
    unchanged = (
        "import torch\nc = torch.load(p, map_location='cpu')\n"
        "d = torch.load(p, map_location=lambda storage, loc: storage)\n",
        "import torch\nc = torch.load(p)\n",
        "import torch\nc = torch.load(p, map_location={name: 'cpu' for name in names})\n",
        "first = lambda storage, loc: storage.cudas(1)\nplaces = {'cuda:0': 'gpu'}\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) == "Lambda":
            self._lambda(node, work)
        elif kind(node) in ("Dict", "DictComp"):
            self._dict(node, work)
        elif work.path(node.func) == "torch.load":
            plain, named, open_ended = arguments(node)
            if len(plain) < 2 and "map_location" not in named and not open_ended:
                work.say(self, node, Grade.NOTED, _MISSING, inline=False, once=True)

    def _dict(self, node: Any, work: Work) -> None:
        """The keys name devices that the file was saved on, which other devices than today's may do."""
        elements = (node,) if kind(node) == "DictComp" else node.elements
        keys = [work.code(each.key) for each in elements if kind(each) in ("DictElement", "DictComp")]
        if is_map_location(work, node) and any("cuda" in key or "npu" in key for key in keys):
            work.say(self, node, Grade.NOTED, _KEYS)

    def _lambda(self, node: Node, work: Work) -> None:
        call, params = node.body, node.params.params
        if len(params) != 2 or kind(call) != "Call" or kind(call.func) != "Attribute":
            return
        if call.func.attr.value not in ("cuda", "npu") or work.code(call.func.value) != params[0].name.value:
            return
        if len(call.args) > 1 or any(arg.star for arg in call.args) or not self._places(node, work):
            return
        if call.args and (call.args[0].keyword is not None or is_index(work, call.args[0].value) is not True):
            work.say(self, node, Grade.NOTED, "write map_location=xamp.device(...) by hand: an index or a device?")
            return
        work.claim(call)
        start, end = work.source.span(node)
        device = work.name("xamp.device", node)
        if call.args:
            low, high = work.source.span(call.args[0].value)
            work.splice(start, low, f"{device}(")
            work.splice(high, end, ")")
        else:
            work.splice(start, end, f"{device}()")
        work.say(self, node, Grade.CERTAIN)

    def _places(self, node: Node, work: Work) -> bool:
        """Whether the lambda says where a load puts storages: ``map_location=``, or second of ``torch.load``."""
        arg = work.parent(node)
        if kind(arg) != "Arg":
            return False
        if arg.keyword is not None:
            return bool(arg.keyword.value == "map_location")
        call = work.parent(arg)
        return kind(call) == "Call" and work.path(call.func) == "torch.load" and call.args.index(arg) == 1


RULES = (MapLocation(),)
