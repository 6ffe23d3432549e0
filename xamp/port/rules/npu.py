"""Scripts that were ported to Ascend by hand: what only torch_npu has."""

from __future__ import annotations

from typing import Any

from xamp.port.npu_import import WHETHER
from xamp.port.owners import is_tensor, short
from xamp.port.rule import Example, Grade, Rule, Target
from xamp.port.source import kind
from xamp.port.work import Work

__all__ = ["RULES"]

_ONLY = "this setting of Ascend has no counterpart; call it only where xamp.device_type() is npu"
_PERHAPS = ": where this is an operator of Ascend's cards, call it only where xamp.device_type() is npu"
_PROFILER = "an argument that only torch_npu adds; torch.profiler.profile takes the activities of the device in use"
_SETTINGS = (
    "set_option",
    "set_compile_mode",
    "config",
    "conv",
    "matmul",
    "profile",
    "set_aoe",
    "set_dump",
    "init_dump",
)


def _table() -> dict[str, Target]:
    table = {
        "torch_npu": Target(
            None, Grade.UNSUPPORTED, "xamp has no counterpart of this part of torch_npu", is_module=True
        )
    }
    for home in ("torch.npu", "torch_npu.npu"):
        table.update({f"{home}.{name}": Target(None, Grade.UNSUPPORTED, _ONLY) for name in _SETTINGS})
    table["torch_npu.contrib.transfer_to_npu"] = Target(
        None,
        Grade.UNSUPPORTED,
        "it rewrites torch.cuda at run time, so that the script runs on nothing else: delete this line",
    )
    return table


class Names(Rule):
    """`import torch_npu` is dropped where xamp has all that the script uses of it: xamp's backend imports it.

    An `if torch.__version__ >= ...` or a `try` that holds nothing else goes with it. It stays, with a note, where a
    `try` around it sets a flag or chooses, where `torch.npu` stays, and in a script of which nothing becomes xamp's.

    Settings that only Ascend knows, such as `torch.npu.set_compile_mode`, stay, with a note.
    """

    name = "torch-npu"
    grade = Grade.UNSUPPORTED
    met = 0
    names = _table()
    examples = (
        Example(
            "import torch\nif torch.__version__ >= '1.8':\n    import torch_npu\nx = x.npu()\n",
            "import torch\nimport xamp\nx = x.to(xamp.device())\n",
        ),
        Example(
            "import torch\nimport torch_npu\ntorch.npu.set_device('npu:0')\n",
            "import torch\nimport xamp\nxamp.accel.set_device(xamp.device(0))\n",
        ),
        Example(
            "try:\n    import torch_npu\n    has_npu = True\nexcept ImportError:\n    has_npu = False\n",
            f"try:\n    # TODO(xamp): {WHETHER}\n    import torch_npu\n    has_npu = True\n"
            "except ImportError:\n    has_npu = False\n",
        ),
        Example(
            "import torch\ntorch.npu.set_compile_mode(jit_compile=False)\n",
            f"import torch\n# TODO(xamp): {_ONLY}\ntorch.npu.set_compile_mode(jit_compile=False)\n",
        ),
    )
    unchanged = (
        "text = 'import torch_npu'\n",
        "import torch\nif torch.__version__ >= '1.8':\n    fast = True\n",
        "try:\n    import numpy\nexcept ImportError:\n    pass\n",
        "import my_torch_npu\nfrom .torch_npu import compat\n",
    )


_OPERATORS = (
    *(
        "npu_format_cast",
        "npu_format_cast_",
        "npu_dtype_cast",
        "npu_one_hot",
        "npu_transpose",
        "npu_confusion_transpose",
    ),
    *("npu_softmax_cross_entropy_with_logits", "npu_get_float_status", "npu_clear_float_status"),
)


class Operators(Rule):
    """`x.npu_format_cast(29)` and other operators that torch_npu adds to tensors are kept, with a note.

    A method of such a name which the file defines stays. Where it is neither known that the object is a tensor nor that
    the operator is Ascend's, the note does not count as unsupported.
    """

    name = "npu-format"
    grade = Grade.UNSUPPORTED
    kinds = ("Call",)
    examples = (
        Example(
            "x = x.npu_format_cast(29)\n",
            f"# TODO(xamp): {_ONLY}\nx = x.npu_format_cast(29)\n",
        ),
        Example(
            "tools.npu_warm_up()\n",
            f"# TODO(xamp): tools.npu_warm_up{_PERHAPS}\ntools.npu_warm_up()\n",
        ),
    )
    unchanged = (
        "npu_format_cast = 1\n",
        "class Trainer:\n    def npu_set_up(self):\n        pass\n\n\nTrainer().npu_set_up()\n",
        "ids = args.npu_ids.split(',')\n",
        "from tools import npu_set_up\nimport tools\nnpu_set_up()\ntools.npu_warm_up()\n",
    )

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        name = node.func.attr.value if kind(node.func) == "Attribute" else ""
        if not name.startswith("npu_") or work.is_kept(self, node):
            return
        path = work.path(node.func)
        is_own = path and not path.startswith("torch.")  # torch_npu's are the rule's for its names
        if is_own or f"def {name}(".encode() in work.source.data:
            return
        if path or name in _OPERATORS or is_tensor(work, node.func.value):
            work.say(self, node, Grade.UNSUPPORTED, _ONLY)
        else:
            work.say(self, node, Grade.NOTED, f"{short(work, node.func)}{_PERHAPS}")


class Profiled(Rule):
    """`use_npu=True` of a profiler, which only torch_npu's takes, gets a note."""

    name = "npu-profile"
    grade = Grade.NOTED
    kinds = ("Arg",)
    examples = (
        Example(
            "import torch\nwith torch.autograd.profiler.profile(use_npu=True) as prof:\n    pass\n",
            f"import torch\n# TODO(xamp): {_PROFILER}\n"
            "with torch.autograd.profiler.profile(use_npu=True) as prof:\n    pass\n",
        ),
    )
    unchanged = ("train(use_npu=True)\nuse_npu = True\n",)

    def look(self, node: Any, work: Work) -> None:
        """See :meth:`Rule.look`."""
        if node.keyword is None or node.keyword.value != "use_npu" or work.is_kept(self, node):
            return
        if "profile" in work.code(work.parent(node).func).lower():
            work.say(self, node, Grade.NOTED, _PROFILER)


RULES = (Names(), Operators(), Profiled())
