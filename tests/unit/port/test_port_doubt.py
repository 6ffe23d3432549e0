"""What is not certain gets a note: it is neither rewritten in silence nor left in silence.

Covers: xamp.port.engine, xamp.port.work, xamp.port.add_amp, xamp.port.rules.remarks.
"""

from __future__ import annotations

import pytest

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.add_amp import AddAmp
from xamp.port.engine import port_text
from xamp.port.rule import Grade

NOTED = {
    "a word and a number": "x = 'cuda' + str(i)\n",
    "a sum the other way round": "x = place + 'cuda'\n",
    "a number without a colon": "x = 'cuda%d' % i\n",
    "two devices": "x = 'cuda:{},cuda:{}'.format(i, j)\n",
    "an f-string of two devices": "x = f'cuda:{i},cuda:{j}'\n",
    "a word in braces": "x = '{}:{}'.format('cuda', i)\n",
    "a prefix": "x = u'cuda'\n",
    "pieces": "x = 'cuda' ':0'\n",
    "an f-string without values": "x = f'cuda'\n",
    "a default of another key": "x = cfg.get('where', 'cuda')\n",
    "a start of any name": "if name.startswith('cuda'):\n    pass\n",
    "a replacement": "x = name.replace('cuda', 'cpu')\n",
    "a method by its text": "x = getattr(model, 'cuda')()\n",
    "backends by device": "dist.init_process_group(backend='cpu:gloo,cuda:nccl')\n",
    "a backend in pieces": "x = 'nccl' ''\n",
    "a backend in a sum": "x = 'nccl' + tail\n",
    "a backend of another key": "x = os.environ.get('X', 'nccl')\n",
    "a name of a star import of torch": "from torch import *\ncuda.synchronize()\n",
    "amp of a star import": "from mine import *\namp.initialize(model, optimizer)\n",
    "an imported name": "from mine import net\nnet.cuda()\n",
    "an imported module": "import net\nnet.cuda()\n",
    "a method as a value": "move = model.cuda\n",
    "a method as an argument": "xs = list(map(torch.Tensor.cuda, xs))\n",
    "a method in a list": "moves = [model.cuda, model.cpu]\n",
    "a storage of a function": "def to(s, where):\n    return s.cuda(0)\ntorch.load(p, map_location=to)\n",
    "a storage of a lambda": "to = lambda s, l: s.cuda(1)\ntorch.load(p, map_location=to)\n",
    "a storage of a condition": "torch.load(p, map_location=lambda s, l: s.cuda(0) if one else s)\n",
    "a storage of a tensor": "s = x.untyped_storage().cuda()\n",
    "a parameter where a class has cuda": (
        "class Batch:\n    def cuda(self):\n        return self\ndef f(b):\n    b.cuda()\n"
    ),
    "a loop where a class has cuda": (
        "class Batch:\n    def cuda(self):\n        return self\nfor b in load():\n    b.cuda()\n"
    ),
    "a device that is not there": "if args.device == 'cuda' and not torch.cuda.is_available():\n    raise E\n",
    "the same, by or": "assert args.device != 'cuda' or torch.cuda.is_available()\n",
    "the same, by a name": "u = torch.cuda.is_available()\nif args.device == 'cuda' and not u:\n    raise E\n",
    "the same, outside first": (
        "if not torch.cuda.is_available():\n    if args.device == 'cuda':\n        args.device = 'cpu'\n"
    ),
    "the same, by elif": "if torch.cuda.is_available():\n    pass\nelif args.device == 'cuda':\n    raise E\n",
    "the same, in two tests": "if args.device == 'cuda':\n    if not torch.cuda.is_available():\n        raise E\n",
}
NOTED |= {
    f"an own class, {how}": f"class Batch:\n    def cuda(self):\n        return self\n{text}"
    for how, text in {
        "by a call": "def load():\n    return Batch()\nload().cuda()\n",
        "by a call of a call": "b = wrap(Batch())\nb.cuda()\n",
        "in a tuple": "a, b = load()\na.cuda()\n",
        "by with": "with load() as b:\n    b.cuda()\n",
        "by a subscript": "batches = load()\nbatches[0].cuda()\n",
        "as a part of another": "loader.batch.cuda()\n",
        "by a method": "b = loader.next()\nb.cuda()\n",
    }.items()
}
NOTED |= {
    "the method of the base class": "class N(M):\n    def cuda(self, device=None):\n        super().cuda(device)\n",
    "one device of an index": "if args.device == 'cuda:0':\n    pass\n",
    "the same, in a value": "if x.device in ('cuda:0', y):\n    pass\n",
    "the start of a device": "x = 'cuda:'\n",
    "a list of devices": "x = 'cuda:0,cuda:1'\n",
    "a branch for each": "if args.device == 'cuda':\n    a()\nelif args.device == 'npu':\n    b()\n",
    "a branch for each, the other first": (
        "if args.device == 'npu':\n    a()\nelif args.device == 'xpu':\n    c()\nelif args.device == 'cuda':\n    b()\n"
    ),
}
CERTAIN = {
    "a module of torch where a class has cuda": (
        "class Batch:\n    def cuda(self):\n        return self\nn = torch.nn.Linear(1, 1)\nn.cuda()\n",
        "class Batch:\n    def cuda(self):\n        return self\nn = torch.nn.Linear(1, 1)\nn.to(xamp.device())\n",
    ),
    "a device that is there, by a name": (
        "u = torch.cuda.is_available()\nif u and args.device == 'cuda':\n    pass\n",
        "u = xamp.is_available()\nif u and xamp.is_available() and args.device == xamp.device_type():\n    pass\n",
    ),
    "a default of a look-up": ("d = cfg.get('device', 'cuda')\n", "d = cfg.get('device', xamp.device_type())\n"),
    "a default of getattr": ("d = getattr(a, 'device', 'cuda')\n", "d = getattr(a, 'device', xamp.device_type())\n"),
    "a start of a device": (
        "ok = device.startswith('cuda')\n",
        "ok = xamp.is_available() and device.startswith(xamp.device_type())\n",
    ),
    "a width": ("d = g('cuda:{:d}'.format(i))\n", "d = g(str(xamp.device(int(i))))\n"),
    "three quotes": ("d = f'''cuda:{i}'''\n", "d = str(xamp.device(int(i)))\n"),
    "a prefix": ("x = x.to(u'cuda')\n", "x = x.to(xamp.device())\n"),
    "a dict of settings": ("c = dict(device='cuda')\n", "c = dict(device=xamp.device_type())\n"),
    "torch takes a device": ("x = x.new_zeros(3, device='cuda')\n", "x = x.new_zeros(3, device=xamp.device())\n"),
    "a default of a backend": ("b = c.get('backend', 'nccl')\n", "b = c.get('backend', xamp.distributed_backend())\n"),
    "a backend of a dict": ("c = {'dist_backend': 'nccl'}\n", "c = {'dist_backend': xamp.distributed_backend()}\n"),
    "torch of a star import": ("torch.cuda.synchronize()\n", "xamp.accel.synchronize()\n"),
    "a parameter that says it": ("def f(x: torch.Tensor): x.cuda()\n", "def f(x: torch.Tensor): x.to(xamp.device())\n"),
}
KEPT = {
    "options": "use = args.cuda\nif opt.cuda:\n    pass\ng(self.cuda)\n",
    "data": "net.cuda = False\nuse = net.cuda\n",
    "an own class in a loop": (
        "class B:\n    def cuda(self):\n        return self\nfor b in [B()]:\n    b.cuda()\n"
        "def f(b: B):\n    b.cuda()\n"
    ),
    "an own class that inherits": (
        "class B:\n    def cuda(self):\n        return self\nclass C(B):\n    pass\nC().cuda()\n"
    ),
    "messages": "raise E('cuda' + why)\nprint('cuda:%d' % i, '{}'.format('cuda'))\nlog.info(f'cuda:{i},cuda:{j}')\n",
    "keys": "a = d.get('cuda')\nb = d.pop('nccl', None)\nc = {'cuda:%d' % i: 1}\n",
}


@pytest.mark.parametrize("text", NOTED.values(), ids=NOTED)
def test_a_doubt_is_noted_and_the_place_kept(text: str) -> None:
    ported = port_text(text)
    assert any(finding.grade is Grade.NOTED and finding.text for finding in ported.findings)
    assert "# TODO(xamp)" in ported.text
    code = [line for line in ported.text.splitlines() if "TODO(xamp)" not in line and line != "import xamp"]
    assert "\n".join(code).replace("xamp.is_available", "torch.cuda.is_available") == text.rstrip("\n")
    assert port_text(ported.text).text == ported.text


@pytest.mark.parametrize(("before", "after"), CERTAIN.values(), ids=CERTAIN)
def test_what_is_certain_is_rewritten(before: str, after: str) -> None:
    ported = port_text(f"from mine import *\n{before}")
    assert ported.text == f"from mine import *\nimport xamp\n{after}"
    assert all(finding.grade is Grade.CERTAIN for finding in ported.findings)


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_is_no_device_stays_without_a_word(text: str) -> None:
    assert port_text(text).text == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("m = torch.load(p, map_location={'cuda:%d' % 0: 'cuda:%d' % i})", ": str(xamp.device(int(i)))}"),
        ("map_location = {'cuda:0': 'cuda:1'}", ": str(xamp.device(1))}"),
        (
            "m = torch.load(p, map_location={f'cuda:{i}': 'cuda:0' for i in range(8)})",
            ": str(xamp.device(0)) for i in range(8)}",
        ),
        ("m = torch.load(p, {f'npu:{i}': f'cuda:{i}' for i in range(8)})", ": str(xamp.device(i)) for i in range(8)}"),
    ],
)
def test_where_a_load_puts_it_is_rewritten_and_the_key_told(before: str, after: str) -> None:
    ported = port_text(before + "\n")
    assert after in ported.text
    assert before[: before.index(": ")] in ported.text
    assert [each.rule for each in ported.findings if each.grade is Grade.NOTED] == ["map-location"]
    assert port_text(ported.text).text == ported.text


def test_in_its_own_class_the_parts_of_an_object_are_moved() -> None:
    text = "class Batch:\n    def cuda(self):\n        self.x = self.x.cuda()\n        return self\n"
    assert "self.x = self.x.to(xamp.device())" in port_text(text).text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\nimport torch.cuda\nx = 1\n", "import torch\nx = 1\n"),
        ("import torch, torch.cuda\n", "import torch\n"),
        ("import torch.cuda\nimport torch.cuda.amp\n", "import torch\n"),
        (
            "from apex import (  # the amp\n    amp,\n)\namp.state_dict()\n",
            "# the amp\nimport xamp\nxamp.state_dict()\n",
        ),
        (
            "from apex.optimizers import (\n    FusedAdam,  # quick\n    Other,\n)\n",
            "# TODO(xamp): xamp.apex.optimizers does not have this name of apex.optimizers\n# quick\n"
            "from apex.optimizers import Other\nfrom xamp.apex.optimizers import FusedAdam\n",
        ),
        ("from apex import amp\n__all__ = ['amp']\namp.state_dict()\n", None),
    ],
)
def test_imports_are_said_once_and_keep_their_comments(before: str, after: str | None) -> None:
    if after is None:
        after = before.replace("from apex import amp", "import xamp as amp")
    assert port_text(before).text == after


@pytest.mark.parametrize("first", ["torch.cuda", "apex"])
def test_amp_of_apex_or_of_torch_is_xamps(first: str) -> None:
    second = "apex" if first == "torch.cuda" else "torch.cuda"
    ported = port_text(
        f"try:\n    from {first} import amp\nexcept ImportError:\n    from {second} import amp\n"
        "scaler = amp.GradScaler()\nwith amp.autocast():\n    pass\namp.state_dict()\n"
    )
    assert "import amp" not in ported.text
    assert not any(finding.grade is Grade.UNSUPPORTED for finding in ported.findings)


GRAMMAR = {
    "3.9 decorators": "@buttons[0].clicked.connect\ndef f(a, /, b, *, c):\n    return HERE\n",
    "3.9 with": "with (a() as b, c() as d,):\n    HERE\n",
    "3.10 match": (
        "match x:\n    case Point(x=0, y=[a, *rest]) | {'k': 1, **kw} if a > 1:\n        HERE\n"
        "    case (1 | 2) as z, str() | None:\n        pass\n    case -1.5 + 2j | a.b.c | 'x' 'y':\n        pass\n"
    ),
    "3.10 soft words": "match = case = 1\nmatch[0] = type = 2\nmatch(HERE)\n",
    "3.11 groups": "try:\n    HERE\nexcept* (A, B) as e:\n    pass\nelse:\n    pass\n",
    "3.11 stars": "def g(*args: *Ts):\n    x[*i, 1:2] = HERE\n",
    "3.12 types": (
        "type L[T: (int, str), *Ts, **P] = dict[T, tuple[*Ts]]\nclass C[T](B[T], k=1):\n"
        "    def f[U: int](self, x: U) -> T:\n        return HERE\n"
    ),
    "3.12 quotes": 'x = f"{d["a"]} {"\\n".join(y)} {f"{f"{HERE}"}"}"\n',
    "3.12 lines": "x = f'{\n    HERE  # note\n    !r:>{width}}'\n",
    "3.13 defaults": "def f[T = int, *Ts = *tuple[int, ...], **P = [int]](x):\n    return HERE\n",
}


@pytest.mark.parametrize("text", GRAMMAR.values(), ids=GRAMMAR)
def test_the_grammar_of_newer_pythons_is_read_and_kept(text: str) -> None:
    ported = port_text(text.replace("HERE", "y.cuda()"))
    assert ported.text == "import xamp\n" + text.replace("HERE", "y.to(xamp.device())")
    assert port_text(ported.text).text == ported.text


def test_a_count_of_zero_is_a_device_that_is_not_there() -> None:
    ported = port_text("if args.device == 'cuda' and torch.cuda.device_count() < 1:\n    raise E\n")
    assert "if args.device == 'cuda' and xamp.accel.device_count() < 1:" in ported.text
    assert [each.rule for each in ported.findings if each.grade is Grade.NOTED] == ["device-compare"]
    assert port_text(ported.text).text == ported.text


def test_what_is_no_loss_is_not_scaled() -> None:
    made = "opt = torch.optim.SGD(net.parameters(), lr=1)\n"
    for call in ("torch.autograd.backward(loss)", "accelerator.backward(loss)"):
        ported = port_text(f"import torch\n{made}{call}\nopt.step()\n", last=AddAmp("O1"))
        assert f"\n{call}\n" in ported.text
        assert any(each.grade is Grade.NOTED and "what is the loss?" in each.text for each in ported.findings)
