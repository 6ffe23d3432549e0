"""Questions whether Apex is installed."""

from __future__ import annotations

from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

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
    )
    unchanged = ("print('apex')\nif args.amp == 'apex':\n    pass\n",)

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


RULES = (Found(),)
