"""An import of torch_npu goes where xamp's backend imports it, and stays where something hangs on it.

Covers: xamp.port.npu_import, xamp.port.rules.npu.
"""

from __future__ import annotations

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade

STAYS = {
    "a flag": "try:\n    import torch_npu\n    on = True\nexcept ImportError:\n    on = False\n",
    "a flag of a failure": "on = True\ntry:\n    import torch_npu\nexcept ImportError:\n    on = False\n",
    "an else": "try:\n    import torch_npu\nexcept ImportError:\n    b()\nelse:\n    c()\n",
    "an answer": (
        "def on():\n    try:\n        import torch_npu\n        return True\n    except ImportError:\n"
        "        return False\n"
    ),
    "a choice of modules": (
        "try:\n    import torch_npu\n    from .npu import attention\nexcept ImportError:\n"
        "    from .cuda import attention\n"
    ),
    "below a version": (
        "try:\n    if torch.__version__ >= '1.8':\n        import torch_npu\n    on = True\n"
        "except ImportError:\n    on = False\n"
    ),
    "a branch that stays": (
        "import torch_npu\nif torch.npu.is_available():\n    a()\nelif torch.cuda.is_available():\n    b()\n"
    ),
    "a member that stays": "import torch_npu\nhomes = {'cuda': torch.cuda, 'npu': torch.npu}\n",
    "keys that stay": "import torch_npu\nd = {torch.cuda.HalfTensor: 1, torch.npu.HalfTensor: 3}\n",
    "a script that is told its device": "import torch_npu\nimport sys\nx = torch.ones(2).to(sys.argv[1])\n",
    "a script that parses its device": (
        "import torch_npu\nargs = parser.parse_args()\nx = torch.ones(2, device=args.device)\n"
    ),
}
GOES = {
    "a try that says so": (
        "try:\n    import torch_npu\nexcept ImportError:\n    print('none')\nx = y.npu()\n",
        "import torch\nimport xamp\nx = y.to(xamp.device())\n",
    ),
    "a try that stops": (
        "try:\n    import torch_npu\nexcept ImportError:\n    raise SystemExit('none')\nx = y.npu()\n",
        "import torch\nimport xamp\nx = y.to(xamp.device())\n",
    ),
    "a script that asks for the device": (
        "import torch_npu\nimport sys\nx = torch.ones(2).to(sys.argv[1])\nx = x.npu()\n",
        "import torch\nimport xamp\nimport sys\nx = torch.ones(2).to(sys.argv[1])\nx = x.to(xamp.device())\n",
    ),
    "a script with Apex": (
        "import torch_npu\nfrom apex import amp\nimport sys\nx.to(sys.argv[1])\namp.master_params(o)\n",
        "import torch\nimport xamp\nimport sys\nx.to(sys.argv[1])\nxamp.master_params(o)\n",
    ),
    "a file of classes": (
        "import torch_npu\nclass Net:\n    def f(self, device):\n        self.to(device)\n",
        "import torch\nclass Net:\n    def f(self, device):\n        self.to(device)\n",
    ),
    "a script that imports a part too": (
        "import torch_npu\nfrom torch_npu.contrib import transfer_to_npu\nx = torch.ones(2).to(sys.argv[1])\n",
        "import torch\n# TODO(xamp): it rewrites torch.cuda at run time, so that the script runs on nothing else: "
        "delete this line\nfrom torch_npu.contrib import transfer_to_npu\nx = torch.ones(2).to(sys.argv[1])\n",
    ),
    "a branch of one family": (
        "import torch_npu\nif torch.npu.is_available():\n    a()\nelse:\n    b()\n",
        "import torch\nimport xamp\nif xamp.is_available():\n    a()\nelse:\n    b()\n",
    ),
}


def test_it_stays_with_a_note() -> None:
    with cases() as case:
        for name, text in STAYS.items():
            with case(name):
                ported = port_text(f"import torch\n{text}")
                code = [line for line in ported.text.splitlines() if "TODO(xamp)" not in line and line != "import xamp"]
                assert "\n".join(code) == f"import torch\n{text}".rstrip("\n")
                told = [each for each in ported.findings if each.rule == "torch-npu"]
                assert [each.grade for each in told] == [Grade.NOTED]
                assert port_text(ported.text).text == ported.text


def test_it_goes() -> None:
    with cases() as case:
        for name, (text, wanted) in GOES.items():
            with case(name):
                assert port_text(f"import torch\n{text}").text == wanted
