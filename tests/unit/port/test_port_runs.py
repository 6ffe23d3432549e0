"""Scripts that died after a port, or in which a part had no effect, are ported and run on the CPU.

Covers: xamp.port.rules.clipping, xamp.port.rules.defaults.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from gathering import cases
from ported_run import run

pytest.importorskip("libcst")  # the extra xamp[port]

from xamp.port.engine import port_text
from xamp.port.rule import Grade

CLIPPED = """
import json
import torch
from apex import amp
torch.manual_seed(0)
m = torch.nn.Linear(4, 2).cuda()
opt = torch.optim.SGD(m.parameters(), lr=0.1)
m, opt = amp.initialize(m, opt, opt_level="O2", loss_scale=128.0, verbosity=0)
for _ in range(3):
    opt.zero_grad()
    loss = m(torch.ones(3, 4).cuda()).float().pow(2).sum()
    with amp.scale_loss(loss, opt) as scaled:
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
    opt.step()
print(json.dumps([p.tolist() for p in amp.master_params(opt)]))
"""
BY_HAND = """
import json
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 2)
masters = [p.detach().clone() for p in m.parameters()]
m.half()
for _ in range(3):
    m.zero_grad()
    loss = m(torch.ones(3, 4).half()).float().pow(2).sum()
    (loss * 128.0).backward()
    grads = [p.grad.double() / 128.0 for p in m.parameters()]
    norm = sum(g.pow(2).sum() for g in grads).sqrt()
    for p, master, g in zip(m.parameters(), masters, grads):
        master -= (0.1 * g * min(1.0, 0.5 / (norm.item() + 1e-6))).float()
        p.data.copy_(master)
print(json.dumps([p.tolist() for p in masters]))
"""
PARALLEL = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("nccl", init_method="file://STORE", rank=0, world_size=1)
torch.cuda.set_device(0)
m = torch.nn.Linear(2, 2).cuda()
for each in (DDP(m, device_ids=[0], output_device=0), DDP(m, [torch.cuda.current_device()], 0)):
    each(torch.ones(1, 2).cuda()).sum().backward()
dist.destroy_process_group()
print("trained")
"""
DEFAULTS = """
import torch
torch.set_default_tensor_type(torch.cuda.HalfTensor)
print(torch.zeros(2).dtype)
torch.set_default_tensor_type("torch.cuda.FloatTensor" if torch.cuda.is_available() else "torch.DoubleTensor")
print(torch.zeros(2).dtype)
torch.set_default_tensor_type(torch.FloatTensor)
print(torch.zeros(2).dtype)
with torch.random.fork_rng(devices=[torch.cuda.current_device()]):
    a = torch.rand(3).cuda()
print(torch.equal(a, torch.rand(3).cuda()))
x = torch.ones(1, 2, 2, 2).cuda().to(memory_format=torch.channels_last)
print(x.is_contiguous(memory_format=torch.channels_last))
"""


def test_gradients_are_clipped_where_the_optimizer_steps_on_masters() -> None:
    ported = port_text(CLIPPED)
    assert "clip_grad_norm_(xamp.master_params(opt), 0.5)" in ported.text
    found, wanted = json.loads(run(ported.text)[-1]), json.loads(run(BY_HAND)[-1])
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=1e-6) if not isinstance(one[0], list) else True
        for row, same in zip(one, other, strict=True):
            assert row == pytest.approx(same, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("if fp16:\n    SCALE\nelse:\n    loss.backward()\nCLIP", "MASTERS"),
        ("if fp16:\n    SCALE\n    torch.nn.utils.clip_grad_norm_(amp.master_params(o), 1)\nelse:\n    CLIP", "CLIP"),
        (
            "SCALE\nfrom torch.nn.utils import clip_grad_norm_ as c\nc(self.model.parameters(), 1)",
            "xamp.master_params(o)",
        ),
        ("SCALE\nfor p in m.parameters():\n    p.grad.clamp_(-1, 1)", "p.grad.clamp_(-1, 1)"),
    ],
)
def test_which_gradients_are_clipped(body: str, wanted: str) -> None:
    scale = "with amp.scale_loss(loss, o) as s: s.backward()"
    clip = "torch.nn.utils.clip_grad_norm_(m.parameters(), 1)"
    body = body.replace("SCALE", scale).replace("CLIP", clip)
    text = port_text(
        f"import torch\nfrom apex import amp\nm, o = amp.initialize(m, o, opt_level=args.l)\n{body}\n"
    ).text
    assert (
        wanted.replace("MASTERS", "torch.nn.utils.clip_grad_norm_(xamp.master_params(o), 1)").replace("CLIP", clip)
        in text
    )


def test_levels_without_masters_clip_as_before() -> None:
    text = CLIPPED.replace('"O2"', '"O1"')
    assert "clip_grad_norm_(m.parameters(), 0.5)" in port_text(text).text


def test_clipping_that_cannot_be_told_is_noted() -> None:
    text = "import torch\nfrom apex import amp\nm, o = amp.initialize(m, o, opt_level='O2')\n\n\ndef clip(m):\n    "
    for clip in ("clip_grad_norm_(m.parameters(), 1)", "clip_grad_value_(list(m.parameters()), 1)"):
        ported = port_text(f"{text}torch.nn.utils.{clip}\n")
        assert [each.grade for each in ported.findings if each.rule == "clip-masters"] == [Grade.NOTED]
    ported = port_text(f"{text}all = list(m.parameters())\n    torch.nn.utils.clip_grad_norm_(all, 1)\n")
    assert [each.line for each in ported.findings if each.rule == "clip-masters"] == [8]


TWO = "import torch\nfrom apex import amp\n[g, d], [og, od] = amp.initialize([g, d], [og, od], opt_level='O2')\n"
SCALES = {each: f"with amp.scale_loss(l, {each}) as s: s.backward()\n" for each in ("og", "od")}


def clips(text: str) -> list[str]:
    """What the calls of a ported text clip."""
    return re.findall(r"clip_grad_norm_\((.*), 1\)", port_text(text).text)


def test_of_two_optimizers_the_one_that_scaled_and_did_not_step_is_clipped() -> None:
    clip = "torch.nn.utils.clip_grad_norm_({}.parameters(), 1)\n"
    g, d = clip.format("g"), clip.format("d")
    by_turns = f"{TWO}{SCALES['og']}{g}og.step()\n{SCALES['od']}{d}od.step()\n"
    assert clips(by_turns) == ["xamp.master_params(og)", "xamp.master_params(od)"]
    together = f"{TWO}{SCALES['og']}{SCALES['od']}{g}{d}og.step()\nod.step()\n"
    assert clips(together) == ["g.parameters()", "d.parameters()"]
    crossed = f"{TWO}{SCALES['og']}{d}"
    assert clips(crossed) == ["d.parameters()"]
    one_of_both = TWO.replace("[og, od]", "o") + SCALES["og"].replace("og", "o") + g + d
    assert clips(one_of_both) == ["g.parameters()", "d.parameters()"]
    part = f"import torch\nfrom apex import amp\ng, og = amp.initialize(g, og, opt_level='O2')\n{SCALES['og']}"
    assert clips(f"{part}{clip.format('g.head')}{clip.format('g.module')}") == [
        "g.head.parameters()",
        "xamp.master_params(og)",
    ]


DEFAULT_TYPES = (
    "import torch.cuda as c\ntorch.set_default_tensor_type(c.FloatTensor)",
    "t = {'gpu': torch.cuda.FloatTensor}\ntorch.set_default_tensor_type(t[d])",
    "def f(t='torch.cuda.FloatTensor'):\n    torch.set_default_tensor_type(t)",
    "torch.set_default_tensor_type(args.type)",
    "torch.set_default_tensor_type(f'torch.cuda.{name}Tensor')",
)
PLAIN_TYPES = ("torch.FloatTensor", "'torch.DoubleTensor'", "torch.FloatTensor if a else torch.DoubleTensor")


def test_a_default_type_of_which_the_file_does_not_tell_is_set_by_xamp() -> None:
    with cases() as case:
        for text in DEFAULT_TYPES:
            with case(text):
                after = port_text(f"import torch\n{text}\n").text
                assert "xamp.accel.set_default_tensor_type(" in after
                assert "torch.set_default" not in after
        for value in PLAIN_TYPES:
            with case(value):
                text = f"import torch\ntorch.set_default_tensor_type({value})\n"
                assert port_text(text).text == text


IDS = (
    ("[r] if many else [0]", "([r] if many else [0]) if xamp.is_available() else None"),
    ("([r] if many else [0])", "([r] if many else [0]) if xamp.is_available() else None"),
    ("[r] if use_cuda else None", "[r] if use_cuda else None"),
)


def test_device_ids_are_given_where_there_is_an_accelerator() -> None:
    with cases() as case:
        for name in ("torch.nn.parallel.DistributedDataParallel", "MMDistributedDataParallel"):
            for before, after in IDS:
                with case(f"{name} {before}"):
                    text = port_text(f"import torch\nm = {name}(m, device_ids={before})\n").text
                    assert text.endswith(f"device_ids={after})\n")


def test_random_states_are_forked_by_xamp_in_a_file_without_a_word_of_cuda() -> None:
    text = "from torch import random\nwith random.fork_rng(devices=[0]):\n    pass\n"
    assert "with xamp.accel.random.fork_rng(devices=[0]):" in port_text(text).text


def test_a_parallel_model_runs_on_a_cpu(tmp_path: Path) -> None:
    text = port_text(PARALLEL.replace("STORE", str(tmp_path / "store"))).text
    assert run(text) == ["trained"]


def test_defaults_states_and_formats_are_those_of_the_device() -> None:
    assert run(port_text(DEFAULTS).text) == ["torch.float16", "torch.float64", "torch.float32", "True", "True"]
