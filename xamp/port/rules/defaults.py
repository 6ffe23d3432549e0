"""What is for the device in use only where it is told so: defaults of tensors, random states, memory formats."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import Node, kind
from xamp.port.work import Work, arguments

__all__ = ["RULES"]

_SET = "torch.set_default_tensor_type"
_TYPE = re.compile(r"torch\.(?:cuda|npu)\.(\w+Tensor)")
_FORMATS = ("channels_last", "channels_last_3d")


class DefaultType(Rule):
    """`torch.set_default_tensor_type(torch.cuda.FloatTensor)` becomes `xamp.accel.set_default_tensor_type(...)`.

    torch takes only types that were compiled into it. xamp's takes those of the device in use, and on a CPU the CPU's.
    """

    name = "default-tensor-type"
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\ntorch.set_default_tensor_type(torch.cuda.FloatTensor)\n",
            "import torch\nimport xamp\nxamp.accel.set_default_tensor_type(xamp.accel.FloatTensor)\n",
        ),
        Example(
            "import torch\ntorch.set_default_tensor_type('torch.cuda.HalfTensor' if fast else 'torch.FloatTensor')\n",
            "import torch\nimport xamp\n"
            "xamp.accel.set_default_tensor_type(xamp.accel.HalfTensor if fast else 'torch.FloatTensor')\n",
        ),
    )
    unchanged = ("import torch\ntorch.set_default_tensor_type('torch.FloatTensor')\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.path(node.func) != _SET or len(node.args) != 1 or work.is_kept(self, node):
            return
        value = node.args[0].value
        if not self._is_for_device(work):
            return
        waiting = [value]
        while waiting:
            each = waiting.pop()
            text = _TYPE.fullmatch(each.value[1:-1]) if kind(each) == "SimpleString" else None
            if text is not None:
                work.claim(each)
                work.replace(each, work.name(f"xamp.accel.{text[1]}", each))
            elif kind(each) != "Call":
                waiting += work.source.children(each)
        work.claim(node.func)
        work.replace(node.func, work.name("xamp.accel.set_default_tensor_type", node))
        work.say(self, node, Grade.CERTAIN)

    def _is_for_device(self, work: Work) -> bool:
        """Whether some call of the file may name a type of the device: then what sets it back is xamp's too."""
        if "default types" not in work.found:
            calls = [each for each in work.source.nodes if kind(each) == "Call" and work.path(each.func) == _SET]
            texts = [work.code(value) for each in calls for value in _values(work, each.args)]
            work.found["default types"] = any(_TYPE.search(text) for text in texts)
        return bool(work.found["default types"])


def _values(work: Work, args: Any) -> list[Node]:
    """The arguments of a call, and what the file assigns to them where they are names."""
    given = [arg.value for arg in args]
    names = [each for each in given if kind(each) == "Name"]
    bound = [binding.value for each in names for binding in work.scopes.bindings(each)]
    return given + [value for value in bound if value is not None]


class Layouts(Rule):
    """`torch.channels_last` becomes `xamp.accel.channels_last`, which is the contiguous format on an NPU.

    An NPU has no other memory format for its own tensors: `.to`, `.contiguous`, `.half` and `torch.empty` raise there.
    A format changes no result. `torch.random.fork_rng` becomes `xamp.accel.random.fork_rng`, which forks the random
    state of the device in use, and on a CPU the CPU's.
    """

    name = "formats-and-states"
    met = 36
    names = {
        **{f"torch.{name}": Target(f"xamp.accel.{name}") for name in _FORMATS},
        "torch.random.fork_rng": Target("xamp.accel.random.fork_rng"),
    }
    examples = (
        Example(
            "import torch\nmodel = model.cuda().to(memory_format=torch.channels_last)\n"
            "x = x.contiguous(memory_format=torch.channels_last)\n",
            "import torch\nimport xamp\nmodel = model.to(xamp.device()).to(memory_format=xamp.accel.channels_last)\n"
            "x = x.contiguous(memory_format=xamp.accel.channels_last)\n",
        ),
        Example(
            "import torch\nwith torch.random.fork_rng(devices=[torch.cuda.current_device()]):\n    pass\n",
            "import torch\nimport xamp\n"
            "with xamp.accel.random.fork_rng(devices=[xamp.accel.current_device()]):\n    pass\n",
        ),
    )
    unchanged = ("x = x.to(memory_format=mine.channels_last)\nchannels_last = True\n",)


class Ids(Rule):
    """`device_ids` and `output_device` of DistributedDataParallel are given where there is an accelerator.

    On a CPU torch refuses them. What asks for the device already stays.
    """

    name = "device-ids"
    met = 80
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\n"
            "m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[args.gpu], output_device=args.gpu)\n",
            "import torch\nimport xamp\n"
            "m = torch.nn.parallel.DistributedDataParallel(m, device_ids=[args.gpu] if xamp.is_available() else None, "
            "output_device=args.gpu if xamp.is_available() else None)\n",
        ),
    )
    unchanged = (
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m)\nm = DDP(m, device_ids=None)\n"
        "m = DDP(m, device_ids=[d.index] if d.type != 'cpu' else None)\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        path = work.path(node.func)
        if not (path.startswith("torch.") and path.endswith(".DistributedDataParallel")) or work.is_kept(self, node):
            return
        plain, named, _ = arguments(node)
        for arg in (*plain[1:3], named.get("device_ids"), named.get("output_device")):
            if arg is not None and not self._asks(arg.value, work):
                self._write(arg.value, work)

    def _asks(self, value: Any, work: Work) -> bool:
        """Whether a value, or a test around it, depends on the device already."""
        if kind(value) == "IfExp" or work.code(value) == "None":
            return True
        tests = [each.test for each in work.source.above(value) if kind(each) == "If"]
        return any(re.search(r"is_available|\.type\b|\bcpu\b|is_cuda", work.code(test)) for test in tests)

    def _write(self, value: Any, work: Work) -> None:
        start, end = work.source.span(value)
        asks = f" if {work.name('xamp.is_available', value)}() else None"
        if kind(value) == "Lambda":
            work.splice(start, start, "(")
            asks = f"){asks}"
        if getattr(value, "lpar", ()):  # its own brackets stand outside of its span
            end = _behind_brackets(work, value, end)
        work.splice(end, end, asks)
        work.say(self, value, Grade.CERTAIN)


def _behind_brackets(work: Work, value: Any, end: int) -> int:
    for _ in value.rpar:
        end = work.source.data.index(b")", end) + 1
    return end


RULES = (DefaultType(), Layouts(), Ids())
