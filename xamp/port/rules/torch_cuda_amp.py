"""``torch.cuda.amp`` and ``torch.npu.amp``: xamp has the same names with the same arguments."""

from __future__ import annotations

from xamp.port.rule import Example, Grade, Rule, Target

__all__ = ["RULES"]

_NAMES = ("autocast", "GradScaler", "custom_fwd", "custom_bwd")
_HOMES = ("torch.cuda.amp", "torch.npu.amp", "torch_npu.npu.amp", "torch_npu.amp")
_MISSING = "xamp has no counterpart of this part of torch.cuda.amp"


def _table() -> dict[str, Target]:
    table: dict[str, Target] = {}
    for home in _HOMES:
        table[home] = Target("xamp", is_module=True, text=_MISSING)
        table.update({f"{home}.{name}": Target(f"xamp.{name}") for name in _NAMES})
        for file in ("autocast_mode", "grad_scaler", "common"):
            table[f"{home}.{file}"] = Target(None, Grade.UNSUPPORTED, _MISSING, is_module=True)
        table[f"{home}.grad_scaler.GradScaler"] = Target("xamp.GradScaler")
        table.update(
            {f"{home}.autocast_mode.{name}": Target(f"xamp.{name}") for name in _NAMES if name != "GradScaler"}
        )
    return table


class Names(Rule):
    """`autocast`, `GradScaler`, `custom_fwd` and `custom_bwd` of `torch.cuda.amp` are xamp's, with the same arguments.

    The methods of the scaler keep their names. The same for `torch.npu.amp`.
    """

    name = "torch-cuda-amp"
    met = 311
    names = _table()
    examples = (
        Example(
            "import torch\nscaler = torch.cuda.amp.GradScaler(enabled=args.amp)\n"
            "with torch.cuda.amp.autocast(enabled=args.amp):\n    loss = model(x)\n",
            "import torch\nimport xamp\nscaler = xamp.GradScaler(enabled=args.amp)\n"
            "with xamp.autocast(enabled=args.amp):\n    loss = model(x)\n",
        ),
        Example("from torch.cuda.amp import autocast, GradScaler\n", "from xamp import autocast, GradScaler\n"),
        Example(
            "from torch.cuda import amp\nwith amp.autocast(use_amp):\n    pass\n",
            "import xamp as amp\nwith amp.autocast(use_amp):\n    pass\n",
        ),
        Example(
            "import torch.cuda.amp as amp\nscaler = amp.GradScaler()\n",
            "import xamp as amp\nscaler = amp.GradScaler()\n",
        ),
        Example(
            "import torch\namp_autocast = torch.cuda.amp.autocast\n",
            "import torch\nimport xamp\namp_autocast = xamp.autocast\n",
        ),
        Example(
            "import torch_npu\nwith torch_npu.npu.amp.autocast():\n    loss = model(x)\n",
            "import xamp\nwith xamp.autocast():\n    loss = model(x)\n",
        ),
    )
    unchanged = (
        "parser.add_argument('--amp', help='use torch.cuda.amp.autocast')\n",
        "scaler.scale(loss).backward()\nscaler.unscale_(opt)\nscaler.step(opt)\nscaler.update()\n",
    )


RULES = (Names(),)
