"""Scripts for Ascend cards on a CPU: the names of torch_npu, and its modules against independent references.

Covers: xamp.run.ascend, xamp.run.ascend_modules.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from xamp.run.redirect import redirected
from xamp.run.report import Report


@pytest.fixture
def on_cpu() -> Iterator[Report]:
    with redirected("cpu") as report:
        yield report


def _npu(tensor: Any) -> Any:
    return tensor.npu()


def test_a_script_as_they_are_written(on_cpu: Report) -> None:
    import torch.npu  # type: ignore[import-not-found]
    import torch_npu
    from torch_npu.contrib import transfer_to_npu  # noqa: F401
    from torch_npu.npu import amp

    torch_npu.npu.set_compile_mode(jit_compile=False)
    torch.npu.config.allow_internal_format = False
    torch.npu.set_device("npu:0")
    device = torch.device(f"npu:{0}")
    assert isinstance(device, torch.device)
    assert torch.device("cpu") == device == torch.device("npu", 1)
    weight = torch.ones(2, device=device, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), amp.GradScaler(init_scale=4.0, dynamic=False)
    for _ in range(2):
        with amp.autocast():
            product = torch.mm(weight.view(1, 2), _npu(torch.ones(2, 1)))
        assert product.dtype == torch.float16
        optimizer.zero_grad()
        scaler.scale(product.sum().float()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
    assert weight.tolist() == [-1.0, -1.0]
    assert not torch.npu.is_available()
    torch.npu.synchronize()
    assert isinstance(torch.npu.FloatTensor([1.0]), torch.Tensor)


def test_the_optimizers_of_torch_npu_have_a_module_each(on_cpu: Report) -> None:
    from torch_npu import optim
    from torch_npu.optim.npu_fused_sgd import NpuFusedSGD

    assert NpuFusedSGD is optim.NpuFusedSGD
    weight = torch.ones(2, requires_grad=True)
    optimizer = NpuFusedSGD([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    with pytest.raises(AttributeError, match=r"torch_npu\.optim\.npu_fused_sgd\.Other: "):
        sys.modules["torch_npu.optim.npu_fused_sgd"].Other  # noqa: B018


def test_a_name_that_has_no_stand_in_says_so(on_cpu: Report) -> None:
    import torch_npu

    with pytest.raises(AttributeError, match=r"torch_npu\.npu_scaled_masked_softmax: .*no Ascend card"):
        torch_npu.npu_scaled_masked_softmax(torch.ones(1))


def test_after_the_block_torch_knows_no_npu() -> None:
    with redirected("cpu"):
        import torch_npu
    assert not hasattr(torch, "npu")
    with pytest.raises(ModuleNotFoundError):
        import torch_npu  # noqa: F401
    with pytest.raises(RuntimeError):
        torch.device("npu:0")


def _contrib() -> Any:
    import torch_npu

    return torch_npu.contrib.module


def test_label_smoothing(on_cpu: Report) -> None:
    logits, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    loss = _contrib().LabelSmoothingCrossEntropy(5, 0.1)(logits, target.int())
    wanted = torch.full((4, 5), 0.1 / 4, dtype=torch.double).scatter_(1, target.view(-1, 1), 0.9)
    assert torch.allclose(loss.double(), functional.cross_entropy(logits.double(), wanted), atol=1e-6)


def test_operators_of_losses(on_cpu: Report) -> None:
    import torch_npu

    logits, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 2], dtype=torch.int32)
    smooth = torch_npu.npu_one_hot(target, -1, 5, 0.9, 0.025)
    assert smooth.sum(1).tolist() == pytest.approx([1.0] * 4)
    assert smooth.argmax(1).tolist() == target.tolist()
    losses = torch_npu.npu_softmax_cross_entropy_with_logits(logits.half(), smooth)
    wanted = functional.cross_entropy(logits.half().double(), smooth.double(), reduction="none")
    assert losses.dtype == torch.float16
    assert torch.allclose(losses.double(), wanted, atol=2e-3)
    spelled: Any = torch
    assert spelled.npu_one_hot is torch_npu.npu_one_hot
    assert torch_npu.npu_transpose(torch.ones(2, 3, 4), (2, 0, 1)).shape == (4, 2, 3)


def test_labels_in_int32_are_taken_as_on_a_card(on_cpu: Report) -> None:
    import torch_npu  # noqa: F401

    logits, target = torch.randn(4, 5), torch.tensor([0, 4, 2, 2])
    assert torch.equal(torch.nn.CrossEntropyLoss()(logits, target.int()), functional.cross_entropy(logits, target))
    assert torch.equal(functional.nll_loss(logits, target.int()), functional.nll_loss(logits, target))


def test_channel_shuffle(on_cpu: Report) -> None:
    x1, x2 = torch.arange(2.0).view(1, 2, 1), torch.arange(2.0, 4.0).view(1, 2, 1)
    assert _contrib().ChannelShuffle(4, split_shuffle=False)(x1, x2).flatten().tolist() == [0.0, 2.0, 1.0, 3.0]
    first, second = _contrib().ChannelShuffle(4)(x1, x2)
    assert (first.flatten().tolist(), second.flatten().tolist()) == ([0.0, 2.0], [1.0, 3.0])


def test_drop_path_keeps_the_mean(on_cpu: Report) -> None:
    torch.manual_seed(0)
    drop = _contrib().NpuDropPath(0.25)
    found = drop(torch.ones(4000, 2, 2))
    assert {round(float(value), 4) for value in found.unique()} == {0.0, 1.3333}
    assert torch.equal(found[:, 0, 0], found[:, 1, 1])
    assert abs(float(found.mean()) - 1) < 0.05
    assert torch.equal(drop.eval()(torch.ones(3)), torch.ones(3))


def test_bilstm_is_a_bidirectional_lstm(on_cpu: Report) -> None:
    made, wanted = _contrib().BiLSTM(3, 2), torch.nn.LSTM(3, 2, bidirectional=True)
    names = dict(wanted.named_parameters())
    for name, value in made.fw_rnn.named_parameters():
        names[name].data.copy_(value)
    for name, value in made.bw_rnn.named_parameters():
        names[f"{name}_reverse"].data.copy_(value)
    x = torch.randn(4, 2, 3)
    assert torch.allclose(made(x), wanted(x)[0], atol=1e-6)


def test_focus_takes_quarters(on_cpu: Report) -> None:
    focus = _contrib().Focus(1, 4, act=False).eval()
    torch.nn.init.dirac_(focus.conv.conv.weight)
    image = torch.arange(16.0).view(1, 1, 4, 4)
    found = focus(image)
    wanted = torch.stack([image[0, 0, row::2, column::2] for column in (0, 1) for row in (0, 1)])
    assert torch.allclose(found[0], wanted / (1 + 1e-5) ** 0.5)


def test_the_prefetcher_gives_every_batch(on_cpu: Report) -> None:
    batches = [(torch.full((1,), float(i)), torch.tensor([i])) for i in range(3)]
    prefetcher, seen = _contrib().Prefetcher(batches), []
    x, y = prefetcher.next()
    while x is not None:
        seen.append((float(x), int(y)))
        x, y = prefetcher.next()
    assert seen == [(0.0, 0), (1.0, 1), (2.0, 2)]
