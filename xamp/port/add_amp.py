"""``--add-amp LEVEL``: ``initialize`` and ``scale_loss`` for a script that trains in fp32."""

from __future__ import annotations

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
        for line in backwards:
            self._scale(work, line, names)

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

    def _scale(self, work: Work, line: Any, names: set[str]) -> None:
        call = line.body[0].value
        loss = call.func.value
        stepped = self._stepped(work, line, names)
        if stepped is None:
            text = "put xamp.scale_loss(loss, optimizer) around this: which optimizer it is for is not clear"
            work.say(self.rule, line, Grade.NOTED, text)
            return
        start, _ = work.source.span(line)
        indent = work.source.data[work.source.line_start(start) : start].decode()
        unit = work.source.tree.default_indent
        _, high = work.source.span(loss)
        open_low = work.source.span(call)[0]  # parentheses of the loss included
        dot = work.source.data.index(b".", high)
        text = work.source.data[open_low:dot].decode().strip()
        text = text[1:-1] if getattr(loss, "lpar", ()) and len(loss.lpar) == 1 else text
        head = f"with {work.name('xamp.scale_loss', line)}({text}, {stepped}) as scaled_loss:"
        work.splice(open_low, dot, f"{head}{work.source.newline.decode()}{indent}{unit}scaled_loss")
        work.say(self.rule, line, Grade.CERTAIN)

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
    if kind(node) != "SimpleStatementLine" or len(node.body) != 1 or kind(node.body[0]) != "Expr":
        return False
    call = node.body[0].value
    return bool(kind(call) == "Call" and kind(call.func) == "Attribute" and call.func.attr.value == "backward")
