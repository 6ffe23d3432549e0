"""Questions whether Apex is installed."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.places import is_spoken
from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_NAME = re.compile(r"apex\.(?:parallel|optimizers|normalization|fp16_utils|mlp|contrib\.\w+)(?:\.\w+)*\.[A-Z]\w+")
_SAID = ("Expr", "Comparison", "ComparisonTarget", "Annotation")
_ASKS = "asks for Apex by its name; after the port xamp takes its place"


class Found(Rule):
    """`find_spec("apex")` and `import_module("apex...")` look Apex up by text: they are kept, with a note.

    `try: from apex import amp` with its handlers stays as it is but for the import, which then never fails.
    """

    name = "apex-by-text"
    grade = Grade.NOTED
    met = 3
    kinds = ("SimpleString",)
    examples = (
        Example(
            "import importlib.util\nhas_apex = importlib.util.find_spec('apex') is not None\n",
            f"import importlib.util\n# TODO(xamp): {_ASKS}\nhas_apex = importlib.util.find_spec('apex') is not None\n",
        ),
        Example(
            "fused = 'apex.optimizers.FusedAdam'\n",
            "# TODO(xamp): a text names a class of Apex; apex.optimizers.FusedAdam is xamp.apex.optimizers.FusedAdam\n"
            "fused = 'apex.optimizers.FusedAdam'\n",
        ),
    )
    unchanged = ("print('apex.optimizers.FusedAdam')\nprint('apex')\nif args.amp == 'apex':\n    pass\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        text = text_of(node)
        if text is None or (text != "apex" and not text.startswith("apex.")) or work.is_kept(self, node):
            return
        arg = work.parent(node)
        call = work.parent(arg)
        if kind(arg) == "Arg" and kind(call) == "Call":
            callee = work.code(call.func).rpartition(".")[2]
            if callee in ("find_spec", "import_module", "__import__", "find_loader", "require", "get_distribution"):
                work.say(self, node, Grade.NOTED, _ASKS)
                return
        if _NAME.fullmatch(text) and not is_spoken(work, node) and kind(arg) not in _SAID:
            work.say(self, node, Grade.NOTED, f"a text names a class of Apex; {text} is xamp.{text}")


RULES = (Found(),)
