"""Gradients that are clipped over the model's parameters, where the optimizer steps on masters."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work, arguments

__all__ = ["RULES"]

_CLIPS = re.compile(r"torch\.nn\.utils(?:\.clip_grad)?\.(?:clip_grad_norm_?|clip_grad_value_?|get_total_norm)")
_MASTERS = (
    "at O2, O3 and O5 the optimizer steps on masters, and the gradients are theirs; clip "
    "xamp.master_params(optimizer), which at other levels gives the parameters"
)
_PARAMETERS = re.compile(r"\bparameters\(\)")
_PLAIN = ("O0", "O1", "O4")


class Clip(Rule):
    """`clip_grad_norm_(model.parameters(), c)` after `amp.scale_loss` clips what the optimizer steps on.

    It becomes `clip_grad_norm_(xamp.master_params(optimizer), c)`, with the optimizer of `scale_loss` in the same
    function: at Apex's O2 the gradients of the model's parameters are used by nobody. Where the optimizer cannot be
    told, or a part of a model is clipped, a note says so. Levels that keep the parameters need no change.
    """

    name = "clip-masters"
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\nfrom apex import amp\nm, opt = amp.initialize(m, opt, opt_level='O2')\n"
            "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n"
            "torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n",
            "import torch\nimport xamp\nm, opt = xamp.initialize(m, opt, level='O2')\n"
            "with xamp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n"
            "torch.nn.utils.clip_grad_norm_(xamp.master_params(opt), 1.0)\n",
        ),
        Example(
            "import torch\nfrom apex import amp\nm, o = amp.initialize(m, o, opt_level=args.level)\n\n\n"
            "def clip(m):\n    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n",
            "import torch\nimport xamp\nm, o = xamp.initialize(m, o, level=args.level)\n\n\n"
            f"def clip(m):\n    # TODO(xamp): {_MASTERS}\n    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n",
        ),
    )
    unchanged = (
        "import torch\nfrom xamp import initialize\nm, o = initialize(m, o, level='O1')\n"
        "torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n",
        "import torch\nscaler.step(o)\nscheduler.step()\ntorch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n",
        "from tools import clip_grad_norm_\nclip_grad_norm_(m.parameters(), 1.0)\no.step()\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if not _CLIPS.fullmatch(work.path(node.func)) or not node.args or work.is_kept(self, node):
            return
        if not self._steps_on_masters(work):
            return
        plain, named, _ = arguments(node)
        arg = plain[0] if plain else named.get("parameters")
        if arg is None or not any(
            _PARAMETERS.search(work.code(each)) for each in (arg.value, *_bound(work, arg.value))
        ):
            return
        scaled, elsewhere = self._scaled(node, work)
        if elsewhere and scaled is None:
            return  # a branch that does not scale
        receiver = re.fullmatch(r"([\w.]+)\.parameters\(\)", work.code(arg.value))
        if scaled is None or receiver is None or not _is_whole(work, receiver[1], work.code(scaled)):
            work.say(self, node, Grade.NOTED, _MASTERS)
            return
        masters = work.name("xamp.master_params", node)
        work.claim(arg.value)
        work.replace(arg.value, f"{masters}({work.code(scaled)})")
        work.say(self, node, Grade.CERTAIN)

    def _steps_on_masters(self, work: Work) -> bool:
        """Whether the file uses Apex's amp at a level with masters, or at one that only the run knows."""
        if "masters" not in work.found:
            calls = [each for each in work.source.nodes if kind(each) == "Call"]
            starts = [each for each in calls if work.path(each.func) == "apex.amp.initialize"]
            scales = [each for each in calls if work.path(each.func) == "apex.amp.scale_loss"]
            levels = [_level(each) for each in starts]
            plain = bool(levels) and all(level in _PLAIN for level in levels)
            work.found["masters"] = bool(starts or scales) and not plain
        return bool(work.found["masters"])

    def _scaled(self, node: Node, work: Work) -> tuple[Node | None, bool]:
        """The optimizer whose ``scale_loss`` runs before ``node``, and whether another branch has one.

        None where there is none, or where several have not stepped since: then it cannot be told whose gradients are
        clipped.
        """
        function = next((each for each in work.source.above(node) if kind(each) == "FunctionDef"), work.source.tree)
        start = work.source.span(node)[0]
        waiting: dict[str, Node | None] = {}
        elsewhere = False
        for each in work.source.nodes:
            if kind(each) != "Call" or work.source.span(each)[0] >= start or function not in work.source.above(each):
                continue
            if kind(each.func) == "Attribute" and each.func.attr.value == "step":
                waiting.pop(work.code(each.func.value), None)
            elif work.path(each.func) != "apex.amp.scale_loss":
                continue
            elif _excluded(work, each, node):
                elsewhere = True
            else:
                plain, named, _ = arguments(each)
                arg = plain[1] if len(plain) > 1 else named.get("optimizers")
                fits = arg is not None and kind(arg.value) in ("Name", "Attribute", "Subscript")
                waiting[work.code(arg.value) if arg is not None else ""] = arg.value if fits and arg else None
        return (next(iter(waiting.values())) if len(waiting) == 1 else None), elsewhere


def _is_whole(work: Work, receiver: str, optimizer: str) -> bool:
    """Whether ``receiver.parameters()`` are all that the optimizer steps on, as far as ``initialize`` tells."""
    name = receiver.removesuffix(".module")
    for call in work.source.nodes:
        if kind(call) != "Call" or work.path(call.func) != "apex.amp.initialize":
            continue
        plain, named, _ = arguments(call)
        arg = plain[0] if plain else named.get("models")
        models = [work.code(one) for one in _items(arg)]
        arg = plain[1] if len(plain) > 1 else named.get("optimizers")
        optimizers = [work.code(one) for one in _items(arg)]
        if name in models and (len(models), len(optimizers)) != (1, 1):
            return len(models) == len(optimizers) and optimizers[models.index(name)] == optimizer
        if any(name.startswith(f"{model}.") for model in models):
            return False
    return True


def _items(arg: Any) -> list[Node]:
    """The elements of an argument that is a list or a tuple, or the one thing that stands in place of them."""
    if arg is None:
        return []
    return [each.value for each in arg.value.elements] if kind(arg.value) in ("List", "Tuple") else [arg.value]


def _bound(work: Work, node: Any) -> list[Node]:
    """What the file assigns to a name."""
    if kind(node) != "Name":
        return []
    return [binding.value for binding in work.scopes.bindings(node) if binding.value is not None]


def _level(call: Any) -> str:
    plain, named, _ = arguments(call)
    arg = named.get("opt_level") or (plain[3] if len(plain) > 3 else None)
    return (
        "O1" if arg is None and len(call.args) == len(plain) + len(named) else text_of(arg.value if arg else None) or ""
    )


def _excluded(work: Work, first: Node, second: Node) -> bool:
    """Whether two places are in different branches of one ``if``."""
    around = {id(each): below for below, each in _chain(work, first)}
    for below, each in _chain(work, second):
        if id(each) in around and kind(each) == "If":
            other = around[id(each)]
            return other is not below and each.test not in (other, below)
    return False


def _chain(work: Work, node: Node) -> list[tuple[Node, Node]]:
    pairs, below = [], node
    for each in work.source.above(node):
        pairs.append((below, each))
        below = each
    return pairs


RULES = (Clip(),)
