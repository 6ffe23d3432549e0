"""Names are resolved by scope: what binds a name decides, not how it is spelt.

Covers: xamp.port.scopes, xamp.port.names, xamp.port.imports.
"""

from __future__ import annotations

import pytest

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade

SAME = {
    "a parameter": "import torch\ndef f(torch):\n    torch.cuda.synchronize()\n",
    "a parameter of a lambda": "import torch\nf = lambda torch: torch.cuda.synchronize()\n",
    "a loop variable": "from apex import amp\nfor amp in range(3):\n    print(amp)\n".replace(
        "from apex import amp\n", ""
    ),
    "a class of its own": "class apex:\n    pass\napex.amp.initialize(1)\n",
    "a comprehension's variable": "import torch\nx = [torch.cuda.f for torch in y]\n",
    "a relative import": "from .apex import amp\nfrom . import apex\namp.initialize(1)\napex.amp.initialize(1)\n",
    "nested attribute": "self.torch.cuda.synchronize()\n",
}
CHANGED = {
    "in a function": (
        "def f():\n    import torch\n    torch.cuda.synchronize()\n",
        "import xamp\ndef f():\n    import torch\n    xamp.accel.synchronize()\n",
    ),
    "an alias": (
        "import torch as th\nth.cuda.synchronize()\n",
        "import torch as th\nimport xamp\nxamp.accel.synchronize()\n",
    ),
    "a default, where the parameter has the same name": (
        "from apex import amp\ndef f(amp=amp):\n    amp.initialize(1, opt_level='O1')\n",
        "import xamp as amp\ndef f(amp=amp):\n    amp.initialize(1, opt_level='O1')\n",
    ),
    "a global": (
        "def f():\n    global amp\n    from apex import amp\n\ndef g():\n    return amp.state_dict()\n",
        "def f():\n    global amp\n    import xamp as amp\n\ndef g():\n    return amp.state_dict()\n",
    ),
    "a class's attribute does not hide it from methods": (
        "import torch\nclass A:\n    torch = 1\n    def f(self):\n        torch.cuda.synchronize()\n",
        "import torch\nimport xamp\nclass A:\n    torch = 1\n    def f(self):\n        xamp.accel.synchronize()\n",
    ),
    "apex in one function, and the name elsewhere": (
        "def f():\n    from apex import amp\n    amp.state_dict()\ndef g(amp):\n    amp.state_dict()\n",
        "def f():\n    import xamp as amp\n    amp.state_dict()\ndef g(amp):\n    amp.state_dict()\n",
    ),
    "both backends": (
        "if old:\n    from apex import amp\nelse:\n    from torch.cuda import amp\namp.autocast()\n",
        "if old:\n    import xamp as amp\nelse:\n    import xamp as amp\namp.autocast()\n",
    ),
    "after the docstring and the future": (
        '"""About cuda."""\nfrom __future__ import annotations\n\nimport os\n\n'
        'def f(x, device="cuda"):\n    return x\n',
        '"""About cuda."""\nfrom __future__ import annotations\n\nimport os\nimport xamp\n\n'
        "def f(x, device=xamp.device_type()):\n    return x\n",
    ),
    "a shebang and a coding line": (
        "#!/usr/bin/env python\n# coding: utf-8\nx = x.cuda()\n",
        "#!/usr/bin/env python\n# coding: utf-8\nimport xamp\nx = x.to(xamp.device())\n",
    ),
    "a decorated first statement": (
        "@decorated\ndef f(x):\n    return x.cuda()\n",
        "import xamp\n@decorated\ndef f(x):\n    return x.to(xamp.device())\n",
    ),
    "attributes and keywords of the same name": (
        "from apex import amp\nif args.amp:\n    amp.state_dict()\nf(amp=1).amp.x = args.apex.amp.y\n",
        "import xamp\nif args.amp:\n    xamp.state_dict()\nf(amp=1).amp.x = args.apex.amp.y\n",
    ),
    "the script has xamp": (
        "import xamp\nx = x.cuda()\n",
        "import xamp\nx = x.to(xamp.device())\n",
    ),
    "the script has another xamp": (
        "xamp = 3\nx = x.cuda()\n",
        "import xamp as _xamp\nxamp = 3\nx = x.to(_xamp.device())\n",
    ),
    "semicolons": (
        "import torch; from apex import amp; amp.state_dict(); torch.cuda.synchronize()\n",
        "import torch; pass; xamp.state_dict(); xamp.accel.synchronize()\n",
    ),
    "one line bodies": (
        "if a: x = x.cuda()\nelse: x = x.cuda(0)\n",
        "import xamp\nif a: x = x.to(xamp.device())\nelse: x = x.to(xamp.device(0))\n",
    ),
    "over several lines": (
        "x = (x\n     .cuda(  # here\n         non_blocking=True,\n     ))\n",
        "import xamp\nx = (x\n     .to(  # here\n         xamp.device(), non_blocking=True,\n     ))\n",
    ),
    "a match": (
        "match kind:\n    case 'cuda':\n        x = x.cuda()\n",
        "import xamp\nmatch kind:\n    # TODO(xamp): a case calls nothing, so its text stays; write case _ if ... == "
        "xamp.device_type(): for the device in use\n    case 'cuda':\n        x = x.to(xamp.device())\n",
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_other_things_of_the_same_name_stay(what: str) -> None:
    assert port_text(SAME[what]).text == SAME[what]


@pytest.mark.parametrize("what", [what for what in CHANGED if what != "semicolons"])
def test_names_are_found_in_their_scope(what: str) -> None:
    before, after = CHANGED[what]
    assert port_text(before).text == after
    assert port_text(after).text == after


def test_semicolons_keep_their_line() -> None:
    ported = port_text(CHANGED["semicolons"][0]).text
    compile(ported, "ported", "exec")
    assert "apex" not in ported
    assert ported.index("import xamp") < ported.index("xamp.state_dict()")
    assert port_text(ported).text == ported


def test_notes_of_one_kind_are_one_comment() -> None:
    text = "import torch\na = torch.nn.DataParallel(a)\nb = torch.nn.DataParallel(b)\n"
    ported = port_text(text)
    assert ported.text.count("TODO(xamp)") == 1
    assert ported.count(Grade.NOTED) == 2


def test_every_unsupported_place_has_its_comment() -> None:
    text = "from apex import amp\na = amp._amp_state\nif a:\n    b = amp._amp_state\n"
    ported = port_text(text)
    assert ported.text.count("TODO(xamp)") == ported.count(Grade.UNSUPPORTED) == 2


def silent(text: str) -> bool:
    """Whether the text stays as it is, and nothing is said of it."""
    ported = port_text(text)
    return ported.text == text and not ported.findings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import torch\nwith torch.autocast(\n    device_type='cuda',\n):\n    pass\n",
            "import torch\nimport xamp\nwith xamp.autocast(\n    \n):\n    pass\n",
        ),
        (
            "if (device := where()).type == 'cuda':\n    pass\nf(device)\n",
            "import xamp\nif (device := where()).type == xamp.device_type() and xamp.is_available():\n    pass\n"
            "f(device)\n",
        ),
        (
            "slow = a and (device := where()).type != 'cuda'\nf(device)\n",
            "import xamp\nslow = a and ((device := where()).type != xamp.device_type() or not xamp.is_available())\n"
            "f(device)\n",
        ),
        (
            "import torch\ns = torch.amp.GradScaler('cuda',)\n",
            "import torch\nimport xamp\ns = xamp.GradScaler()\n",
        ),
        (
            "import torch\nx = f(1)\ny = x.cuda(device=(rank))\n",
            "import torch\nimport xamp\nx = f(1)\ny = x.to((xamp.device(rank)))\n",
        ),
        (
            "import torch\ndef f(net, gpu):\n    gpu = gpu[0]\n    return net.cuda(gpu)\n",
            "import torch\nimport xamp\ndef f(net, gpu):\n    gpu = gpu[0]\n    return net.to(xamp.device(gpu))\n",
        ),
    ],
)
def test_forms_at_the_edge_give_python(before: str, after: str) -> None:
    assert port_text(before).text == after


@pytest.mark.parametrize(
    "line",
    ["ys = list(map(lambda a, b: a.cuda(), xs, zs))", "to = lambda t, nb: t.cuda(non_blocking=nb)"],
)
def test_a_lambda_is_a_map_location_only_where_it_stands_as_one(line: str) -> None:
    ported = port_text(f"import torch\n{line}\n").text
    assert "lambda" in ported
    assert "map(xamp" not in ported


def test_a_device_in_a_map_location_is_told_not_guessed() -> None:
    ported = port_text("import torch\nc = torch.load(p, map_location=lambda storage, loc: storage.cuda(device))\n")
    assert "xamp.device(device)" not in ported.text.partition("TODO")[0]
    assert ported.findings


def test_a_text_put_together_is_no_index() -> None:
    ported = port_text("import torch\nx.cuda('cuda:%d' % rank)\n")
    assert "xamp.device('cuda" not in ported.text
    assert "xamp.device(f" not in ported.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "from apex.optimizers.npu_fused_sgd import NpuFusedSGD as S\n",
            "from xamp.apex.optimizers import NpuFusedSGD as S\n",
        ),
        ("from apex.optimizers import fused_adam\n", "from xamp.apex.optimizers import fused_adam\n"),
        (
            "import apex.optimizers.npu_fused_adam\no = apex.optimizers.npu_fused_adam.NpuFusedAdam(p)\n",
            "import xamp.apex.optimizers\no = xamp.apex.optimizers.NpuFusedAdam(p)\n",
        ),
        ("from torch_npu.optim import NpuFusedLamb\n", "from xamp.apex.optimizers import NpuFusedLamb\n"),
        (
            "from torch_npu.optim.npu_fused_sgd import NpuFusedSGD\n",
            "from xamp.apex.optimizers import NpuFusedSGD\n",
        ),
        (
            "from amp_C import multi_tensor_l2norm as norm\nnorm(x)\n",
            "from xamp.apex.amp_C import multi_tensor_l2norm as norm\nnorm(x)\n",
        ),
        ("from apex.contrib.clip_grad import clip_grad\n", "from xamp.apex.contrib import clip_grad\n"),
    ],
)
def test_files_of_apex_and_ascend_are_answered_by_the_module_that_has_them(before: str, after: str) -> None:
    ported = port_text(before)
    assert ported.text == after
    assert {each.grade for each in ported.findings} == {Grade.CERTAIN}


@pytest.mark.parametrize(
    "text",
    [
        "from amp_C import multi_tensor_l2norm\n",
        "from apex.parallel import DistributedDataParallel\nm = DistributedDataParallel(m, device_ids=[0])\n",
        "import torch\nif device.type in ('cuda', 'npu'):\n    pass\n",
        "import torch\nif torch.cuda.is_available():\n    x.cuda()\nelif torch.npu.is_available():\n    x.npu()\n",
        "import torch\nx = torch.ones(2).pin_memory()\ny = torch.zeros(2, pin_memory=fast)\n",
    ],
)
def test_a_second_port_finds_nothing_to_do(text: str) -> None:
    once = port_text(text).text
    assert port_text(once).text == once


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("from apex.optimizers.npu_fused_adam import Other\n", "xamp.apex.optimizers does not have this name"),
        ("from torch_npu.optim import Other\n", "does not have this name of torch_npu.optim"),
        ("from torch_npu.optim.npu_fused_sgd import Other\n", "does not have this name of torch_npu.optim"),
    ],
)
def test_only_what_is_not_there_is_told_of(text: str, said: str) -> None:
    ported = port_text(text)
    assert [each.grade for each in ported.findings] == [Grade.UNSUPPORTED]
    assert said in ported.findings[0].text
    assert text in ported.text
