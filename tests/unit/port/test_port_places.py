"""Texts that end as a place, or mean the library: the ported script runs on a CPU, where no place has an index.

Covers: xamp.port.places, xamp.port.rules.device_text, xamp.port.rules.device_format, xamp.port.rules.guards.
"""

from __future__ import annotations

import pytest
from gathering import cases
from ported_run import run

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade

LOADED = """
import os
import tempfile
import torch
f = os.path.join(tempfile.mkdtemp(), "c.pt")
torch.save({"w": torch.ones(2).cuda()}, f)
rank = int(os.environ.get("NO_RANK", 0))
text = "0"
for place in (
    f"cuda:{torch.cuda.current_device()}",
    f"cuda:{rank}",
    f"cuda:{text}",
    f"cuda:{rank:d}",
    "cuda:{}".format(rank),
    "cuda:{0}".format(rank),
    "cuda:{r}".format(r=rank),
    "cuda:%d" % rank,
    "cuda:%d" % (rank,),
    "cuda:%s" % text,
    "cuda:" + str(rank),
    "cuda:" + text,
    {"cuda:0": f"cuda:{rank}"},
    {"cuda:%d" % 0: "cuda:%d" % rank},
):
    assert torch.load(f, map_location=place)["w"].tolist() == [1.0, 1.0], place
device = "cuda:0"
torch.load(f, map_location=device)
torch.load(f, map_location=torch.device(f"cuda:{rank}"))
torch.load(f, map_location=f"cuda:{rank}")
torch.load(f, map_location="cuda:{}".format(rank))
x = torch.ones(2).to(f"cuda:{rank}").cuda("cuda:%d" % rank)
torch.cuda.set_device(f"cuda:{rank}")
number = f"cuda:{rank}".split(":")[1]
assert str(x.device) == f"cuda:{rank}"
print("ok", number)
"""
WRITTEN = {
    "d = f'cuda:{i}'": "d = str(xamp.device(int(i)))",
    "d = f'cuda:{0}'": "d = str(xamp.device(0))",
    "d = f'cuda:{int(i)}'": "d = str(xamp.device(int(i)))",
    "d = f'cuda:{dist.get_rank()}'": "d = str(xamp.device(dist.get_rank()))",
    "d = f'cuda:{i + 1}'": "d = str(xamp.device(int(i + 1)))",
    "for i in range(2):\n    d = f'cuda:{i + 1}'": "for i in range(2):\n    d = str(xamp.device(i + 1))",
    "d = [f'npu:{i}' for i in range(n)]": "d = [str(xamp.device(i)) for i in range(n)]",
    "d = [f'npu:{i}' for i in names]": "d = [str(xamp.device(int(i))) for i in names]",
    "def f(i: int):\n    return f'cuda:{i}'": "def f(i: int):\n    return str(xamp.device(i))",
    "def f(i: str):\n    return f'cuda:{i}'": "def f(i: str):\n    return str(xamp.device(int(i)))",
    "i = 1\nd = f'cuda:{i}'": "i = 1\nd = str(xamp.device(i))",
    "i = j\nd = f'cuda:{i}'": "i = j\nd = str(xamp.device(int(i)))",
    "i, j = 1, 2\nd = f'cuda:{i}'": "i, j = 1, 2\nd = str(xamp.device(int(i)))",
    "x.to(f'cuda:{i}', non_blocking=True)": "x.to(xamp.device(int(i)), non_blocking=True)",
    "c(f'cuda:{i}')": "c(str(xamp.device(int(i))))",
    "d = 'cuda:{0}'.format(i)": "d = str(xamp.device(int(i)))",
    "d = 'cuda:%d' % (i,)": "d = str(xamp.device(int(i)))",
    "d = 'cuda:%d' % (i)": "d = str(xamp.device(int(i)))",
    "d = 'cuda:%d' % (i, j)": "d = f'{xamp.device_type()}:%d' % (i, j)",
    "d = 'cuda:{1}'.format(i)": "d = (xamp.device_type() + ':{1}').format(i)",
    "d = 'cuda:{i}'.format(j=i)": "d = (xamp.device_type() + ':{i}').format(j=i)",
    "d = 'cuda:{}'.format(*i)": "d = (xamp.device_type() + ':{}').format(*i)",
    "d = 'cuda:{}'.format(i, j)": "d = (xamp.device_type() + ':{}').format(i, j)",
    "d = f'cuda:{i!r}'": "d = f'{xamp.device_type()}:{i!r}'",
    "d = f'cuda:{i:>2}'": "d = f'{xamp.device_type()}:{i:>2}'",
    "d = f'cuda:{i}{j}'": "d = f'{xamp.device_type()}:{i}{j}'",
    "d = f'cuda:1{i}'": "d = f'{xamp.device_type()}:1{i}'",
    "d = 'cuda:' + a + b": "d = xamp.device_type() + ':' + a + b",
    "d = f'cuda:{i}'.upper()": "d = f'{xamp.device_type()}:{i}'.upper()",
    "torch.device(f'cuda:{i}')": "xamp.device(int(i))",
    "torch.device('cuda:' + str(i))": "xamp.device(int(i))",
}


def test_places_are_taken_on_a_cpu() -> None:
    assert run(port_text(LOADED).text)[-1] in ("ok 0", "ok cpu")


def test_how_an_index_is_written() -> None:
    with cases() as case:
        for before, after in WRITTEN.items():
            with case(before):
                text = port_text(f"import torch\n{before}\n").text
                assert text == f"import torch\nimport xamp\n{after}\n"


PINNED = """
import torch
x = torch.randn(4, 2).pin_memory()
y = x.cuda(non_blocking=True)
z = torch.empty(3, pin_memory=True)
w = torch.zeros_like(z, pin_memory=bool(z.numel()))
v = w.pin_memory().cuda()
print(y.shape, z.shape, v.tolist())
"""


def test_pinned_memory_is_none_where_there_is_no_accelerator() -> None:
    ported = port_text(PINNED).text
    assert "xamp.accel.pin_memory(torch.randn(4, 2))" in ported
    assert run(ported) == ["torch.Size([4, 2]) torch.Size([3]) [0.0, 0.0, 0.0]"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(batch):\n    return batch.pin_memory()\n",
        "for x in loader:\n    x.pin_memory()\n",
        "import torch\ntorch.ones(2).pin_memory('cuda')\n".replace("'cuda'", "where"),
    ],
)
def test_what_may_pin_itself_is_kept_with_a_note(text: str) -> None:
    ported = port_text(text)
    assert [each.grade for each in ported.findings] == [Grade.NOTED]
    assert "pin_memory" in ported.findings[0].text
    code = [line for line in ported.text.splitlines() if "TODO(xamp)" not in line]
    assert code == text.splitlines()


SCALED = """
import torch
device = torch.device("cuda")
made = []
for dtype in (torch.float16, torch.float32):
    scaler = None
    if device.type in ("cuda",) and dtype == torch.float16:
        scaler = "scaler"
    made.append(scaler)
off = device.type not in ["cuda", "xpu"]
both = device.type in {"cuda", "cpu"}
print(made, off, both)
"""


def test_a_device_among_others_is_asked_as_by_equality() -> None:
    text = port_text(SCALED).text
    assert "if xamp.is_available() and device.type in (xamp.device_type(),) and dtype == torch.float16:" in text
    assert run(text) == ["[None, None] True True"]
    there = text.replace(
        "import xamp\n",
        "class xamp:\n    is_available = lambda: True\n    device_type = lambda: 'npu'\n"
        "    class device:\n        type = 'npu'\n",
    )
    assert run(there) == ["['scaler', None] False True"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("device in ('cuda', 'npu')", "xamp.is_available() and device in (xamp.device_type(), 'npu')"),
        ("device in ('mps', 'npu')", "xamp.is_available() and device in ('mps', xamp.device_type())"),
        ("device in ('cuda:0', 'cpu')", None),
        ("mode in ('cuda', 'cpu')", None),
        ("device in kinds", None),
    ],
)
def test_which_texts_among_others_are_devices(before: str, after: str | None) -> None:
    ported = port_text(f"if {before}:\n    pass\n")
    assert (f"if {after or before}:\n") in ported.text
    assert port_text(ported.text).text == ported.text


ASKED = """
import sys
import importlib.util
import torch
try:
    from apex import amp
except ModuleNotFoundError:
    amp = None
if "apex" not in sys.modules:
    raise RuntimeError("no apex: install it")
has_apex = importlib.util.find_spec("apex") is not None
model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
print(has_apex, "apex" in sys.modules)
"""


def test_questions_for_apex_are_questions_for_xamp() -> None:
    assert run(port_text(ASKED).text) == ["True True"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import apex\nok = 'apex' in sys.modules\n", "import xamp\nok = 'xamp' in sys.modules\n"),
        ("from apex import amp\nok = 'apex' in sys.modules\namp.init()\n", None),
        ("def f():\n    from apex import amp\nok = 'apex' in sys.modules\n", None),
        ("ok = 'apex' in sys.modules\n", None),
        ("from apex import amp\nm = sys.modules['apex']\n", None),
        ("from apex import amp\nm = sys.modules.get('apex')\n", None),
        ("import torch_npu\nok = 'torch_npu' in sys.modules\n", None),
        ("from apex import amp\nok = 'apex.amp' in sys.modules\n", None),
        ("from apex.transformer import layers\nok = 'apex' in sys.modules\n", None),
    ],
)
def test_only_an_import_that_every_run_reaches_answers(before: str, after: str | None) -> None:
    ported = port_text(f"import sys\n{before}")
    if after is not None:
        assert ported.text == f"import sys\n{after}"
        return
    told = [each for each in ported.findings if each.rule == "apex-by-text" and each.grade is Grade.NOTED]
    assert (len(told) == 1) == ("amp.init()" not in before)
    assert before.splitlines()[-2 if "amp.init()" in before else -1].partition("'")[0] in ported.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("util.find_spec('apex')", "util.find_spec('xamp')"),
        ("find_spec('apex.optimizers')", "find_spec('xamp.apex.optimizers')"),
        ("import_module('apex.amp')", "import_module('xamp.apex.amp')"),
        ("import_module('apex.unknown')", None),
        ("import_module('apex.parallel.LARC')", "import_module('xamp.apex.parallel.LARC')"),
        ("import_module('apex.mlp.mlp')", "import_module('xamp.apex.mlp')"),
        ("import_module('apex.optimizers.npu_fused_adam')", "import_module('xamp.apex.optimizers.npu_fused')"),
        ("import_module('apex.contrib.combine_tensors')", None),
        ("import_module('apex')", "import_module('xamp.apex')"),
        ("__import__('apex')", None),
        ("pkg_resources.require('apex')", None),
    ],
)
def test_look_ups_by_text(before: str, after: str | None) -> None:
    ported = port_text(f"m = {before}\n")
    assert f"m = {after or before}\n" in ported.text
    assert [each.grade for each in ported.findings] == [Grade.NOTED if after is None else Grade.CERTAIN]


def test_where_an_import_of_apex_stays_so_do_its_questions() -> None:
    ported = port_text("from apex.transformer import layers\nok = find_spec('apex')\n")
    assert "find_spec('apex')" in ported.text


def test_torchs_own_accelerator_is_neutral() -> None:
    ported = port_text("import torch\nif torch.accelerator.is_available():\n    torch.accelerator.synchronize()\n")
    assert not ported.changed
    assert {each.grade for each in ported.findings} == {Grade.NEUTRAL}
    assert {each.rule for each in ported.findings} == {"torch-accelerator"}
