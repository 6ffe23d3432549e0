"""``"nccl"`` and ``"hccl"``: the communication library of the device."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import default_of, is_spoken, last_name, place_of, whole_text
from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_NAMES = ("nccl", "hccl")
_SEVERAL = re.compile(r"(?=.*(nccl|hccl))\w*:?\w*(,\w*:?\w*)*")
_QUESTIONS = (
    "torch.distributed.is_nccl_available",
    "torch.distributed.is_hccl_available",
    "torch.distributed.distributed_c10d.is_nccl_available",
    "torch.distributed.distributed_c10d.is_hccl_available",
)
_AVAILABLE = (
    "asks for the library of one kind of device; xamp.distributed_backend() names the one of the device in use, "
    "which is gloo on a CPU"
)
_EACH = "a backend for each kind of device; write xamp.distributed_backend(), which names the one of the device in use"
_ASK = "does this text name the backend of torch.distributed? Then write xamp.distributed_backend()"


class Backend(Rule):
    """`"nccl"` and `"hccl"` become `xamp.distributed_backend()`, where they are a backend of torch.distributed.

    Options of argparse keep their names and choices; only the default changes.
    """

    name = "distributed-backend"
    met = 101
    names = {name: Target(None, Grade.NOTED, _AVAILABLE) for name in _QUESTIONS}
    kinds = ("SimpleString", "ConcatenatedString", "FormattedString", "IfExp")
    examples = (
        Example(
            "dist.init_process_group(backend='nccl', init_method='env://')\ndist.init_process_group('hccl')\n",
            "import xamp\ndist.init_process_group(backend=xamp.distributed_backend(), init_method='env://')\n"
            "dist.init_process_group(xamp.distributed_backend())\n",
        ),
        Example(
            "parser.add_argument('--dist-backend', default='nccl', type=str)\nargs.dist_backend = 'nccl'\n",
            "import xamp\nparser.add_argument('--dist-backend', default=xamp.distributed_backend(), type=str)\n"
            "args.dist_backend = xamp.distributed_backend()\n",
        ),
        Example(
            "import torch\nb = 'nccl' if torch.cuda.is_available() else 'gloo'\nif args.backend == 'nccl':\n    pass\n",
            "import torch\nimport xamp\nb = xamp.distributed_backend() if xamp.is_available() else 'gloo'\n"
            "if args.backend == xamp.distributed_backend():\n    pass\n",
        ),
        Example(
            "parser.add_argument('--backend', choices=['nccl', 'gloo'])\n",
            "# TODO(xamp): the choices lack other devices' backends; add 'hccl', or what runs there needs\n"
            "parser.add_argument('--backend', choices=['nccl', 'gloo'])\n",
        ),
        Example(
            "dist.init_process_group(backend='cpu:gloo,cuda:nccl')\n",
            f"# TODO(xamp): {_EACH}\ndist.init_process_group(backend='cpu:gloo,cuda:nccl')\n",
        ),
        Example(
            "import torch.distributed as dist\n"
            "dist.init_process_group('nccl' if dist.is_nccl_available() else 'gloo')\n"
            "if dist.is_nccl_available():\n    backend = 'nccl'\n",
            "import torch.distributed as dist\nimport xamp\n"
            "dist.init_process_group(xamp.distributed_backend())\n"
            f"# TODO(xamp): {_AVAILABLE}\n"
            "if dist.is_nccl_available():\n    backend = xamp.distributed_backend()\n",
        ),
        Example("call('nccl')\n", f"# TODO(xamp): {_ASK}\ncall('nccl')\n"),
    )
    unchanged = (
        "parser.add_argument('--backend', help='nccl')\nd = {'nccl': 1}\nd['nccl'] = 2\nprint('nccl')\n'nccl'\n",
        "os.environ['NCCL_DEBUG'] = 'INFO'\n",
        "parser.add_argument('--backend', choices=['nccl', 'gloo', 'hccl'])\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_claimed(node) or work.is_taken(node) or work.is_kept(self, node):
            return
        if kind(node) == "IfExp":
            self._choice(node, work)
            return
        if kind(node) != "SimpleString" or text_of(node) not in _NAMES:
            self._pieces(node, work)
            return
        verdict = self._verdict(node, work)
        if verdict is True:
            work.replace(node, f"{work.name('xamp.distributed_backend', node)}()")
            work.say(self, node, Grade.CERTAIN)
        elif verdict:
            work.say(self, node, Grade.NOTED, str(verdict), once=True)

    def _choice(self, node: Any, work: Work) -> None:
        """``"nccl" if dist.is_nccl_available() else "gloo"``: the choice that `distributed_backend` makes."""
        asks = kind(node.test) == "Call" and work.path(node.test.func) in _QUESTIONS
        if asks and text_of(node.body) in _NAMES and text_of(node.orelse) == "gloo" and "#" not in work.code(node):
            work.claim(node.body, node.test.func)
            work.replace(node, f"{work.name('xamp.distributed_backend', node)}()")
            work.say(self, node, Grade.CERTAIN)

    def _pieces(self, node: Node, work: Work) -> None:
        """A text that names several backends, or one that is put together."""
        value = text_of(node) or whole_text(work, node)
        if value is None and kind(node) == "FormattedString":
            value = "".join(getattr(part, "value", "0") for part in node.parts if "Text" in kind(part))
        if value and _SEVERAL.fullmatch(value) and not is_spoken(work, node):
            work.claim(node, *work.source.children(node))
            work.say(self, node, Grade.NOTED, _EACH)

    def _verdict(self, node: Node, work: Work) -> bool | str:
        parent = work.parent(node)
        where = kind(parent)
        if where in ("Expr", "ConcatenatedString", "Annotation") or (where != "Index" and is_spoken(work, node)):
            return False
        if (key := default_of(work, node)) is not None:
            return True if "backend" in key else _ASK
        if where in ("Index", "Assert"):
            return False
        if where in ("BinaryOperation", "Attribute"):
            return _ASK
        if where == "Comparison" or where == "ComparisonTarget":
            return self._compared(node, work)
        place, name = place_of(work, node)
        last = name.rpartition(".")[2]
        if place == "call":
            if last in ("init_process_group", "new_group", "init_dist", "init_distributed", "setup_distributed"):
                return True
            return _ASK
        if place in ("keyword", "option", "default", "assign", "value"):
            if name in ("help", "choices", "description", "dest"):
                return False
            return True if "backend" in name.lower() else self._chosen(node, work)
        if place == "element":
            around = next((each for each in work.source.above(node) if kind(each) == "Arg"), None)
            if around is not None and around.keyword is not None and around.keyword.value == "choices":
                if all(re.search(rf"['\"]{each}['\"]", work.code(around)) for each in _NAMES):
                    return False
                return "the choices lack other devices' backends; add 'hccl', or what runs there needs"
            return _ASK
        return False if place == "key" else self._chosen(node, work)

    def _chosen(self, node: Node, work: Work) -> bool | str:
        around = work.parent(node)
        if kind(around) == "IfExp" and "gloo" in (text_of(around.body), text_of(around.orelse)):
            return True
        return _ASK

    def _compared(self, node: Node, work: Work) -> bool | str:
        compare = next(each for each in work.source.above(node) if kind(each) == "Comparison")
        others = [compare.left, *(each.comparator for each in compare.comparisons)]
        if any("backend" in (last_name(work, each) or work.code(each)).lower() for each in others if each is not node):
            return True if kind(compare.comparisons[0].operator) in ("Equal", "NotEqual") else _ASK
        return _ASK


RULES = (Backend(),)
