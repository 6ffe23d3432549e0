"""What is for the device in use only where it is told so: defaults of tensors, random states, memory formats."""

from __future__ import annotations

import re
from typing import Any

from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import kind
from xamp.port.work import Work, arguments

__all__ = ["RULES"]

_SET = "torch.set_default_tensor_type"
_TYPE = re.compile(r"torch\.(?:cuda|npu)\.(\w+Tensor)")
_ASKS = re.compile(r"is_available|\.type\b|cpu|cuda|npu")
_OF_CPU = re.compile(r"torch\.\w*Tensor")
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
        if not self._find_device(work):
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

    def _find_device(self, work: Work) -> bool:
        """Whether some call of the file may name a type of the device: then what sets it back is xamp's too."""
        if "default types" not in work.found:
            calls = [each for each in work.source.nodes if kind(each) == "Call" and work.path(each.func) == _SET]
            work.found["default types"] = any(not _are_for_cpu(work, each.args) for each in calls)
        return bool(work.found["default types"])


def _are_for_cpu(work: Work, args: Any) -> bool:
    """Whether what a call is given is a type of the CPU, as far as the file says."""
    waiting: list[Any] = [arg.value for arg in args]
    values: list[Any] = []
    while waiting:
        each = waiting.pop()
        bound = work.scopes.bindings(each) if kind(each) == "Name" else []
        if kind(each) == "IfExp":
            waiting += [each.body, each.orelse]
        elif bound and all(binding.value is not None and kind(binding.value) != "Name" for binding in bound):
            waiting += [binding.value for binding in bound]
        else:
            values.append(each)
    return all(_OF_CPU.fullmatch(work.path(each) or work.code(each).strip("'\"")) for each in values)


class Layouts(Rule):
    """`torch.channels_last` becomes `xamp.accel.channels_last`, which is the contiguous format on an NPU.

    An NPU has no other format for its own tensors; a format changes no result. `torch.random.fork_rng` becomes
    `xamp.accel.random.fork_rng`, for the device in use.
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

    On a CPU torch refuses them. The same for other libraries' classes of that name. What asks for the device stays.
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
        is_torchs = path.startswith("torch.") and path.endswith(".DistributedDataParallel")
        named_so = work.code(node.func).endswith("DistributedDataParallel")  # of a library that hands them on
        if not (is_torchs or named_so) or path.startswith(("apex.", "xamp.")) or work.is_kept(self, node):
            return
        plain, named, _ = arguments(node)
        for arg in (*(plain[1:3] if is_torchs else ()), named.get("device_ids"), named.get("output_device")):
            if arg is not None and not self._asks(arg.value, work):
                self._write(arg.value, work)

    def _asks(self, value: Any, work: Work) -> bool:
        """Whether a value, or a test around it, depends on the device already."""
        if work.code(value) == "None":
            return True
        tests = [each.test for each in (value, *work.source.above(value)) if kind(each) in ("If", "IfExp")]
        return any(_ASKS.search(work.code(test)) for test in tests)

    def _write(self, value: Any, work: Work) -> None:
        start, end = work.source.span(value)
        asks = f" if {work.name('xamp.is_available', value)}() else None"
        if kind(value) in ("Lambda", "IfExp") and not value.lpar:
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
