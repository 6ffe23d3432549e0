"""Subclasses and private parts of a GradScaler."""

from __future__ import annotations

from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.source import kind
from xamp.port.work import Work

__all__ = ["RULES"]

_PRIVATE = {
    *("_scale", "_growth_tracker", "_per_optimizer_states", "_found_inf_per_device", "_check_inf_per_device"),
    *("_unscale_grads_", "_maybe_opt_step", "_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker"),
}
_OWN = "a subclass of GradScaler: xamp.GradScaler does not call torch's private methods; see what it overrides"
_PART = "a private part of torch's GradScaler; get_scale(), get_growth_factor() and last_step are xamp's public ones"


class Scaler(Rule):
    """A subclass of `GradScaler`, and its private attributes, are left as they are and reported."""

    name = "grad-scaler-internals"
    grade = Grade.UNSUPPORTED
    met = 15
    kinds = ("ClassDef", "Attribute")
    examples = (
        Example("scale = scaler._scale\n", f"# TODO(xamp): {_PART}\nscale = scaler._scale\n"),
        Example(
            "from torch.cuda.amp import GradScaler\n\n\nclass Mine(GradScaler):\n    pass\n",
            f"from xamp import GradScaler\n\n\n# TODO(xamp): {_OWN}\nclass Mine(GradScaler):\n    pass\n",
        ),
    )
    unchanged = ("x = self._scale\nscaler.update()\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) == "ClassDef":
            if any(work.path(base.value).endswith(".GradScaler") for base in node.bases):
                work.say(self, node.name, Grade.UNSUPPORTED, _OWN)
        elif node.attr.value in _PRIVATE and "scaler" in work.code(node.value).lower():
            work.say(self, node, Grade.UNSUPPORTED, _PART)


RULES = (Scaler(),)
