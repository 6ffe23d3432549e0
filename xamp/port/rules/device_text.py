"""Texts that name a device: ``"cuda"``, ``"cuda:0"``; :mod:`device_format` has those that are put together."""

from __future__ import annotations

from typing import Any

from xamp.port.places import ASK, is_device_place, is_spoken, place_of, takes_a_device, whole_text
from xamp.port.rule import Example, Grade, Rule
from xamp.port.rules.device_method import index_of, is_device_text, is_option
from xamp.port.rules.torch_device import is_choice
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_NAME = "a method or a name of torch is looked up by its text; write .to(xamp.device()), or xamp.accel, by hand"


class Text(Rule):
    """A text that names the device becomes `xamp.device_type()`, or `xamp.device()` where torch takes a device.

    `"cuda:0"` becomes `str(xamp.device(0))`, which is `"cpu"` on a CPU. The text must stand where a device stands:
    `.to(...)`, `device=...`, a parameter, variable or option called `device`, a choice by `torch.cuda.is_available()`.
    Keys of dicts, help texts and messages stay. Where it cannot be told what the text is for, it stays, with a note.
    """

    name = "device-text"
    met = 195
    kinds = ("SimpleString", "ConcatenatedString", "FormattedString", "IfExp")
    examples = (
        Example(
            "import torch\nx = torch.zeros(3, device='cuda')\nnet.to('cuda:1')\n\n\n"
            "def f(x, device='cuda'):\n    return x\n",
            "import torch\nimport xamp\nx = torch.zeros(3, device=xamp.device())\nnet.to(xamp.device(1))\n\n\n"
            "def f(x, device=xamp.device_type()):\n    return x\n",
        ),
        Example(
            "import torch\nc = torch.load(p, 'cuda')\n",
            "import torch\nimport xamp\nc = torch.load(p, xamp.device())\n",
        ),
        Example(
            "import torch\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n",
            "import torch\nimport xamp\ndevice = xamp.device_type()\n",
        ),
        Example(
            "parser.add_argument('--device', default='cuda', help='cuda or cpu')\nargs.device = 'cuda:0'\n",
            "import xamp\nparser.add_argument('--device', default=xamp.device_type(), help='cuda or cpu')\n"
            "args.device = str(xamp.device(0))\n",
        ),
        Example(
            "import torch\nd = 'cuda' if args.gpu and torch.cuda.is_available() else 'cpu'\n",
            "import torch\nimport xamp\nd = xamp.device_type() if args.gpu and xamp.is_available() else 'cpu'\n",
        ),
        Example("run('cuda')\n", f"# TODO(xamp): {ASK}\nrun('cuda')\n"),
        Example(
            "a = cfg.get('device', 'cuda')\nb = build(device='cuda')\n",
            "import xamp\na = cfg.get('device', xamp.device_type())\nb = build(device=xamp.device_type())\n",
        ),
        Example("x = getattr(model, 'cuda')()\n", f"# TODO(xamp): {_NAME}\nx = getattr(model, 'cuda')()\n"),
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
        if work.is_claimed(node) or work.is_taken(node):
            return
        if kind(node) != "SimpleString":
            self._pieces(node, work)
            return
        index = index_of(node)
        if index is None:
            self._other(node, work)
            return
        if self._is_text(node, work):
            return
        verdict = is_device_place(work, node)
        if verdict is None and self._is_chosen(node, work):
            verdict = True
        if verdict is True:
            self._write(node, index, work)
        elif verdict is None:
            work.say(self, node, Grade.NOTED, ASK)

    def _pieces(self, node: Node, work: Work) -> None:
        """A text in several pieces, or an f-string without a value in it."""
        value = whole_text(work, node)
        if value is None and kind(node) == "FormattedString" and len(node.parts) == 1:
            value = getattr(node.parts[0], "value", None)
        if value is not None and is_device_text(value) and not is_spoken(work, node):
            work.claim(node, *work.source.children(node))
            work.say(self, node, Grade.NOTED, ASK)

    def _other(self, node: Node, work: Work) -> None:
        """A text that starts to name a device, or names several: ``"cuda:"``, ``"cuda:0,cuda:1"``."""
        value = text_of(node)
        if value is not None and is_device_text(value) and not is_spoken(work, node):
            work.claim(node)
            work.say(self, node, Grade.NOTED, ASK)

    def _choice(self, node: Any, work: Work) -> None:
        if not is_choice(work, node) or work.is_taken(node):
            return
        device = work.name("xamp.device_type", node)
        index = index_of(node.body)
        if index == "" and "#" not in work.code(node):
            work.replace(node, f"{device}()")
            work.say(self, node, Grade.CERTAIN)

    def _write(self, node: Any, index: str, work: Work) -> None:
        if takes_a_device(work, node):
            new = f"{work.name('xamp.device', node)}({index})"
        elif index:
            new = f"str({work.name('xamp.device', node)}({index}))"
        else:
            new = f"{work.name('xamp.device_type', node)}()"
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
        """Whether the text is read by people, or is a part of a longer one; what cannot be told gets a note."""
        parent = work.parent(node)
        if kind(parent) in ("ConcatenatedString", "Annotation") or is_spoken(work, node):
            if kind(parent) == "Arg" and self._is_looked_up(work.parent(parent), work):
                work.say(self, node, Grade.NOTED, _NAME)
            return True
        if kind(parent) in ("BinaryOperation", "Attribute", "Assert"):
            if place_of(work, node)[0] != "compare" and kind(parent) != "Assert":
                work.say(self, node, Grade.NOTED, ASK)
            return True
        return False

    def _is_looked_up(self, call: Any, work: Work) -> bool:
        """``getattr(model, "cuda")``; an option ``getattr(args, "cuda")`` is none."""
        if kind(call) != "Call" or work.code(call.func) not in ("getattr", "hasattr") or len(call.args) < 2:
            return False
        return index_of(call.args[1].value) == "" and not is_option(work, call.args[0].value)


RULES = (Text(),)
