"""What runs on CUDA only, or hides mixed precision in a library: no rewrite, but a word."""

from __future__ import annotations

from typing import Any

from xamp.port.rule import Example, Grade, Rule
from xamp.port.scopes import dotted
from xamp.port.source import kind, text_of
from xamp.port.work import Work

__all__ = ["RULES"]

_PARALLEL = "DataParallel runs on CUDA only; start one process a device with torchrun, and use DistributedDataParallel"
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
    """`pin_memory=True` runs everywhere and stays; `pin_memory_device="cuda"` becomes `xamp.device_type()`."""

    name = "pin-memory"
    grade = Grade.NEUTRAL
    met = 135
    kinds = ("Arg",)
    examples = (
        Example(
            "l = DataLoader(data, pin_memory=True, pin_memory_device='npu')\n",
            "import xamp\nl = DataLoader(data, pin_memory=True, pin_memory_device=xamp.device_type())\n",
        ),
    )
    unchanged = ("l = DataLoader(data, pin_memory=True)\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if node.keyword is None or node.keyword.value not in ("pin_memory", "pin_memory_device"):
            return
        if node.keyword.value == "pin_memory" or text_of(node.value) not in ("cuda", "npu"):
            work.say(self, node, Grade.NEUTRAL, inline=False)
        elif not work.is_kept(self, node):
            work.replace(node.value, f"{work.name('xamp.device_type', node)}()")
            work.say(self, node, Grade.CERTAIN)


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


RULES = (Parallel(), Pinned(), Flags(), Helpers())
