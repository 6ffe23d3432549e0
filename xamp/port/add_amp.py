"""``--add-amp LEVEL``: ``initialize`` and ``scale_loss`` for a script that trains in fp32."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Grade, Rule
from xamp.port.source import Node, kind
from xamp.port.work import Work

__all__ = ["AddAmp"]

_OPTIMIZERS = ("torch.optim.", "xamp.apex.optimizers.", "apex.optimizers.")
_PRESENT = ("apex.amp", "torch.cuda.amp", "torch.amp", "torch.autocast", "torch.npu.amp", "torch_npu.npu.amp")


class _Rule(Rule):
    """Puts `xamp.initialize` after the optimizer of a script, and `xamp.scale_loss` around `loss.backward()`."""

    name = "add-amp"


class AddAmp:
    """Looks at a file after the rules.

    Args:
        level: what ``initialize`` gets.
    """

    def __init__(self, level: str) -> None:
        self.level = level
        self.rule = _Rule()

    def __call__(self, work: Work) -> None:
        """Add AMP where the script has an optimizer over the parameters of a model, and none yet."""
        if self._has_amp(work):
            return
        made = [found for node in work.source.nodes if (found := self._optimizer(work, node)) is not None]
        backwards = [node for node in work.source.nodes if _is_backward(node)]
        for line, model, optimizer in made:
            self._initialize(work, line, model, optimizer)
        names = {optimizer for _, _, optimizer in made}
        for call in backwards:
            self._scale(work, call, names)

    def _has_amp(self, work: Work) -> bool:
        for node in work.source.nodes:
            if kind(node) in ("Name", "Attribute"):
                path = work.path(node)
                if path.startswith(_PRESENT) or path in ("xamp.initialize", "xamp.autocast", "xamp.GradScaler"):
                    work.say(self.rule, node, Grade.NEUTRAL, "has mixed precision already", inline=False)
                    return True
        return False

    def _optimizer(self, work: Work, node: Node) -> tuple[Node, str, str] | None:
        """``optimizer = torch.optim.X(model.parameters(), ...)``: the line and the two names."""
        if kind(node) != "Assign" or len(node.targets) != 1 or kind(node.value) != "Call":
            return None
        if not work.path(node.value.func).startswith(_OPTIMIZERS) or not node.value.args:
            return None
        if "lr_scheduler" in work.path(node.value.func):
            return None
        target, first = node.targets[0].target, node.value.args[0].value
        line = work.parent(node)
        if kind(line) != "SimpleStatementLine" or len(line.body) != 1:
            return None
        if kind(first) == "Call" and kind(first.func) == "Attribute" and first.func.attr.value == "parameters":
            return line, work.code(first.func.value), work.code(target)
        work.say(
            self.rule,
            node,
            Grade.NOTED,
            "call xamp.initialize(model, optimizer) here: whose parameters these are is not clear",
        )
        return None

    def _initialize(self, work: Work, line: Node, model: str, optimizer: str) -> None:
        start, end = work.source.span(line)
        low = work.source.line_start(start)
        indent = work.source.data[low:start].decode()
        below = work.source.next_line(end)
        call = f"{work.name('xamp.initialize', line)}({model}, {optimizer}, level={self.level!r})".replace("'", '"')
        newline = work.source.newline.decode()
        text = f"{indent}{model}, {optimizer} = {call}{newline}"
        if below == len(work.source.data) and not work.source.data.endswith((b"\n", b"\r")):
            text = newline + text.removesuffix(newline)
        work.splice(below, below, text)
        work.say(self.rule, line, Grade.CERTAIN)

    def _scale(self, work: Work, call: Any, names: set[str]) -> None:
        loss = call.func.value
        if call.args and call.args[0].keyword is None:
            work.say(self.rule, call, Grade.NOTED, "put xamp.scale_loss(loss, optimizer) here: what is the loss?")
            return
        suite = _suite(work, call)
        stepped = self._stepped(work, call, names)
        if suite is None or stepped is None or "\n" in work.code(loss):
            why = "which optimizer it is for is not clear" if stepped is None else "it is not a line of its own"
            work.say(self.rule, call, Grade.NOTED, f"put xamp.scale_loss(loss, optimizer) around this: {why}")
            return
        start = work.source.span(call)[0]
        newline, unit = work.source.newline.decode(), work.source.tree.default_indent
        low = work.source.line_start(start)
        indent = re.match(r"[ \t\f]*", work.source.data[low:start].decode())
        inner = indent[0] if indent else ""
        _, high = work.source.span(loss)
        dot = work.source.data.index(b".", high)
        text = work.source.data[start:dot].decode().strip()
        text = text[1:-1] if getattr(loss, "lpar", ()) and len(loss.lpar) == 1 else text
        opening = ""
        if kind(suite) == "SimpleStatementSuite":  # `if a: loss.backward()`
            while work.source.data[start - 1 : start] in (b" ", b"\t"):
                start -= 1
            inner += unit
            opening = f"{newline}{inner}"
        head = f"with {work.name('xamp.scale_loss', call)}({text}, {stepped}) as scaled_loss:"
        work.splice(start, dot, f"{opening}{head}{newline}{inner}{unit}scaled_loss")
        work.say(self.rule, call, Grade.CERTAIN)

    def _stepped(self, work: Work, line: Node, names: set[str]) -> str | None:
        """The optimizer whose ``step`` comes after a backward, in the same function."""
        end = work.source.span(line)[1]
        home = next((each for each in work.source.above(line) if kind(each) in ("FunctionDef", "Module")), None)
        found = []
        for node in work.source.nodes:
            if kind(node) != "Call" or kind(node.func) != "Attribute" or node.func.attr.value != "step":
                continue
            owner = work.code(node.func.value)
            inside = home is None or any(each is home for each in work.source.above(node))
            if inside and (owner in names or "optim" in owner.lower()) and work.source.span(node)[0] > end:
                found.append(owner)
        return found[0] if found and len(set(found)) == 1 else None


def _is_backward(node: Node) -> bool:
    return bool(kind(node) == "Call" and kind(node.func) == "Attribute" and node.func.attr.value == "backward")


def _suite(work: Work, call: Node) -> Node | None:
    """The line, or the rest of a line such as ``if a:``, that has the call and nothing else."""
    statement = work.parent(call)
    line = work.parent(statement)
    if kind(statement) != "Expr" or kind(line) not in ("SimpleStatementLine", "SimpleStatementSuite"):
        return None
    return line if len(line.body) == 1 else None
