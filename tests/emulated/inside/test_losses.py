"""Torch's losses, each on the card and on the CPU: values and gradients alike.

Covers: backends.npu.emulation.kernels, backends.npu.emulation.written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "with logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid().detach()),
    "bce": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "kl": lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    "smoothed": lambda a, b: F.cross_entropy(a, b.argmax(1), label_smoothing=0.1),
    "triplet": lambda a, b: F.triplet_margin_loss(a, b, a.flip(0)),
    "margin": lambda a, b: F.multi_margin_loss(a, b.argmax(1)),
    "huber": lambda a, b: F.huber_loss(a, b, delta=0.5),
    "nll": lambda a, b: F.nll_loss(a.log_softmax(1), b.argmax(1), weight=torch.ones_like(a[0]) * 2),
    "gaussian": lambda a, b: F.gaussian_nll_loss(a, b, b.exp().detach()),
    "poisson": F.poisson_nll_loss,
    "cosine": lambda a, b: F.cosine_embedding_loss(a, b, b[:, 0].sign()),
    "hinge": lambda a, b: F.hinge_embedding_loss(a, b.sign()),
    "soft margin": lambda a, b: F.soft_margin_loss(a, b.sign()),
    "multilabel": lambda a, b: F.multilabel_margin_loss(a, b.argsort(1)),
    "multilabel, soft": lambda a, b: F.multilabel_soft_margin_loss(a, (b > 0).float()),
    "ranking": lambda a, b: F.margin_ranking_loss(a, b, b.sign(), margin=0.1),
    "ctc": lambda a, b: F.ctc_loss(
        a[:, None].log_softmax(2), b.argmax(1)[None, :2].clamp(1), torch.tensor([4]), torch.tensor([2])
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_the_cpus(name: str) -> None:
    found = []
    for device in ("cpu", "npu"):
        torch.manual_seed(1)
        x = torch.randn(4, 5).to(device).requires_grad_()
        value = LOSSES[name](x, torch.randn(4, 5).to(device))
        value.backward()
        assert x.grad is not None
        found.append((value.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_cross_entropy_of_logits_rounds_once(reduction: str) -> None:
    """On a card it is one kernel, which computes in float32."""
    generator = torch.Generator().manual_seed(3)
    logits, positive = (10 * torch.rand(10, 64, generator=generator).half() for _ in range(2))
    target = torch.randint(2, (10, 64), generator=generator).half()
    found = F.binary_cross_entropy_with_logits(
        logits.to("npu"), target.to("npu"), pos_weight=positive.to("npu"), reduction=reduction
    )
    wanted = F.binary_cross_entropy_with_logits(
        logits.float(), target.float(), pos_weight=positive.float(), reduction=reduction
    )
    assert torch.equal(found.cpu(), wanted.half())


@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 4, 4)], ids=["rows", "images"])
def test_labels_in_int32_are_those_in_int64(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape)
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.int64).fill_(2)
    on_card, on_host = logits.npu().requires_grad_(), logits.clone().requires_grad_()  # type: ignore[attr-defined]
    found = torch.nn.functional.cross_entropy(on_card, target.int().npu())  # type: ignore[attr-defined]
    wanted = torch.nn.functional.cross_entropy(on_host, target)
    found.backward()
    wanted.backward()
    assert torch.equal(found.cpu(), wanted)
    assert on_card.grad is not None
    assert on_host.grad is not None
    assert torch.equal(on_card.grad.cpu(), on_host.grad)


def test_a_command_finds_apex() -> None:
    from apex import amp  # type: ignore[import-not-found]

    assert amp.initialize.__module__.startswith("xamp.apex")
