"""A branch for CUDA and one for Ascend: no two conditions, keys or cases become one.

Covers: xamp.port.rules.branches.
"""

from __future__ import annotations

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade

KEPT = {
    "functions by a device's name": "f = {'cuda': torch.cuda.synchronize, 'npu': torch.npu.synchronize}\n",
    "amounts by a keyword": "m = dict(cuda=torch.cuda.memory_allocated(), npu=torch.npu.memory_allocated())\n",
    "starts": "if device.startswith('cuda'):\n    a()\nelif device.startswith('npu'):\n    b()\n",
    "parts of a text": "if 'npu' in args.device:\n    a()\nelif fast:\n    c()\nelif 'cuda' in args.device:\n    b()\n",
    "one of them with more": "if d == 'cuda' and fast:\n    a()\nelif d == 'npu':\n    b()\n",
    "another spelling": "if d == 'cuda':\n    a()\nelif d.startswith('npu'):\n    b()\n",
    "with an index": "if device == 'cuda:0':\n    a()\nelif device == 'npu:0':\n    b()\n",
    "f-strings": "if device == f'cuda:{i}':\n    a()\nelif device == f'npu:{i}':\n    b()\n",
    "f-strings without values": "if device == f'cuda':\n    a()\nelif device == f'npu':\n    b()\n",
    "backends": "if backend == 'nccl':\n    a()\nelif backend == 'hccl':\n    b()\n",
    "questions": "if torch.cuda.is_available():\n    a()\nelif torch.npu.is_available():\n    b()\n",
    "counts": "if torch.npu.device_count() > 1:\n    a()\nelif torch.cuda.device_count() > 1:\n    b()\n",
    "flags of tensors": "x = torch.ones(1)\nif x.is_cuda:\n    a()\nelif x.is_npu:\n    b()\n",
    "devices": "if d == torch.device('cuda'):\n    a()\nelif d == torch.device('npu'):\n    b()\n",
    "a choice": "a = 1 if d == 'cuda' else 2 if d == 'npu' else 3\n",
    "a choice of devices": "d = 'a' if torch.cuda.is_available() else 'b' if torch.npu.is_available() else 'cpu'\n",
    "one below the other": "if d.startswith('cuda'):\n    a()\nif d.startswith('npu'):\n    b()\n",
    "one below the other, in a function": (
        "def f(device):\n    if device == 'cuda':\n        return 1\n    if device == 'npu':\n        return 2\n"
    ),
    "counted twice": "if torch.cuda.is_available():\n    n += 1\nif torch.npu.is_available():\n    n += 1\n",
    "flags": "u = device == 'cuda'\nv = device == 'npu'\nif u:\n    a()\nelif v:\n    b()\n",
    "flags one below the other": "u = device == 'cuda'\nv = device == 'npu'\nif u:\n    a()\nif v:\n    b()\n",
    "flags of an object": (
        "self.u = device == 'cuda'\nself.v = device == 'npu'\nif self.u:\n    a()\nelif self.v:\n    b()\n"
    ),
    "flags of flags": "t = device == 'cuda'\nu = t\nv = not (device == 'npu')\nif u:\n    a()\nelif not v:\n    b()\n",
    "functions": (
        "def u(device):\n    return device == 'cuda'\ndef v(device):\n    return device == 'npu'\n"
        "if u(d):\n    a()\nelif v(d):\n    b()\n"
    ),
    "properties": (
        "class T:\n    @property\n    def u(self):\n        return self.device.type == 'cuda'\n    @property\n"
        "    def v(self):\n        return self.device.type == 'npu'\nif t.u:\n    a()\nelif t.v:\n    b()\n"
    ),
    "properties by their names": (
        "class T:\n    @property\n    def is_cuda(self):\n        return self.d.startswith('cuda')\n    @property\n"
        "    def is_npu(self):\n        return self.d.startswith('npu')\n    def f(self):\n"
        "        return 1 if self.is_cuda else 2 if self.is_npu else 3\n"
    ),
    "methods": (
        "class T:\n    def u(self):\n        return self.device == 'cuda'\n    def v(self):\n"
        "        return self.device == 'npu'\nif t.u():\n    a()\nif t.v():\n    b()\n"
    ),
    "lambdas": (
        "u = lambda d: d.device == 'cuda'\nv = lambda d: d.device == 'npu'\nif u(t):\n    a()\nelif v(t):\n    b()\n"
    ),
    "lambdas in properties": (
        "class T:\n    u = property(lambda self: self.device == 'cuda')\n"
        "    v = property(lambda self: self.device == 'npu')\nif t.u:\n    a()\nelif t.v:\n    b()\n"
    ),
    "one and not the other": "if not torch.cuda.is_available() and torch.npu.is_available():\n    a()\n",
    "one and the other": "both = torch.cuda.is_available() and fast and torch.npu.is_available()\n",
    "one card and not the other": ("if torch.cuda.device_count() == 1 and not torch.npu.is_available():\n    a()\n"),
    "one or not the other": "b = torch.cuda.is_available() or not torch.npu.is_available()\n",
    "not one or not the other": "b = not torch.cuda.is_available() or not torch.npu.is_available()\n",
    "a device and the other's question": "if device == 'npu' and not torch.cuda.is_available():\n    a()\n",
    "one device and not the other": "if device.type == 'cuda' and device.type != 'npu':\n    a()\n",
    "flags of which one is not": (
        "u = torch.cuda.is_available()\nv = torch.npu.is_available()\nif u and not v:\n    a()\n"
    ),
    "answers that are compared": "assert torch.cuda.is_available() != torch.npu.is_available()\n",
    "answers that are added": "n = torch.cuda.device_count() + torch.npu.device_count()\n",
    "answers that are an index": "k = [0, 1, 2][torch.cuda.is_available() + 2 * torch.npu.is_available()]\n",
    "keys that are devices": "d = {torch.device('cuda'): 1, torch.device('npu'): 2}\n",
    "keys that are types": "d = {torch.cuda.HalfTensor: 1, torch.FloatTensor: 2, torch.npu.HalfTensor: 3}\n",
    "what is looked up by a text": (
        "if torch.cuda.is_available():\n    k = {'use_cuda': True}\n"
        "elif torch.npu.is_available():\n    k = {'use_npu': True}\n"
    ),
    "a text that is no device": (
        "if torch.cuda.is_available():\n    kind = 'cuda'\nelif torch.npu.is_available():\n    kind = 'npu'\n"
    ),
    "cases": "match device:\n    case 'cuda' | 'gpu':\n        a()\n    case 'npu':\n        b()\n",
    "questions that are matched": (
        "match torch.cuda.is_available(), torch.npu.is_available():\n    case (True, _):\n        a()\n"
        "    case (_, True):\n        b()\n"
    ),
    "answers by a device's name": "on = {'cuda': torch.cuda.is_available(), 'npu': torch.npu.is_available()}\n",
    "answers by a keyword": "on = dict(npu=torch.npu.device_count() > 0, cuda=torch.cuda.device_count() > 0)\n",
    "modules by a device's name": "homes = {'cuda': torch.cuda, 'npu': torch.npu}\n",
    "modules by a keyword": "homes = dict(cuda=torch.cuda, npu=torch.npu)\n",
    "modules that a call gets": "homes = Homes(cuda=torch.cuda, npu=torch.npu)\n",
    "modules in a list": "n = sum(home.device_count() for home in [torch.cuda, torch.npu])\n",
    "modules in a tuple": "for home in (torch.cuda, torch.npu):\n    n += home.device_count()\n",
    "modules with their names": (
        "for name, home in ((1, torch.cuda), (2, torch.npu)):\n    n[name] = home.device_count()\n"
    ),
    "modules in dicts of a dict": "d = {'cuda': {'home': torch.cuda}, 'npu': {'home': torch.npu}}\n",
    "below an else": (
        "if torch.npu.is_available():\n    a()\nelse:\n    c()\n    if torch.cuda.is_available():\n        b()\n"
    ),
    "a choice below an else": (
        "if torch.npu.is_available():\n    n = 1\nelse:\n    n = 2 if torch.cuda.is_available() else 3\n"
    ),
    "a choice below what returns": (
        "u = torch.cuda.is_available()\nv = torch.npu.is_available()\ndef f():\n    if v:\n        return 1\n"
        "    return 2 if u else 3\n"
    ),
    "two choices": "n = 2 if torch.cuda.is_available() else 0\nm = 3 if torch.npu.is_available() else 0\n",
    "modules that are put into a dict": "homes['cuda'] = torch.cuda\nhomes['npu'] = torch.npu\n",
    "modules that are registered": "register('cuda', torch.cuda)\nregister('npu', torch.npu)\n",
    "functions that are registered": "on.add('npu', torch.npu.synchronize)\non.add('cuda', torch.cuda.synchronize)\n",
    "modules that are imported": "from torch import cuda, npu\nhomes = {'cuda': cuda, 'npu': npu}\n",
    "modules under other names": "import torch.npu as n\nhomes = {'cuda': torch.cuda, 'npu': n}\n",
    "questions by a device's name": "ask = {'cuda': torch.cuda.is_available, 'npu': torch.npu.is_available}\n",
    "lambdas by a device's name": (
        "ask = {'cuda': lambda: torch.cuda.is_available(), 'npu': lambda: torch.npu.is_available()}\n"
    ),
    "answers of functions": (
        "def u():\n    return torch.cuda.is_available()\ndef v():\n    return torch.npu.is_available()\n"
        "on = {'cuda': u(), 'npu': v()}\n"
    ),
    "answers that a call gets": "on = On(cuda=torch.cuda.is_available(), npu=torch.npu.is_available())\n",
    "answers in a list": "n = sum([torch.cuda.device_count(), torch.npu.device_count()])\n",
    "answers that are returned": "def on():\n    return torch.cuda.is_available(), torch.npu.is_available()\n",
    "flags of a tensor by a device's name": "x = torch.ones(1)\non = {'cuda': x.is_cuda, 'npu': x.is_npu}\n",
    "questions of modules that are imported": (
        "from torch import cuda, npu\nif cuda.is_available():\n    a()\nelif npu.is_available():\n    b()\n"
    ),
    "questions that are imported": (
        "from torch.cuda import is_available\nfrom torch.npu import is_available as on\n"
        "if is_available():\n    a()\nelif on():\n    b()\n"
    ),
    "flags of a tuple": (
        "u, v = torch.cuda.is_available(), torch.npu.is_available()\nif u:\n    a()\nelif v:\n    b()\n"
    ),
    "a case": "match device:\n    case 'cuda:0':\n        a()\n",
}
REWRITTEN = {
    "one family": (
        "if d == 'cuda':\n    a()\nelif d == 'cpu':\n    b()\n",
        "# TODO(xamp): does this text name a device?",
    ),
    "both in each": (
        "if device in ('cuda', 'npu'):\n    a()\nelif device == 'npu':\n    b()\n",
        "device == xamp.device_type()",
    ),
    "either": ("if device == 'cuda' or device == 'npu':\n    a()\n", "device == xamp.device_type()"),
    "two questions": (
        "if device == 'cuda':\n    a()\nif mode == 'npu_first':\n    b()\n",
        "device == xamp.device_type()",
    ),
    "others below": (
        "if device == 'cuda':\n    a()\nif backend == 'hccl':\n    b()\n",
        "backend == xamp.distributed_backend()",
    ),
    "registered twice for one": (
        "register('cuda', torch.cuda)\nregister('cuda:0', torch.cuda)\n",
        "xamp.accel",
    ),
    "in two functions": (
        "def f():\n    if device == 'cuda':\n        a()\ndef g():\n    if device == 'npu':\n        b()\n",
        "if xamp.is_available() and device == xamp.device_type():\n        b()",
    ),
    "seeds of both": (
        "if torch.cuda.is_available():\n    torch.cuda.manual_seed(1)\nif torch.npu.is_available():\n"
        "    torch.npu.manual_seed(1)\n",
        "if xamp.is_available():\n    xamp.accel.manual_seed(1)\nif xamp.is_available():",
    ),
    "seeds, and what may not run twice": (
        "if torch.cuda.is_available():\n    torch.cuda.manual_seed(n)\n    n += 1\n"
        "if torch.npu.is_available():\n    torch.npu.manual_seed(n)\n    n += 1\n",
        "if torch.npu.is_available():\n    xamp.accel.manual_seed(n)",
    ),
    "a device below an else": (
        "if torch.npu.is_available():\n    d = torch.device('npu')\nelse:\n"
        "    d = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n",
        "if xamp.is_available():\n    d = xamp.device()\nelse:\n    d = xamp.device()",
    ),
    "devices that are chosen in turn": (
        "d = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
        "d = torch.device('npu' if torch.npu.is_available() else d)\n",
        "d = torch.device(xamp.device_type() if xamp.is_available() else d)",
    ),
    "modules of one family": ("homes = [torch.cuda, torch.cpu]\n", "homes = [xamp.accel, torch.cpu]"),
    "modules that are looked for": ("ok = home in (torch.cuda, torch.npu)\n", "ok = home in (xamp.accel, xamp.accel)"),
    "any answer": (
        "ok = any([torch.cuda.is_available(), torch.npu.is_available()])\n",
        "ok = any([xamp.is_available(), xamp.is_available()])",
    ),
    "answers of a tuple": (
        "u, v = torch.cuda.is_available(), torch.npu.is_available()\nok = u or v\n",
        "u, v = xamp.is_available(), xamp.is_available()",
    ),
    "backends in a list": (
        "b = 'nccl'\nc = 'hccl'\nboth = [b, c]\ntorch.distributed.init_process_group('nccl')\n",
        "init_process_group(xamp.distributed_backend())",
    ),
    "other names of an import that stays": (
        "from torch import cuda, npu\nhomes = {'cuda': cuda, 'npu': npu}\ncuda.synchronize()\n",
        "from torch import cuda, npu\nimport xamp\n# TODO(xamp): CUDA and Ascend have a member each, which would "
        "become equal, so both stay; xamp.accel is the one of the device in use\nhomes = {'cuda': cuda, 'npu': npu}\n"
        "xamp.accel.synchronize()\n",
    ),
    "answers of one family": (
        "on = {'cuda': torch.cuda.is_available(), 'half': torch.cuda.is_bf16_supported()}\n",
        "on = {'cuda': xamp.is_available(), 'half': xamp.accel.is_bf16_supported()}",
    ),
    "a match of one question": (
        "match torch.cuda.is_available():\n    case True:\n        a()\n",
        "match xamp.is_available():",
    ),
    "keys of a comprehension": (
        "m = {f'cuda:{i}': 'a' for i in range(2)}\n",
        "m = {str(xamp.device(i)): 'a' for i in range(2)}",
    ),
    "one or the other": (
        "ok = torch.cuda.is_available() or torch.npu.is_available()\n",
        "ok = xamp.is_available() or xamp.is_available()",
    ),
    "none of both": (
        "if not torch.cuda.is_available() and not torch.npu.is_available():\n    a()\n",
        "if not xamp.is_available() and not xamp.is_available():",
    ),
    "none of two devices": (
        "if device.type != 'cuda' and device.type != 'npu':\n    a()\n",
        "(not xamp.is_available() or device.type != xamp.device_type()) and (",
    ),
    "none of two devices by their names": (
        "if 'cuda' not in device and 'npu' not in device:\n    a()\n",
        "(not xamp.is_available() or xamp.device_type() not in device) and (",
    ),
    "no count of both": (
        "if torch.cuda.device_count() == 0 and torch.npu.device_count() < 1:\n    a()\n",
        "if xamp.accel.device_count() == 0 and xamp.accel.device_count() < 1:",
    ),
    "a group and its question": (
        "if device in ('cuda', 'npu') and torch.cuda.is_available():\n    a()\n",
        "xamp.device_type(), 'npu') and xamp.is_available():",
    ),
    "keys of one family": ("d = {torch.device('cuda'): 1, torch.device('cpu'): 2}\n", "{xamp.device(): 1"),
    "keys of two indices": (
        "d = {torch.device('cuda:0'): 1, torch.device('npu:1'): 2}\n",
        "{xamp.device(0): 1, xamp.device(1)",
    ),
    "a choice among devices": (
        "d = 'cuda' if torch.cuda.is_available() else 'npu' if torch.npu.is_available() else 'cpu'\n",
        "d = xamp.device_type() if xamp.is_available() else xamp.device_type()\n",
    ),
    "branches that start the same group": (
        "if torch.cuda.is_available():\n    start(backend='nccl')\n    dist.init_process_group('nccl')\n"
        "elif torch.npu.is_available():\n    start(backend='hccl')\n    dist.init_process_group('hccl')\n",
        "take one out\nelif xamp.is_available():\n    start(backend=xamp.distributed_backend())",
    ),
    "branches that move the same": (
        "if args.gpu:\n    pass\nif torch.npu.is_available():\n    x = y.npu()\n"
        "elif torch.cuda.is_available():\n    x = y.cuda()\n",
        "take one out\nelif xamp.is_available():\n    x = y.to(xamp.device())",
    ),
    "branches that do the same": (
        "if torch.cuda.is_available():\n    d = torch.device('cuda')\nelif torch.npu.is_available():\n"
        "    d = torch.device('npu')\n",
        "d = xamp.device()\n# TODO(xamp): CUDA and Ascend had a branch each, and they do the same now: take one out\n"
        "elif xamp.is_available():\n    d = xamp.device()",
    ),
}


def test_both_tests_stay_with_a_note() -> None:
    with cases() as case:
        for name, text in KEPT.items():
            with case(name):
                ported = port_text(f"import torch\n{text}")
                code = [line for line in ported.text.splitlines() if "TODO(xamp)" not in line and line != "import xamp"]
                assert "\n".join(code) == f"import torch\n{text}".rstrip("\n")
                told = [each for each in ported.findings if each.rule == "branches-apart"]
                assert told
                assert {each.grade for each in told} == {Grade.NOTED}
                assert port_text(ported.text).text == ported.text


def test_what_stays_apart_by_itself_is_rewritten() -> None:
    with cases() as case:
        for name, (text, wanted) in REWRITTEN.items():
            with case(name):
                assert wanted in port_text(f"import torch\n{text}").text


def test_branches_run_apart_after_a_port() -> None:
    text = (
        "def kind(device):\n    if device.startswith('cuda'):\n        return 'CUDA'\n"
        "    elif device.startswith('npu'):\n"
        "        return 'Ascend'\n    return 'other'\n"
    )
    names: dict[str, object] = {}
    exec(compile(port_text(text).text, "script", "exec"), names)
    kind = names["kind"]
    assert [kind(each) for each in ("cuda:1", "npu:0", "cpu")] == ["CUDA", "Ascend", "other"]  # type: ignore[operator]


def test_each_test_of_a_chain_is_named_once() -> None:
    ported = port_text("if device == 'cuda':\n    a()\nelif device == 'npu':\n    b()\nelse:\n    c()\n")
    assert [each.line for each in ported.findings if each.rule == "branches-apart"] == [1, 3]
    assert ported.text.count("# TODO(xamp)") == 2
