"""``torch.device("cuda", ...)``."""

from __future__ import annotations

from typing import Any

from xamp.port.places import takes_a_device
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_format import index_in, write_device
from xamp.port.rules.device_method import index_of, is_index
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work, arguments

__all__ = ["RULES", "is_choice"]

_CURRENT = ("torch.cuda.current_device", "torch.npu.current_device", "torch_npu.npu.current_device")


def is_choice(work: Work, node: Node) -> bool:
    """Whether a node is ``"cuda" if torch.cuda.is_available() else "cpu"``, or the same with ``"cuda:0"``."""
    if kind(node) != "IfExp" or text_of(node.orelse) != "cpu" or index_of(node.body) not in ("", "0"):
        return False
    if kind(node.test) != "Call" or work.is_claimed(node.test.func):
        return False
    return work.path(node.test.func).endswith(("cuda.is_available", "npu.is_available"))


class Device(Rule):
    """`torch.device("cuda")` becomes `xamp.device()`; an index goes along.

    So do `torch.device(f"cuda:{i}")` in all spellings, `torch.device("cuda" if torch.cuda.is_available() else "cpu")`,
    and `torch.cuda.current_device()` where torch takes a device. In all other forms only the text is replaced;
    `torch.device(args.device)` stays.
    """

    name = "torch-device"
    met = 97
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\na = torch.device('cuda')\nb = torch.device('cuda', args.local_rank)\n"
            "c = torch.device('cuda:1')\n",
            "import torch\nimport xamp\na = xamp.device()\nb = xamp.device(args.local_rank)\nc = xamp.device(1)\n",
        ),
        Example(
            "import torch\nd = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n",
            "import torch\nimport xamp\nd = xamp.device()\n",
        ),
        Example(
            "import torch\nd = torch.device('cuda' if torch.cuda.is_available() and not args.no_cuda else 'cpu')\n",
            "import torch\nimport xamp\n"
            "d = torch.device(xamp.device_type() if xamp.is_available() and not args.no_cuda else 'cpu')\n",
        ),
        Example(
            "import torch\nx = torch.zeros(3, device=torch.cuda.current_device())\n"
            "x = x.to(torch.npu.current_device())\ni = torch.cuda.current_device()\n",
            "import torch\nimport xamp\nx = torch.zeros(3, device=xamp.device())\nx = x.to(xamp.device())\n"
            "i = xamp.accel.current_device()\n",
        ),
        Example(
            "import torch\nd = torch.device(type='npu', index=rank)\ne = torch.device(f'cuda:{rank}')\n",
            "import torch\nimport xamp\nd = xamp.device(rank)\ne = xamp.device(int(rank))\n",
        ),
    )
    unchanged = (
        "x = torch.zeros(2, device=mine.current_device())\nx.to(current_device())\n",
        "import torch\nd = torch.device(args.device)\ne = torch.device('cpu')\nf = torch.device('mps')\n",
        "d = device('cuda_of_mine')\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if work.path(node.func).endswith(_CURRENT):
            self._current(node, work)
        elif work.path(node.func) == "torch.device":
            self._made(node, work)

    def _current(self, node: Any, work: Work) -> None:
        """``device=torch.cuda.current_device()``: an index, which on a CPU names a card that is not there."""
        if takes_a_device(work, node) and not work.is_taken(node):
            work.claim(node.func)
            work.replace(node, f"{work.name('xamp.device', node)}()")
            work.say(self, node, Grade.CERTAIN)

    def _made(self, node: Any, work: Work) -> None:
        plain, named, open_ended = arguments(node)
        first = plain[0] if plain else named.get("type") or named.get("device")
        second = plain[1] if len(plain) > 1 else named.get("index")
        if first is None or open_ended or "#" in work.code(node) or work.is_taken(node):
            return
        if work.is_claimed(first.value):
            return
        if index_of(first.value) == "" and second is not None:
            if is_index(work, second.value) is None and kind(second.value) not in (
                "Name",
                "Attribute",
                "Subscript",
                "Call",
            ):
                return
            work.claim(first.value)
            device = work.name("xamp.device", node)
            start, end = work.source.span(node)
            low, high = work.source.span(second.value)
            work.splice(start, low, f"{device}(")
            work.splice(high, end, ")")
        elif second is None and (index := index_of(first.value)) is not None:
            work.replace(node, f"{work.name('xamp.device', node)}({index})")
        elif second is None and is_choice(work, first.value):
            work.replace(node, f"{work.name('xamp.device', node)}({index_of(first.value.body)})")
        elif second is None and (whole := index_in(work, first.value)) is not None:
            work.claim(first.value)
            write_device(work, node, whole, as_text=False)
        else:
            return
        work.say(self, node, Grade.CERTAIN)


RULES = (Device(),)
