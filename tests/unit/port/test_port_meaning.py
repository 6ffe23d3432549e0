"""Random programs from the shapes that real scripts have mean the same after porting.

Both are executed on stand-ins that write down what is asked of torch, Apex and xamp; see ``port_standins``.

Covers: xamp.port.engine, xamp.port.rules.*.
"""

from __future__ import annotations

import random
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from port_sites import leftovers, spoken
from port_standins import record

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text

IMPORTS = (
    "import torch",
    "import torch\nimport torch.cuda\nimport torch.cuda.amp",
    "import torch, torch.distributed as dist",
    "import torch\nimport torch.npu\nimport torch_npu",
)
APEX = (
    "from apex import amp",
    "try:\n    from apex import amp\nexcept ImportError:\n    amp = None",
    "try:\n    from apex import amp\n    has_apex = True\nexcept Exception:\n    has_apex = False",
    "import apex.amp as amp",
    "if torch.cuda.is_available():\n    from apex import amp",
    "from apex import amp, parallel",
    "import apex; from apex import amp",
)
SHAPES = (
    "x = x.cuda()",
    "y = y.cuda(non_blocking=True)",
    "net.cuda(1)",
    "x, y = x.cuda(0, non_blocking=True), y.cuda(device=1)",
    "x = x.npu()",
    "x = [each.cuda() for each in (x, y)][0]",
    "x = (lambda t: t.cuda())(x)",
    "torch.cuda.synchronize()",
    "torch.cuda.set_device(1)",
    "n = torch.cuda.device_count()\nkeep(n)",
    "torch.npu.manual_seed_all(3)",
    "with torch.cuda.stream(torch.cuda.Stream()):\n    torch.cuda.current_stream().wait_stream(None)",
    "keep(torch.device('cuda'))",
    "keep(torch.device('cuda', 1))",
    "keep(torch.device('cuda:1' if torch.cuda.is_available() else 'cpu'))",
    "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nkeep(device)",
    'device = "cuda:0"\nkeep(device)',
    "device = f'cuda:{1}'\nkeep(device)",
    "device = 'cuda:%d' % 1\nkeep(device)",
    "device = 'cuda:{}'.format(1)\nkeep(device)",
    "device = 'npu:' + str(0)\nkeep(device)",
    "device = torch.device('cuda')\nif device.type == 'cuda':\n    keep(1)\nelse:\n    keep(2)",
    "device = 'cuda:1'\nkeep('cuda' in device and not device != 'cuda')",
    "x = torch.zeros(3, device='cuda')",
    "x = x.to('cuda:1', non_blocking=True)",
    "def f(t, device='cuda'):\n    return t.to(device)\nf(x)",
    "torch.distributed.init_process_group(backend='nccl', init_method='env://')",
    "torch.distributed.init_process_group('hccl')",
    "backend = 'nccl' if torch.cuda.is_available() else 'gloo'\nkeep(backend)",
    "torch.load('f', map_location=lambda storage, loc: storage.cuda(1))",
    "torch.load('f', map_location='cuda:1')",
    "with torch.cuda.amp.autocast(enabled=True):\n    loss.mean()",
    "with torch.autocast('cuda', dtype=None, enabled=False):\n    loss.mean()",
    "with torch.amp.autocast(device_type='cuda'):\n    loss.mean()",
    "scaler = torch.cuda.amp.GradScaler(init_scale=4.0)\nscaler.scale(loss).backward()\nscaler.step(optimizer)",
    "amp_autocast = torch.cuda.amp.autocast\nwith amp_autocast():\n    loss.mean()",
    "net, optimizer = amp.initialize(net, optimizer, opt_level='O2', loss_scale=128.0)",
    "net, optimizer = amp.initialize(net, optimizer)",
    'net, optimizer = amp.initialize(net, optimizer, opt_level="O1", combine_grad=True)',
    "net, optimizer = amp.initialize(\n    net, optimizer,\n    opt_level='O1',\n    combine_grad=True,  # quick\n)",
    "with amp.scale_loss(loss, optimizer) as scaled:\n    scaled.backward()",
    "for p in amp.master_params(optimizer):\n    keep(p)",
    "amp.load_state_dict({'amp': amp.state_dict(), 'cuda': 'cuda'}['cuda'])",
    "keep(amp is not None)",
    "net.amp.initialize(opt_level='O1')\nnet.apex.amp.step(amp=1, torch=net.torch.amp)",
    "if net.amp and net.cuda:\n    amp.state_dict()",
    "def go(amp=amp):\n    amp.scale_loss(loss, optimizer)\ngo()",
    "@amp.float_function\ndef g(t):\n    return t\ng(x)",
    "from apex.parallel import DistributedDataParallel as DDP\nnet = DDP(net, delay_allreduce=True)",
    "import apex\nopt = apex.optimizers.FusedAdam(net.parameters(), lr=0.1)",
    "keep('nccl cuda')  # x.cuda(), 'nccl'",
    "'''x.cuda() on 'cuda' '''",
    "d = {'cuda': 1, 'nccl': 2}\nkeep(d['cuda'] + d['nccl'])",
    "raise_ = str('say cuda:%d' % 3)\nkeep(raise_)",
)


def laid_out(body: str, how: int, chance: random.Random) -> str:
    """The statements in one of the forms that scripts have."""
    inside = textwrap.indent(body, chance.choice(("    ", "  ", "\t")))
    if how == 1:
        return f"if True:\n{inside}\n"
    if how == 2:
        names = "global x, y, net, optimizer, amp, device, backend, n, scaler, d, raise_, opt, amp_autocast"
        space = inside[: len(inside) - len(inside.lstrip())]
        return f"def run():\n{space}{names}\n{inside}\nrun()\n"
    if how == 3:
        return f"try:\n{inside}\nfinally:\n    pass  # done\n"
    if how == 4:
        return f"for _ in range(2):\n{inside}\n"
    if how == 5 and "\n" not in body:
        return f"if True: {body}\n"
    return f"{body}\n"


@st.composite
def programs(draw: st.DrawFn) -> str:
    chance = random.Random(draw(st.integers(0, 2**32)))
    parts = [draw(st.sampled_from(IMPORTS)), draw(st.sampled_from(APEX))]
    if draw(st.booleans()):
        parts.insert(0, '#!/usr/bin/env python\n"""About cuda, apex and nccl."""\nfrom __future__ import annotations\n')
    for body in draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8)):
        how = draw(st.integers(0, 5))
        if how == 2 and "import" in body and "def " in body:
            how = 0
        parts.append(laid_out(body, how, chance))
    text = "\n".join(parts) + draw(st.sampled_from(("", "\n", "\n\n# end, on cuda")))
    return text.replace("\n", "\r\n") if draw(st.booleans()) else text


def check(text: str) -> None:
    ported = port_text(text).text
    assert record(ported) == record(text), ported
    assert port_text(ported).text == ported
    assert leftovers(ported.replace("\r\n", "\n")) == []
    assert spoken(ported.replace("\r\n", "\n")) == spoken(text.replace("\r\n", "\n"))


@settings(max_examples=60, deadline=None)
@given(programs())
def test_ported_programs_mean_the_same(text: str) -> None:
    check(text)


@pytest.mark.thorough
@settings(max_examples=1500, deadline=None)
@given(programs())
def test_many_ported_programs_mean_the_same(text: str) -> None:
    check(text)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_means_the_same(shape: str) -> None:
    check(f"import torch\nfrom apex import amp\n{shape}\n")
