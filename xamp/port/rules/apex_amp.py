"""``apex.amp``: the functions of ``xamp`` have the same names."""

from __future__ import annotations

from typing import Any

from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.work import Work, arguments

__all__ = ["RULES"]

_SAME = (
    "initialize",
    "scale_loss",
    "master_params",
    "state_dict",
    "load_state_dict",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "disable_casts",
)
_SCALE = (
    "private state of Apex; xamp.loss_scale(loss_id=0) reads the loss scale, and xamp.apex.amp has "
    "_amp_state for models "
    "that its own initialize made"
)
_DICT = "xamp loads its names when they are asked for, so __dict__ lacks them; ask hasattr(amp, 'state_dict')"
_HINTS = (
    "combine_grad",
    "combine_ddp",
    "ddp_replica_count",
    "check_combined_tensors",
    "user_cast_preferred",
)
_RENAMED = {
    "opt_level": "level",
    "dynamic_init_scale": "init_scale",
    "scale_growth_factor": "growth_factor",
    "scale_backoff_factor": "backoff_factor",
    "scale_window": "growth_interval",
}
_POSITIONS = ("models", "optimizers", "enabled", "level")


class Names(Rule):
    """The functions of `apex.amp` are those of `xamp`.

    `from apex import amp` becomes `import xamp`, and each `amp.x` becomes `xamp.x`. Where `amp` is also used as a
    value, or is imported in a `try`, an `if` or a function, it becomes `import xamp as amp`, and the uses stay.
    """

    name = "apex-amp"
    met = 560
    names = {
        "apex": Target(None, Grade.UNSUPPORTED, "xamp has no counterpart of this part of Apex", is_module=True),
        "apex.amp": Target("xamp", is_module=True, text="a part of Apex's amp that xamp does not have; " + _SCALE),
        "apex.amp.__dict__": Target(None, Grade.UNSUPPORTED, _DICT),
        "apex.amp._amp_state": Target(None, Grade.UNSUPPORTED, _SCALE),
        "apex.amp.init": Target(
            None, Grade.UNSUPPORTED, "xamp has no amp.init; use xamp.initialize, or xamp.apex.amp.init"
        ),
        **{f"apex.amp.{each}": Target(f"xamp.{each}") for each in _SAME},
    }
    examples = (
        Example(
            "from apex import amp\n"
            'model, opt = amp.initialize(model, opt, opt_level="O1")\n'
            "with amp.scale_loss(loss, opt) as scaled:\n"
            "    scaled.backward()\n",
            "import xamp\n"
            'model, opt = xamp.initialize(model, opt, level="O1")\n'
            "with xamp.scale_loss(loss, opt) as scaled:\n"
            "    scaled.backward()\n",
        ),
        Example(
            "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\n",
            "try:\n    import xamp as amp\nexcept ImportError:\n    amp = None\n",
        ),
        Example(
            "import apex\n\n\n@apex.amp.float_function\ndef f(x):\n    return x\n",
            "import xamp\n\n\n@xamp.float_function\ndef f(x):\n    return x\n",
        ),
        Example(
            "def main(fp16):\n    if fp16:\n        from apex import amp\n"
            "        amp.register_half_function(torch, 'einsum')\n",
            "def main(fp16):\n    if fp16:\n        import xamp as amp\n"
            "        amp.register_half_function(torch, 'einsum')\n",
        ),
        Example(
            "from apex.amp import scale_loss as scaling, initialize\n",
            "from xamp import scale_loss as scaling, initialize\n",
        ),
        Example(
            "from apex import amp\nlog(amp._amp_state.loss_scalers[0].loss_scale())\n",
            f"import xamp as amp\n# TODO(xamp): {_SCALE}\nlog(amp._amp_state.loss_scalers[0].loss_scale())\n",
        ),
        Example(
            "from apex import amp\nif 'state_dict' in amp.__dict__:\n    pass\n",
            f"import xamp as amp\n# TODO(xamp): {_DICT}\nif 'state_dict' in amp.__dict__:\n    pass\n",
        ),
    )
    unchanged = (
        "def train(amp, model):\n    amp.initialize(model, opt_level='O1')\n",
        "from mine import amp\namp.initialize(model, opt_level='O1')\n",
        "# from apex import amp\ndoc = 'from apex import amp'\n",
    )


class Initialize(Rule):
    """The arguments of `initialize`: `opt_level=` is `level=`, and hints that only Ascend's Apex knew are left out.

    A call without a level gets Apex's default, `level="O1"`. Positional arguments after the second get their names.
    """

    name = "initialize-arguments"
    met = 102
    kinds = ("Call",)
    examples = (
        Example(
            "from apex import amp\nmodel, opt = amp.initialize(model, opt)\n",
            'import xamp\nmodel, opt = xamp.initialize(model, opt, level="O1")\n',
        ),
        Example(
            "from apex import amp\n"
            "model, opt = amp.initialize(model, opt, opt_level=args.level, loss_scale=128.0, combine_grad=True)\n",
            "import xamp\nmodel, opt = xamp.initialize(model, opt, level=args.level, loss_scale=128.0)\n",
        ),
        Example(
            "from apex import amp\n"
            "m, o = amp.initialize(m, o, combine_grad=True, combine_ddp=True, opt_level='O2',\n"
            "                      user_cast_preferred=True, ddp_replica_count=4)\n",
            "import xamp\nm, o = xamp.initialize(m, o, level='O2')\n",
        ),
    )
    unchanged = ("import torch\nmodel = torch.initialize(model, opt_level='O1', combine_grad=True)\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        path = work.path(node.func)
        if path != "apex.amp.initialize" or work.is_kept(self, node):
            self._of_another_file(path, node, work)
            return
        plain, named, open_ended = arguments(node)
        for position, arg in enumerate(plain):
            if position > 1 and position < len(_POSITIONS) and not open_ended:
                start = work.source.span(arg)[0]
                work.splice(start, start, f"{_POSITIONS[position]}=")
        for name, arg in named.items():
            if name in _RENAMED:
                work.replace(arg.keyword, _RENAMED[name])
                work.say(self, arg, Grade.CERTAIN)
            elif name in ("patch_torch_functions", "cast_model_type"):
                work.say(self, arg, Grade.NOTED, f"xamp.initialize has no {name}; the level and dtype= decide this")
        for start_at, end_at in _runs([arg.keyword is not None and arg.keyword.value in _HINTS for arg in node.args]):
            self._leave_out(node, start_at, end_at, work)
        if open_ended:
            text = "xamp.initialize takes opt_level= for level=; it must get a level, for its default is auto"
            work.say(self, node, Grade.NOTED, text, inline=False)
        elif "opt_level" not in named and len(plain) < 4 and node.args:
            end = work.source.span(node.args[-1])[1]
            last = work.code(node.args[-1]).rstrip()
            tail = end - (len(work.code(node.args[-1]).encode()) - len(last.encode()))
            comma = last.endswith(",")
            work.splice(tail, tail, ' level="O1"' if comma else ', level="O1"')
            work.say(self, node, Grade.CERTAIN)

    def _of_another_file(self, path: str, node: Any, work: Work) -> None:
        """``amp`` may come from a file that imports Apex: its port has xamp's default level."""
        if not path.endswith(".amp.initialize") or path.startswith(("apex.", "torch", "xamp")):
            return
        _, named, open_ended = arguments(node)
        if len(node.args) > 1 and not open_ended and not set(named) & {"opt_level", "level"}:
            text = f"where {path.rpartition('.')[0]} was Apex, say level=\"O1\" here: Apex's default, and not xamp's"
            work.say(self, node, Grade.NOTED, text, inline=False)

    def _leave_out(self, call: Any, first: int, last: int, work: Work) -> None:
        """Take out the arguments from the place ``first`` up to ``last``, with the commas between them."""
        start, end = work.source.span(call.args[first])[0], work.source.span(call.args[last])[1]
        if last + 1 < len(call.args):
            end = work.source.span(call.args[last + 1])[0]
        elif first > 0:
            start = _end_of_value(call.args[first - 1], work)
            end = _end_of_value(call.args[last], work)
        work.splice(start, end, "")
        for arg in call.args[first : last + 1]:
            work.say(self, arg, Grade.CERTAIN)


def _runs(marked: list[bool]) -> list[tuple[int, int]]:
    """The first and the last place of each row of marked places that follow each other."""
    starts = [at for at, each in enumerate(marked) if each and (at == 0 or not marked[at - 1])]
    ends = [at for at, each in enumerate(marked) if each and (at + 1 == len(marked) or not marked[at + 1])]
    return list(zip(starts, ends, strict=True))


def _end_of_value(arg: Any, work: Work) -> int:
    """Where an argument ends, before its comma; its own parentheses included."""
    end: int = work.source.span(arg)[1]
    text = work.source.data[work.source.span(arg)[0] : end].rstrip()
    end = work.source.span(arg)[0] + len(text)
    if text.endswith(b","):
        end = work.source.span(arg)[0] + len(text[:-1].rstrip())
    return end


RULES = (Initialize(), Names())
