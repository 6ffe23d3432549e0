"""What runs on CUDA only, or hides mixed precision in a library: a word, and seldom a rewrite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from xamp.port.owners import is_tensor, short
from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.scopes import dotted
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_PARALLEL = "DataParallel runs on CUDA only; start one process a device with torchrun, and use DistributedDataParallel"
_PINS = ".pin_memory() of a tensor needs an accelerator; where this is one, write xamp.accel.pin_memory(...)"
_FACTORIES = (
    *("torch.empty", "torch.zeros", "torch.ones", "torch.full", "torch.rand", "torch.tensor", "torch.arange"),
    *("torch.eye", "torch.linspace", "torch.normal", "torch.as_strided"),
)
_HELPERS = {
    "timm.utils.NativeScaler": "timm's scaler runs torch.cuda.amp; xamp.GradScaler has the methods that it wraps",
    "timm.utils.ApexScaler": "timm's scaler runs apex.amp; call xamp.scale_loss instead",
    "timm.scheduler.NativeScaler": "timm's scaler runs torch.cuda.amp; xamp.GradScaler has the methods that it wraps",
    "fairscale.optim.grad_scaler": "fairscale's scaler is CUDA's; xamp.GradScaler takes sharded parameters",
    "torch.distributed.fsdp.sharded_grad_scaler": "this scaler is CUDA's; xamp.GradScaler takes sharded parameters",
    "torch.utils.cpp_extension": "an extension that is built for one device needs a build for each other one",
}
_FRAMEWORKS = {
    "pytorch_lightning": "Lightning owns the switch for precision; the porter leaves it to Lightning",
    "lightning": "Lightning owns the switch for precision; the porter leaves it to Lightning",
    "accelerate": "accelerate owns the switch for precision; the porter leaves it to accelerate",
    "deepspeed": "DeepSpeed owns the switch for precision, in its configuration",
    "horovod": "Horovod has no backend for NPUs; torch.distributed runs on all",
}


class Parallel(Rule):
    """`nn.DataParallel` stays, with a note: it runs on CUDA only, and is not reached where a process has one device."""

    name = "data-parallel"
    grade = Grade.NOTED
    met = 69
    kinds = ("Call",)
    examples = (
        Example(
            "from torch import nn\nmodel = nn.DataParallel(model)\n",
            f"from torch import nn\n# TODO(xamp): {_PARALLEL}\nmodel = nn.DataParallel(model)\n",
        ),
    )
    unchanged = ("import torch\nmodel = torch.nn.parallel.DistributedDataParallel(model)\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        path = work.path(node.func)
        if work.is_kept(self, node):
            return
        if path in ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"):
            work.say(self, node, Grade.NOTED, _PARALLEL, once=True)
        elif path.endswith("parallel.DistributedDataParallel") and path.startswith("torch"):
            work.say(self, node, Grade.NEUTRAL, inline=False)


class Pinned(Rule):
    """`x.pin_memory()` of a tensor becomes `xamp.accel.pin_memory(x)`, which returns the tensor itself on a CPU.

    `torch.empty(..., pin_memory=True)` asks `xamp.is_available()`. `pin_memory=True` of a DataLoader stays;
    `pin_memory_device="cuda"` becomes `xamp.device_type()`. Where it is not known that `x` is a tensor, the place
    stays, with a note.
    """

    name = "pin-memory"
    grade = Grade.NEUTRAL
    met = 135
    kinds = ("Arg", "Call")
    examples = (
        Example(
            "l = DataLoader(data, pin_memory=True, pin_memory_device='npu')\n",
            "import xamp\nl = DataLoader(data, pin_memory=True, pin_memory_device=xamp.device_type())\n",
        ),
        Example(
            "import torch\nx = torch.randn(4, 2).pin_memory()\ny = torch.empty(4, pin_memory=True)\n",
            "import torch\nimport xamp\nx = xamp.accel.pin_memory(torch.randn(4, 2))\n"
            "y = torch.empty(4, pin_memory=xamp.is_available())\n",
        ),
        Example(
            "import torch\ny = torch.zeros_like(x, pin_memory=args.pin)\n",
            "import torch\nimport xamp\ny = torch.zeros_like(x, pin_memory=bool(args.pin) and xamp.is_available())\n",
        ),
        Example("batch = batch.pin_memory()\n", f"# TODO(xamp): batch{_PINS}\nbatch = batch.pin_memory()\n"),
    )
    unchanged = (
        "l = DataLoader(data, pin_memory=True)\n",
        "class Batch:\n    def pin_memory(self):\n        return self\n\n\nBatch().pin_memory()\n",
        "import torch\nx = torch.zeros(2, pin_memory=False)\npin_memory = True\nuse = args.pin_memory\n",
        "from tools import pin_memory\nimport tools\nx = pin_memory(x)\nx = tools.pin_memory(x)\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if kind(node) == "Call":
            self._method(node, work)
            return
        if node.keyword is None or node.keyword.value not in ("pin_memory", "pin_memory_device"):
            return
        if node.keyword.value == "pin_memory" and work.path(work.parent(node).func).startswith(_FACTORIES):
            self._factory(node, work)
        elif node.keyword.value == "pin_memory" or text_of(node.value) not in ("cuda", "npu"):
            work.say(self, node, Grade.NEUTRAL, inline=False)
        elif not work.is_kept(self, node):
            work.replace(node.value, f"{work.name('xamp.device_type', node)}()")
            work.say(self, node, Grade.CERTAIN)

    def _factory(self, arg: Any, work: Work) -> None:
        """``torch.empty(..., pin_memory=True)``."""
        value = work.code(arg.value)
        if value in ("False", "None") or "is_available()" in value or work.is_kept(self, arg):
            return
        asks = f"{work.name('xamp.is_available', arg)}()"
        if value == "True":
            work.replace(arg.value, asks)
        else:
            start, end = work.source.span(arg.value)
            work.splice(start, start, "bool(")
            work.splice(end, end, f") and {asks}")
        work.say(self, arg, Grade.CERTAIN)

    def _method(self, call: Any, work: Work) -> None:
        """``x.pin_memory()``."""
        if kind(call.func) != "Attribute" or call.func.attr.value != "pin_memory" or work.is_kept(self, call):
            return
        owner = call.func.value
        if work.path(call.func):  # a function of a module, or torch.Tensor.pin_memory
            return
        if is_tensor(work, owner) and not call.args:
            start, end = work.source.span(call)
            low, high = work.source.span(owner)
            work.splice(start, low, f"{work.name('xamp.accel.pin_memory', call)}(")
            work.splice(high, end, ")")
            work.say(self, call, Grade.CERTAIN)
        elif b"def pin_memory(" not in work.source.data:
            work.say(self, call, Grade.NOTED, f"{short(work, owner)}{_PINS}")


class Accelerator(Rule):
    """`torch.accelerator`, torch's own name for the accelerator of a machine, runs everywhere and stays."""

    name = "torch-accelerator"
    grade = Grade.NEUTRAL
    names: ClassVar[Mapping[str, Target]] = {"torch.accelerator": Target(None, Grade.NEUTRAL)}
    unchanged = (
        "import torch\ndevice = torch.accelerator.current_accelerator()\ntorch.accelerator.synchronize()\n",
        "from torch import accelerator\nif accelerator.is_available():\n    accelerator.empty_cache()\n",
        "from torch.accelerator import is_available\nif not is_available():\n    raise SystemExit\n",
    )


class Flags(Rule):
    """Settings of `torch.backends` do nothing on other devices and stay."""

    name = "backend-flags"
    grade = Grade.NEUTRAL
    met = 131
    kinds = ("Attribute",)
    examples = ()
    unchanged = ("import torch\ntorch.backends.cudnn.benchmark = True\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if kind(work.parent(node)) != "Attribute" and work.path(node).startswith(
            ("torch.backends.cu", "torch.backends.npu")
        ):
            work.say(self, node, Grade.NEUTRAL, inline=False)


class Helpers(Rule):
    """Scalers and extensions of other libraries get a note at the import.

    Frameworks that own the switch for precision get a line in the report.
    """

    name = "other-libraries"
    grade = Grade.NOTED
    met = 57
    kinds = ("Import", "ImportFrom")
    examples = (
        Example(
            "from timm.utils import NativeScaler\n",
            f"# TODO(xamp): {_HELPERS['timm.utils.NativeScaler']}\nfrom timm.utils import NativeScaler\n",
        ),
    )
    unchanged = ("import timm\nimport pytorch_lightning as pl\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if work.is_kept(self, node):
            return
        if kind(node) == "ImportFrom" and (node.relative or node.module is None or kind(node.names) == "ImportStar"):
            return
        start = f"{dotted(node.module)}." if kind(node) == "ImportFrom" else ""
        for alias in node.names:
            path = start + dotted(alias.name)
            for known, text in _HELPERS.items():
                if path == known or path.startswith(f"{known}."):
                    work.say(self, node, Grade.NOTED, text, once=True)
            framework = _FRAMEWORKS.get(path.partition(".")[0])
            if framework:
                work.say(self, node, Grade.NOTED, framework, inline=False, once=True)


RULES = (Parallel(), Pinned(), Accelerator(), Flags(), Helpers())
