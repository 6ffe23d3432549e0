"""``torch.cuda`` and ``torch.npu``: xamp.accel has their names for the device in use."""

from __future__ import annotations

from typing import Any

from xamp.port.owners import short
from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import kind, text_of
from xamp.port.work import Work
from xamp.values.accel_names import CLASSES, DEVICES, MEMORY, NVTX, OLD, RANDOM, STREAMS

__all__ = ["HOMES", "RULES"]

HOMES = ("torch.cuda", "torch.npu", "torch_npu.npu")
_FUNCTIONS = (
    *DEVICES,
    *("device_count", "get_device_properties", "get_device_capability", "get_arch_list", "can_device_access_peer"),
    *("is_initialized", "is_bf16_supported", "is_tf32_supported", "OutOfMemoryError"),
    *CLASSES,
    *STREAMS,
    *RANDOM,
    *MEMORY,
)
_TENSORS = ["Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"]
_ELSEWHERE = [
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "memory_usage",
    "list_gpu_processes",
    "host_memory_stats",
    "default_generators",
    "get_sync_debug_mode",
    "set_sync_debug_mode",
    "get_allocator_backend",
    "get_device_index",
    "get_gencode_flags",
    "current_blas_handle",
]
_HINTS = {
    "cudart": "the CUDA runtime is CUDA's only; torch.profiler starts and stops a profile on every device",
    "CUDAGraph": "graphs are CUDA's only; put them behind a test of the device",
    "graph": "graphs are CUDA's only; put them behind a test of the device",
    "graphs": "graphs are CUDA's only; put them behind a test of the device",
    "make_graphed_callables": "graphs are CUDA's only; put them behind a test of the device",
    "profiler": "this profiler is CUDA's only; torch.profiler runs on every device",
    "nccl": "NCCL's own functions are CUDA's only; torch.distributed has them for every device",
    "comm": "these copies between GPUs are CUDA's only; torch.distributed has them for every device",
}


def _table() -> dict[str, Target]:
    table: dict[str, Target] = {}
    for home in HOMES:
        text = f"xamp.accel has no counterpart of this name of {home}"
        table[home] = Target("xamp.accel", is_module=True, text=text)
        table[f"{home}.is_available"] = Target("xamp.is_available")
        table.update({f"{home}.{name}": Target(f"xamp.accel.{name}") for name in _FUNCTIONS})
        for part, names in (("memory", MEMORY), ("random", RANDOM), ("nvtx", NVTX)):
            table[f"{home}.{part}"] = Target(f"xamp.accel.{part}", is_module=True, text=text)
            table.update({f"{home}.{part}.{name}": Target(f"xamp.accel.{part}.{name}") for name in names})
        for place in ("", "memory."):
            table.update({f"{home}.{place}{old}": Target(f"xamp.accel.{place}{new}") for old, new in OLD.items()})
        for part in ("streams", "storage"):
            table[f"{home}.{part}"] = Target(None, Grade.UNSUPPORTED, text, is_module=True)
        table.update({f"{home}.streams.{name}": Target(f"xamp.accel.{name}") for name in ("Stream", "Event")})
        for name in _ELSEWHERE:
            note = f"{name} is looked up in the device's own module; on a device without it, it is an error"
            table[f"{home}.{name}"] = Target(f"xamp.accel.{name}", Grade.NOTED, note)
        for name, hint in _HINTS.items():
            table[f"{home}.{name}"] = Target(None, Grade.UNSUPPORTED, hint)
        for name in _TENSORS:
            table[f"{home}.{name}Tensor"] = Target(f"xamp.accel.{name}Tensor")
    return table


class Names(Rule):
    """`torch.cuda.x(...)` becomes `xamp.accel.x(...)`: the same names, for the device in use.

    On a CPU each does what makes sense there (docs/porting-names.md). `torch.cuda.is_available` becomes
    `xamp.is_available`. Tensor types are there too. The same for `torch.npu` and `torch_npu.npu`.
    """

    name = "torch-cuda"
    met = 588
    names = _table()
    examples = (
        Example(
            "import torch\ntorch.cuda.set_device(args.local_rank)\nn = torch.cuda.device_count()\n"
            "if torch.cuda.is_available():\n    torch.cuda.manual_seed_all(0)\n",
            "import torch\nimport xamp\nxamp.accel.set_device(args.local_rank)\nn = xamp.accel.device_count()\n"
            "if xamp.is_available():\n    xamp.accel.manual_seed_all(0)\n",
        ),
        Example(
            "import torch\nm = torch.cuda.memory_cached()\n",
            "import torch\nimport xamp\nm = xamp.accel.memory_reserved()\n",
        ),
        Example(
            "from torch.cuda import synchronize, Stream\nsynchronize()\n",
            "from xamp.accel import synchronize, Stream\nsynchronize()\n",
        ),
        Example(
            "from torch import cuda\nif cuda.is_available():\n    cuda.empty_cache()\n",
            "from xamp import accel as cuda\nimport xamp\nif xamp.is_available():\n    cuda.empty_cache()\n",
        ),
        Example(
            "import torch\nx = x.type(torch.cuda.LongTensor)\n",
            "import torch\nimport xamp\nx = x.type(xamp.accel.LongTensor)\n",
        ),
        Example(
            "import torch\ntorch.cuda.cudart().cudaProfilerStart()\n",
            f"import torch\n# TODO(xamp): {_HINTS['cudart']}\ntorch.cuda.cudart().cudaProfilerStart()\n",
        ),
        Example(
            "import torch\ntorch.npu.set_device(0)\ntorch.npu.synchronize()\n",
            "import torch\nimport xamp\nxamp.accel.set_device(0)\nxamp.accel.synchronize()\n",
        ),
    )
    unchanged = (
        "print('torch.cuda.is_available()')\n",
        "class A:\n    cuda = 1\n\n\nA.cuda.synchronize()\n",
        "import torch\ntorch.backends.cudnn.benchmark = True\ntorch.backends.cuda.matmul.allow_tf32 = True\n",
    )


_FLAG = "where this is a tensor's, it is false on other accelerators; ask for .device.type != 'cpu'"


class Probes(Rule):
    """`getattr(torch.cuda, "name")` and `hasattr` look names up by text: they are kept, with a note.

    So are `getattr(x, "is_cuda")` and `"is_npu"`, whose `x` may be a tensor or options.
    `getattr(torch.cuda.amp, "autocast")`, by which scripts test for native AMP, becomes `getattr(xamp, "autocast")`.
    """

    name = "probes"
    grade = Grade.NOTED
    met = 4
    kinds = ("Call",)
    examples = (
        Example(
            "import torch\nif getattr(torch.cuda.amp, 'autocast') is not None:\n    native = True\n",
            "import torch\nimport xamp\nif getattr(xamp, 'autocast') is not None:\n    native = True\n",
        ),
        Example(
            "import torch\nif hasattr(torch.cuda, 'memory_summary'):\n    pass\n",
            "import torch\n# TODO(xamp): a name is looked up by its text; xamp.accel has the names of torch.cuda\n"
            "if hasattr(torch.cuda, 'memory_summary'):\n    pass\n",
        ),
        Example(
            "if getattr(args, 'is_npu', False):\n    pass\n",
            f"# TODO(xamp): args: {_FLAG}\nif getattr(args, 'is_npu', False):\n    pass\n",
        ),
    )
    unchanged = (
        "import torch\nhasattr(torch, 'compile')\n",
        "setattr(args, 'is_cuda', True)\n",
        "if getattr(args, 'use_cuda', False) or hasattr(args, 'npu'):\n    pass\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if (
            kind(node.func) != "Name"
            or node.func.value not in ("getattr", "hasattr", "setattr", "delattr")
            or not node.args
        ):
            return
        owner = node.args[0].value
        path = work.path(owner)
        name = text_of(node.args[1].value) if len(node.args) > 1 else None
        if path in ("torch.cuda.amp", "torch.npu.amp") and f"{path}.{name}" in work.table:
            return  # the name of the module is replaced like any other
        if name in ("is_cuda", "is_npu") and node.func.value in ("getattr", "hasattr") and not work.is_kept(self, node):
            work.say(self, node, Grade.NOTED, f"{short(work, owner)}: {_FLAG}")
        if path in HOMES and not work.is_kept(self, node):
            work.claim(owner)
            work.say(self, node, Grade.NOTED, "a name is looked up by its text; xamp.accel has the names of torch.cuda")


RULES = (Probes(), Names())
