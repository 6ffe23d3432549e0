"""``torch.amp`` and ``torch.autocast``, where they are told "cuda" or "npu"."""

from __future__ import annotations

from typing import Any

from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import Node, kind, text_of
from xamp.port.work import Work, arguments

__all__ = ["RULES", "names_the_device"]

_CALLED = {
    "torch.amp.autocast": ("xamp.autocast", ("device_type", "dtype", "enabled", "cache_enabled")),
    "torch.autocast": ("xamp.autocast", ("device_type", "dtype", "enabled", "cache_enabled")),
    "torch.amp.autocast_mode.autocast": ("xamp.autocast", ("device_type", "dtype", "enabled", "cache_enabled")),
    "torch.amp.GradScaler": (
        "xamp.GradScaler",
        ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    ),
    "torch.GradScaler": (
        "xamp.GradScaler",
        ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    ),
    "torch.amp.custom_fwd": ("xamp.custom_fwd", ("fwd", "device_type", "cast_inputs")),
    "torch.amp.custom_bwd": ("xamp.custom_bwd", ("bwd", "device_type")),
}
_DEVICES = ("cuda", "npu")


def _device_argument(call: Node) -> Any:
    """The argument that names the device; None where there is none."""
    plain, named, _ = arguments(call)
    for name in ("device_type", "device"):
        if name in named:
            return named[name]
    return plain[0] if plain else None


def names_the_device(work: Work, use: Node) -> bool:
    """Whether a use of a name of torch.amp is a call that says "cuda" or "npu"; GradScaler's default is cuda too."""
    call = work.parent(use)
    while kind(call) == "Attribute":
        use, call = call, work.parent(call)
    if kind(call) != "Call" or call.func is not use:
        return False
    if any(arg.star for arg in call.args):
        return False
    arg = _device_argument(call)
    if arg is None:
        return work.path(use).endswith("GradScaler")
    if text_of(arg.value) in _DEVICES:
        return True
    return (
        arg.keyword is None
        and work.path(use).endswith("GradScaler")
        and kind(arg.value) in ("Float", "Integer", "BinaryOperation")
    )


class Calls(Rule):
    """`torch.amp.autocast("cuda")`, `torch.autocast`, `torch.amp.GradScaler("cuda")` and `custom_fwd` drop the device.

    A call with a device that only the run knows, such as `device_type=device.type`, runs everywhere and stays.
    """

    name = "torch-amp"
    met = 62
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\nwith torch.autocast('cuda', torch.bfloat16, use_amp):\n    y = model(x)\n"
            "with torch.amp.autocast(device_type='cuda', dtype=dtype):\n    y = model(x)\n"
            "scaler = torch.amp.GradScaler('cuda', enabled=use_amp)\n",
            "import torch\nimport xamp\nwith xamp.autocast(dtype=torch.bfloat16, enabled=use_amp):\n    y = model(x)\n"
            "with xamp.autocast(dtype=dtype):\n    y = model(x)\n"
            "scaler = xamp.GradScaler(enabled=use_amp)\n",
        ),
        Example(
            "from torch.amp import GradScaler, autocast\nscaler = GradScaler('cuda')\n"
            "with autocast('cuda'):\n    y = model(x)\n",
            "from xamp import GradScaler, autocast\nscaler = GradScaler()\nwith autocast():\n    y = model(x)\n",
        ),
    )
    unchanged = (
        "import torch\nwith torch.autocast(device_type=device.type, dtype=dtype):\n    y = model(x)\n",
        "from torch.amp import autocast\nwith autocast(kind):\n    y = model(x)\n",
        "import torch\nwith torch.autocast('cpu'):\n    y = model(x)\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        path = work.path(node.func)
        if path not in _CALLED or work.is_kept(self, node):
            return
        new, positions = _CALLED[path]
        if not names_the_device(work, node.func):
            work.say(self, node, Grade.NEUTRAL, inline=False)
            return
        ref = work.resolve(node.func)
        arg = _device_argument(node)
        if ref is not None and ref.bindings and ref.bindings[0].path == path:
            binding = ref.bindings[0]
            if not all(names_the_device(work, use) for use in work.scopes.uses.get(binding, [])):
                if arg is not None:  # the import stays torch's
                    work.replace(arg.value, f"{work.name('xamp.device_type', arg)}()")
                    work.say(self, node, Grade.CERTAIN)
                return
        else:
            work.replace(node.func, work.name(new, node))
        if arg is not None and text_of(arg.value) in _DEVICES:
            self._drop(node, arg, work)
        plain = [each for each in node.args if each.keyword is None and each is not arg]
        for each in plain:
            at = node.args.index(each)
            start = work.source.span(each)[0]
            if at < len(positions) and positions[at] != "fwd":
                work.splice(start, start, f"{positions[at]}=")
        work.say(self, node, Grade.CERTAIN)

    def _drop(self, call: Any, arg: Any, work: Work) -> None:
        work.claim(arg.value)
        place = next(number for number, each in enumerate(call.args) if each is arg)
        start, end = work.source.span(arg)
        if place + 1 < len(call.args):
            end = work.source.span(call.args[place + 1])[0]
        elif place:
            start = work.source.span(call.args[place - 1].value)[1]
            text = work.source.data[start:end]
            start += text.index(b",") if b"," in text else 0
        elif arg.comma is not None and kind(arg.comma) == "Comma":  # the only argument, and a comma after it
            end += work.source.data[end:].index(b",") + 1
        work.splice(start, end, "")


class Names(Rule):
    """An import of `torch.amp` becomes xamp's where every use of the name says "cuda"."""

    name = "torch-amp-imports"
    met = 20
    names = {
        path: Target(new, imports_only=True)
        for path, (new, _) in _CALLED.items()
        if path.startswith("torch.amp") and "_mode" not in path
    }
    examples = (
        Example(
            "from torch.amp import GradScaler\ns = GradScaler()\n", "from xamp import GradScaler\ns = GradScaler()\n"
        ),
    )
    unchanged = ("from torch.amp import GradScaler\ns = GradScaler(device=kind)\n",)


RULES = (Calls(), Names())
