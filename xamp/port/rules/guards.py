"""Questions whether Apex is installed, or was imported."""

from __future__ import annotations

import re
from typing import Any

from xamp.apex._modules import MODULES
from xamp.port.places import is_spoken
from xamp.port.rule import Example, Grade, Rule
from xamp.port.scopes import dotted
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_NAME = re.compile(r"apex\.(?:parallel|optimizers|normalization|fp16_utils|mlp|contrib\.\w+)(?:\.\w+)*\.[A-Z]\w+")
_SAID = ("Expr", "Comparison", "ComparisonTarget", "Annotation")
_ASKS = "asks for Apex by its name; after the port xamp takes its place"
_LOADED = "asks whether Apex was imported, and xamp is in any way; ask for the switch under which Apex was imported"
_NPU = "asks whether torch_npu was imported; write xamp.device_type() == 'npu'"
_THERE = "asks whether Apex is installed, and xamp takes its place: where nothing else needs Apex, ask nothing"
_QUESTION = re.compile(r"(?:is|has|have|check)_apex(?:_available|_installed|_support)?$")
_MODULES = "sys.modules"


class Found(Rule):
    """`"apex" in sys.modules` and `find_spec("apex")` look Apex up by text: they become questions for xamp.

    `"apex" in sys.modules` only where the file imports Apex under no condition. Else it stays, with a note. So do other
    texts that name Apex's modules, `"torch_npu" in sys.modules`, and `is_apex_available()` of another file.
    """

    name = "apex-by-text"
    grade = Grade.NOTED
    met = 3
    kinds = ("SimpleString", "Call")
    examples = (
        Example(
            "import importlib.util\nhas_apex = importlib.util.find_spec('apex') is not None\n",
            "import importlib.util\nhas_apex = importlib.util.find_spec('xamp') is not None\n",
        ),
        Example(
            "from transformers.utils import is_apex_available\nif is_apex_available():\n    from apex import amp\n",
            f"from transformers.utils import is_apex_available\n# TODO(xamp): {_THERE}\nif is_apex_available():\n"
            "    import xamp as amp\n",
        ),
        Example(
            "import sys\ntry:\n    from apex import amp\nexcept ImportError:\n    pass\n"
            "if 'apex' not in sys.modules:\n    raise SystemExit('install it')\n",
            "import sys\ntry:\n    import xamp as amp\nexcept ImportError:\n    pass\n"
            "if 'xamp' not in sys.modules:\n    raise SystemExit('install it')\n",
        ),
        Example(
            "import sys\nif fp16:\n    from apex import amp\nif 'apex' in sys.modules:\n    amp.state_dict()\n",
            f"import sys\nif fp16:\n    import xamp as amp\n# TODO(xamp): {_LOADED}\nif 'apex' in sys.modules:\n"
            "    amp.state_dict()\n",
        ),
        Example(
            "import importlib\nm = importlib.import_module('apex.optimizers')\n",
            "import importlib\nm = importlib.import_module('xamp.apex.optimizers')\n",
        ),
        Example(
            "fused = 'apex.optimizers.FusedAdam'\n",
            "# TODO(xamp): a text names a class of Apex; apex.optimizers.FusedAdam is xamp.apex.optimizers.FusedAdam\n"
            "fused = 'apex.optimizers.FusedAdam'\n",
        ),
    )
    unchanged = (
        "print('apex.optimizers.FusedAdam')\nprint('apex')\nif args.amp == 'apex':\n    pass\n",
        "if 'apex' in args.backend or 'apex' in modules:\n    pass\n",
        "import importlib.util\nhas_torch_npu = importlib.util.find_spec('torch_npu') is not None\n",
        "import sys\nif 'numpy' in sys.modules:\n    pass\n",
        "def is_apex_available():\n    return True\n\n\nif is_apex_available():\n    pass\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if kind(node) == "Call":
            path = work.path(node.func)
            if _QUESTION.search(path) and not work.is_kept(self, node):
                work.say(self, node, Grade.NOTED, _THERE)
            return
        text = text_of(node)
        if text is None or work.is_kept(self, node):
            return
        is_apex = text == "apex" or text.startswith("apex.")
        if (is_apex or text == "torch_npu") and self._is_loaded(node, work):
            self._ask_loaded(node, text, work)
        elif is_apex:
            self._look_up(node, text, work)

    def _look_up(self, node: Any, text: str, work: Work) -> None:
        arg = work.parent(node)
        call = work.parent(arg)
        if kind(arg) == "Arg" and kind(call) == "Call":
            callee = work.code(call.func).rpartition(".")[2]
            if callee in ("find_spec", "find_loader") and _moves(work) and text == "apex":
                self._write(node, "xamp", work)
                return
            if callee in ("find_spec", "import_module") and _moves(work) and text in MODULES:
                self._write(node, MODULES[text], work)
                return
            if callee in ("find_spec", "import_module", "__import__", "find_loader", "require", "get_distribution"):
                work.say(self, node, Grade.NOTED, _ASKS)
                return
        if _NAME.fullmatch(text) and not is_spoken(work, node) and kind(arg) not in _SAID:
            work.say(self, node, Grade.NOTED, f"a text names a class of Apex; {text} is xamp.{text}")

    def _is_loaded(self, node: Any, work: Work) -> bool:
        """Whether a text is looked up in ``sys.modules``."""
        parent = work.parent(node)
        if kind(parent) == "Comparison" and parent.left is node:
            return work.path(parent.comparisons[0].comparator) == _MODULES
        if kind(parent) == "Arg":
            return bool(work.path(work.parent(parent).func) == f"{_MODULES}.get")
        index = work.parent(parent)
        return kind(parent) == "Index" and work.path(work.parent(index).value) == _MODULES

    def _ask_loaded(self, node: Any, text: str, work: Work) -> None:
        if text == "torch_npu":
            work.say(self, node, Grade.NOTED, _NPU)
        elif text != "apex" or kind(work.parent(node)) != "Comparison":
            work.say(self, node, Grade.NOTED, _LOADED)
        elif _moves(work) and _imports(work, always=True):
            self._write(node, "xamp", work)
            if all(kind(work.parent(each)) == "Import" for each in _imports(work, always=True)):
                work.name("xamp", node)  # an `import apex` that nothing uses is gone
        else:
            work.say(self, node, Grade.NOTED, _LOADED)

    def _write(self, node: Any, new: str, work: Work) -> None:
        work.claim(node)
        work.replace(node, f"{node.prefix}{node.quote}{new}{node.quote}")
        work.say(self, node, Grade.CERTAIN)


def _imports(work: Work, always: bool = False) -> list[Node]:
    """The imports of Apex in a file; with ``always`` those that every run of the file reaches."""
    found = []
    for binding in (each for each in work.scopes.all_bindings() if each.how == "import"):
        around = [kind(each) for each in work.source.above(binding.node)]
        is_reached = not {"If", "FunctionDef", "ExceptHandler", "ExceptStarHandler", "While", "For"} & set(around)
        if (binding.path or "").partition(".")[0] == "apex" and (is_reached or not always):
            found.append(binding.node)
    return found


def _moves(work: Work) -> bool:
    """Whether each import of Apex in the file becomes xamp's."""
    for alias in _imports(work):
        statement = work.parent(alias)
        start = f"{dotted(statement.module)}." if kind(statement) == "ImportFrom" else ""
        found = work.target(start + dotted(alias.name))
        if start + dotted(alias.name) != "apex" and (found is None or found[1].new is None):
            return False
    return True


RULES = (Found(),)
