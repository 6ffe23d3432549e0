"""Environment variables that one vendor's software reads."""

from __future__ import annotations

from typing import Any

from xamp.port.places import is_spoken, place_of
from xamp.port.rule import Grade, Rule
from xamp.port.source import kind
from xamp.port.vendor_names import variables_in
from xamp.port.vendor_only import VARIABLES, Variable
from xamp.port.work import Work

__all__ = ["RULES"]

_NO_EFFECT = "is read by the software of one vendor's devices only, and has no effect on another device"
_USES = {
    *("get", "pop", "setdefault", "getenv", "putenv", "unsetenv", "setenv", "delenv", "update", "env", "add", "append"),
    *("set", "set_env", "environ", "dict", "bool", "int", "str", "startswith"),
}


class Environment(Rule):
    """A script that sets or reads `CUDA_VISIBLE_DEVICES` is told of in the report, in whatever way it does.

    So are the other variables for which an NPU has one of its own, such as `CUDA_LAUNCH_BLOCKING`.
    """

    name = "visible-devices"
    grade = Grade.NOTED
    met = 4
    kinds = ("SimpleString", "FormattedStringText", "Arg")
    examples = ()
    unchanged = (
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n",
        "import os\nos.environ.update(CUDA_VISIBLE_DEVICES='0')\nos.environ |= {'CUDA_LAUNCH_BLOCKING': '1'}\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) == "Arg":
            name = node.keyword.value if node.keyword is not None else ""
            if name in VARIABLES:
                self._say(node, VARIABLES[name], work)
            return
        if not self._is_used(node, work) and (is_spoken(work, node) or self._is_path(node, work)):
            return
        if kind(work.parent(node)) == "Expr" or any(kind(each) == "Raise" for each in work.source.above(node)):
            return
        for _, _, known in variables_in(node.value):
            self._say(node, known, work)

    def _is_used(self, node: Any, work: Work) -> bool:
        """Whether a text is a name that is looked up or set, and none that people read."""
        parent = work.parent(node)
        if kind(parent) == "Arg":
            call = work.parent(parent)
            is_help = parent.keyword is not None and parent.keyword.value in ("help", "description", "metavar")
            return kind(call) == "Call" and work.code(call.func).rpartition(".")[2] in _USES and not is_help
        return kind(parent) in ("Index", "DictElement", "Element", "Comparison", "Assign", "AnnAssign", "Param")

    def _is_path(self, node: Any, work: Work) -> bool:
        """Whether a text is a part of a path: ``os.path.join(folder, "ASCEND_PROFILER_OUTPUT")``."""
        place, name = place_of(work, node)
        return place == "call" and name.rpartition(".")[2] in ("join", "joinpath", "Path")

    def _say(self, node: Any, known: Variable, work: Work) -> None:
        if known.text:
            work.say(self, node, Grade.NOTED, known.text, inline=False)
        else:
            work.say(self, node, Grade.NEUTRAL, _NO_EFFECT, inline=False)


RULES = (Environment(),)
