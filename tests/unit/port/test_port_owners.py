"""An attribute decides only where its owner is a tensor: options and objects of a script have names of all kinds.

Covers: xamp.port.owners, xamp.port.receivers, xamp.port.flags.
"""

from __future__ import annotations

import pytest
from gathering import cases

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.owners import is_tensor
from xamp.port.rule import Grade
from xamp.port.rules import built_in
from xamp.port.source import Source, kind
from xamp.port.work import Work

TENSORS = {
    "a maker": "x = torch.zeros(3)\nx.is_cuda\n",
    "a maker by another name": "from torch import ones as o\nx = o(3)\nx.is_cuda\n",
    "a functional": "y = torch.nn.functional.relu(a)\ny.is_cuda\n",
    "a weight": "next(model.parameters()).is_cuda\n",
    "weights in a loop": "for p in model.parameters():\n    p.is_cuda\n",
    "buffers in a comprehension": "all(b.is_cuda for b in model.buffers())\n",
    "tensors in a loop": "t = torch.ones(2)\nfor row in t:\n    row.is_cuda\n",
    "moved before": "x.cuda().is_cuda\n",
    "a tensor of an old type": "x = torch.cuda.FloatTensor(3).cuda()\nx.is_cuda\n",
    "a name moved elsewhere": "def f(x):\n    y = x.cuda()\n    return x.is_cuda\n",
    "a method of tensors": "def f(x):\n    a = x.unsqueeze(0)\n    return x.is_cuda\n",
    "a method of its tensors": "def f(x):\n    y = x.view(3)\n    return y.is_cuda\n",
    "a free name": "a = x.contiguous()\nx.is_cuda\n",
    "an argument of a functional": "def f(x):\n    torch.nn.functional.relu(x)\n    x.is_cuda\n",
    "an argument of a maker": "def f(x):\n    torch.zeros_like(x)\n    x.is_cuda\n",
    "a type": "def f(x: torch.Tensor):\n    x.is_cuda\n",
    "a type or None": "def f(x: Optional[Tensor] = None):\n    x.is_cuda\n",
    "a parameter of a module": "self.w = torch.nn.Parameter(a)\nself.w.is_cuda\n",
    "a gradient": "class F:\n    @staticmethod\n    def backward(ctx, grad):\n        grad.is_cuda\n",
    "a part": "x = torch.ones(2)\nx.data.is_cuda\n",
    "an element": "x = torch.ones(2)\nx[0].is_cuda\n",
    "a sum": "x = torch.ones(2)\n(1 + x).is_cuda\n",
    "a sum the other way round": "x = torch.ones(2)\n(x * 2).is_cuda\n",
    "a sign": "x = torch.ones(2)\n(-x).is_cuda\n",
    "a choice": "x = torch.ones(2) if a else torch.zeros(2)\nx.is_cuda\n",
    "a method of one": "x = torch.ones(2)\nx.pow(2).is_cuda\n",
    "one of two values": "x = torch.ones(2)\nx = x.to(d)\nx.is_cuda\n",
    "one of a tuple": "a, x = 1, torch.ones(2)\nx.is_cuda\n",
    "one of a tuple, again": "x = torch.ones(2)\nx, y = x.pin_memory().to(d), 1\nx.is_cuda\n",
    "moved by its own name": "x = load()\nx = x.cuda()\nx.is_cuda\n",
    "moved in a circle": "x = y.cuda()\ny = x.cuda()\nx.is_cuda\n",
    "a later evidence": "x = load()\ny = x.masked_fill(m, 0)\nx.is_cuda\n",
}
OTHERS = {
    "options": "args = parser.parse_args()\nargs.is_cuda\n",
    "a namespace": "import argparse\nargs = argparse.Namespace()\nargs.is_cuda\n",
    "options by a parameter": "def main(args):\n    args.is_cuda\n",
    "an object": "class C:\n    pass\nc = C()\nc.view(1)\nc.is_cuda\n",
    "itself": "class C:\n    def f(self):\n        self.view(1)\n        self.is_cuda\n",
    "a class": "class C:\n    is_cuda = False\nC.is_cuda\n",
    "a part of options": "class T:\n    def f(self):\n        self.args.is_cuda\n",
    "a function of the script": "def load():\n    pass\nload().is_cuda\n",
    "a module of the script": "import config\nconfig.is_cuda\n",
    "a type of its own": "def f(x: Options):\n    x.unsqueeze(0)\n    x.is_cuda\n",
    "a list of tensors": "def f(x: list[torch.Tensor]):\n    x.view(1)\n    x.is_cuda\n",
    "a dict": "d = {}\nd.view(1)\nd.is_cuda\n",
    "a size": "x = torch.ones(2)\nx.size().is_cuda\n",
    "a loop over what is not known": "for x in load():\n    x.is_cuda\n",
    "one of two values": "x = torch.ones(2)\nx = load()\nx.is_cuda\n",
    "a choice of two": "(torch.ones(2) if a else b).is_cuda\n",
    "the context of a function": "class F:\n    def backward(ctx, g):\n        ctx.is_cuda\n",
    "another function called backward": "class F:\n    def backward(self, g):\n        g.is_cuda\n",
    "the second argument of a functional": "def f(x):\n    torch.nn.functional.linear(a, x)\n    x.is_cuda\n",
    "an argument of another": "def f(x):\n    log(x)\n    x.is_cuda\n",
    "a method that others have too": "def f(x):\n    x.to(d)\n    x.type(t)\n    x.is_cuda\n",
    "a method that the file defines": "def size(self):\n    pass\ndef f(x):\n    x.size()\n    x.is_cuda\n",
    "an own object that is moved": (
        "class B:\n    def cuda(self):\n        return self\n"
        "def f(b: 'B'):\n    pass\nfor b in [B()]:\n    b.cuda()\n    b.is_cuda\n"
    ),
    "a module that is moved": "class N(torch.nn.Module):\n    pass\nnet = N().cuda()\nnet.is_cuda\n",
    "a module of another file that is moved": "from models import Net\nnet = Net(3).cuda()\nnet.is_cuda\n",
    "a module that is moved later": "import models\nnet = models.Net()\nnet = net.cuda()\nnet.is_cuda\n",
    "a module that is moved at once": "from models import Net\nNet().eval().cuda().is_cuda\n",
    "a module by what it is asked": "def f(net):\n    net.cuda()\n    net.train()\n    net.is_cuda\n",
    "a module by its weights": "net = build()\nnet.cuda()\nf(net.parameters())\nnet.is_cuda\n",
    "a module of torch": "net = torch.nn.Linear(1, 1).cuda()\nnet.is_cuda\n",
    "an attribute without a call": "def f(x):\n    x.view\n    x.is_cuda\n",
    "another value": "not torch.ones(2).is_cuda\nargs.is_cuda\n",
    "assigned elsewhere": "self.w = torch.ones(1)\nself.w = None\nself.w.is_cuda\n",
    "the other of a tuple": "x, a = 1, torch.ones(2)\nx.is_cuda\n",
    "of a longer tuple": "a, x = torch.ones(2), torch.ones(2), 3\nx.is_cuda\n",
    "of a call": "a, x = load()\nx.is_cuda\n",
    "a cycle": "x = y\ny = x\nx.is_cuda\n",
    "the result of another function of torch": "torch.load(p).is_cuda\n",
    "the next of something": "next(loader).is_cuda\n",
}


def owner(text: str) -> bool:
    """What is said of the owner of the last ``is_cuda`` of a text."""
    work = Work(Source(f"import torch\n{text}"), built_in())
    last = [node for node in work.source.nodes if kind(node) == "Attribute" and node.attr.value == "is_cuda"][-1]
    return is_tensor(work, last.value)


def test_what_makes_a_tensor_and_what_is_used_as_one() -> None:
    with cases() as case:
        for name, text in TENSORS.items():
            with case(name):
                assert owner(text) is True


def test_what_may_be_something_else() -> None:
    with cases() as case:
        for name, text in OTHERS.items():
            with case(name):
                assert owner(text) is False


def test_a_script_s_own_flags_stay_and_are_named() -> None:
    text = (
        "import torch\nargs = parser.parse_args()\n\n\nclass Cfg:\n    is_cuda = False\n\n\ncfg = Cfg()\n"
        "if args.is_npu:\n    x = torch.ones(2)\nelif cfg.is_cuda or x.is_npu:\n    pass\n"
    )
    ported = port_text(text)
    assert "if args.is_npu:" in ported.text
    assert "elif cfg.is_cuda or x.device.type != 'cpu':" in ported.text
    told = [each.text.partition(":")[0] for each in ported.findings if each.rule == "is-cuda"]
    assert told == ["args.is_npu", "cfg.is_cuda", "was .is_npu; see that what follows is not for Ascend only"]
    assert {each.grade for each in ported.findings} == {Grade.NOTED}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("y = x.is_cuda\n", "y = x.device.type != 'cpu'\n"),
        ("f(x.is_cuda, a=x.is_cuda)\n", "f(x.device.type != 'cpu', a=x.device.type != 'cpu')\n"),
        ("y = (x.is_cuda)\n", "y = (x.device.type != 'cpu')\n"),
        ("y = [x.is_cuda]\n", "y = [x.device.type != 'cpu']\n"),
        ("y = x.is_cuda == b\n", "y = (x.device.type != 'cpu') == b\n"),
        ("y = not x.is_cuda\n", "y = not (x.device.type != 'cpu')\n"),
        ("y = f(*x.is_cuda)\n", "y = f(*(x.device.type != 'cpu'))\n"),
        ("y = x.is_cuda + 1\n", "y = (x.device.type != 'cpu') + 1\n"),
        ("y = a or x.is_cuda and b\n", "y = a or x.device.type != 'cpu' and b\n"),
        ("y = 1 if x.is_cuda else 2\n", "y = 1 if x.device.type != 'cpu' else 2\n"),
        ("z = d[x.is_cuda]\n", "z = d[x.device.type != 'cpu']\n"),
    ],
)
def test_brackets_stand_where_they_are_needed(before: str, after: str) -> None:
    ported = port_text(f"import torch\nx = torch.ones(2)\n{before}").text
    assert ported.partition("for CUDA only\n")[2] == after


def test_a_long_owner_is_named_by_its_end() -> None:
    text = f"if {'very_long_name.' * 5}args.is_npu:\n    pass\n"
    assert port_text(text).findings[0].text.startswith("(...).is_npu: ")
    text = "if build(1,\n    2).args.is_npu:\n    pass\n"
    assert port_text(text).findings[0].text.startswith("build(1, 2).args.is_npu: ")


def test_operators_of_ascend_are_told_by_their_owner() -> None:
    grades = {
        "x = torch.ones(2)\nx.npu_new_thing()\n": [Grade.UNSUPPORTED],
        "x = torch.npu_new_thing(x)\n": [Grade.UNSUPPORTED],
        "self.npu_new_thing()\n": [Grade.NOTED],
        "x.npu_format_cast(2)\n": [Grade.UNSUPPORTED],
        "import tools\ntools.npu_format_cast(2)\n": [],
        "def npu_format_cast(x, y): pass\nx.npu_format_cast(2)\n": [],
    }
    for text, wanted in grades.items():
        assert [each.grade for each in port_text(f"import torch\n{text}").findings] == wanted, text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("getattr(x, 'is_cuda')", True),
        ("getattr(x, 'is_npu', False)", True),
        ("hasattr(args, 'is_npu')", True),
        ("setattr(args, 'is_npu', True)", False),
        ("getattr(args, 'is_cpu')", False),
        ("getattr(args, 'use_is_cuda')", False),
    ],
)
def test_a_flag_that_is_looked_up_by_its_text_stays_and_is_named(line: str, told: bool) -> None:
    ported = port_text(f"y = {line}\n")
    assert f"y = {line}\n" in ported.text
    found = [each.text for each in ported.findings if each.rule == "probes"]
    assert bool(found) is told
    assert all(each.startswith(line.partition("(")[2].partition(",")[0]) for each in found)
