"""What reviewers found in the rest of Apex: labels that are no class, clipping, copies of wrappers, two installs."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xamp.apex
from xamp.apex import _install, amp
from xamp.apex._modules import LEFT_OUT
from xamp.apex.contrib import xentropy
from xamp.apex.contrib.optimizers import FP16_Optimizer
from xamp.apex.optimizers import FusedLAMB
from xamp.apex.parallel import LARC

cross_entropy: Any = xentropy.SoftmaxCrossEntropyLoss.apply


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("padding", [-100, -1, 0, 7])
def test_a_padding_label_need_not_be_a_class(padding: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.tensor([1, padding, 4, 2, padding, 3])
    losses = cross_entropy(logits, labels, smoothing, padding)
    weight = torch.arange(1.0, 7.0, dtype=torch.float64)
    (losses * weight).sum().backward()

    twin = logits.detach().clone().requires_grad_()
    wanted = nn.functional.cross_entropy(
        twin, labels, reduction="none", ignore_index=padding, label_smoothing=smoothing
    )
    (wanted * weight).sum().backward()
    assert torch.allclose(losses, wanted, rtol=1e-12, atol=1e-14)
    assert logits.grad is not None
    assert twin.grad is not None
    assert torch.allclose(logits.grad, twin.grad, rtol=1e-12, atol=1e-14)


def test_padded_rows_that_are_not_finite_give_zeros() -> None:
    logits = torch.tensor([[0.5, 1.0], [float("inf"), 0.0]], requires_grad=True)
    losses = cross_entropy(logits, torch.tensor([1, -1], dtype=torch.int32), 0.0, -1)
    losses.sum().backward()
    assert losses[1] == 0
    assert logits.grad is not None
    assert logits.grad[1].tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(logits.grad).all())


def _two_groups(seed: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(3, 4, generator=generator).to(dtype)], [torch.randn(5, generator=generator).to(dtype)]]


def test_lamb_under_the_older_fp16_optimizer_clips_once() -> None:
    """The reference: FusedLAMB itself over fp32 parameters with the same gradients, whose norm is far above 1."""
    halves = [[nn.Parameter(p) for p in group] for group in _two_groups(0, torch.float16)]
    singles = [[nn.Parameter(p.detach().float()) for p in group] for group in halves]
    wrapped = FP16_Optimizer(
        FusedLAMB([{"params": group} for group in halves], lr=0.125, max_grad_norm=1.0), static_loss_scale=8.0
    )
    plain = FusedLAMB([{"params": group} for group in singles], lr=0.125, max_grad_norm=1.0)
    for step in range(3):
        grads = [[16.0 * g for g in group] for group in _two_groups(step + 1, torch.float16)]
        for params, given, twins in zip(halves, grads, singles, strict=True):
            for param, grad, twin in zip(params, given, twins, strict=True):
                param.grad, twin.grad = grad.clone(), grad.float() / 8.0
        wrapped.step()
        plain.step()
        for masters, twins in zip(wrapped.fp32_groups, singles, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(masters, twins, strict=True)), step


@pytest.fixture
def nothing_installed() -> Iterator[None]:
    yield
    while _install.is_installed():
        xamp.apex.uninstall()


@pytest.mark.parametrize("name", [name for name in LEFT_OUT if name.count(".") < 3])
def test_find_spec_says_that_what_is_left_out_is_not_there(name: str, nothing_installed: None) -> None:
    xamp.apex.install("xamp")
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ImportError, match=f"{name} is not part of xamp: "):
        importlib.import_module(name)
    assert importlib.util.find_spec("apex.amp") is not None
    assert importlib.util.find_spec("apex.contrib.xentropy") is not None


def _real(folder: Path) -> None:
    (folder / "apex" / "amp").mkdir(parents=True)
    (folder / "apex" / "__init__.py").write_text("WHO = 'real'\n")
    (folder / "apex" / "amp" / "__init__.py").write_text("WHO = 'real'\n")


def _who() -> str:
    found: Any = importlib.import_module("apex.amp")
    return "real" if getattr(found, "WHO", "") == "real" else "xamp"


def test_a_second_install_that_asks_for_xamp_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_installed: None
) -> None:
    _real(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    xamp.apex.install()
    assert _who() == "real"
    before = sys.modules["apex.amp"]
    xamp.apex.install("xamp")
    assert _who() == "xamp"
    xamp.apex.install()  # the default takes nothing from who asked for xamp
    assert _who() == "xamp"
    xamp.apex.uninstall()
    assert _who() == "xamp"
    xamp.apex.uninstall()
    assert _who() == "real"
    assert sys.modules["apex.amp"] is before
    xamp.apex.uninstall()
    assert not _install.is_installed()
    assert sys.modules["apex.amp"] is before
    for name in ("apex", "apex.amp"):
        del sys.modules[name]


def _step(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.ones(2, 3)).float().square().sum().backward()
    optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_larc_have_their_settings_and_step_their_own(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    larc = LARC(torch.optim.SGD(model.parameters(), 0.25, momentum=0.5), trust_coefficient=0.5, clip=False, eps=1e-4)
    _step(model, larc)
    pair: Any = [model, larc]
    other, again = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    assert (again.trust_coefficient, again.clip, again.eps) == (0.5, False, 1e-4)
    start = [p.detach().clone() for p in model.parameters()]
    moved = _step(other, again)
    assert all(map(torch.equal, start, [p.detach() for p in model.parameters()])), "the original stays"
    assert all(map(torch.equal, moved, _step(model, larc)))


def test_a_copy_of_a_managed_larc_is_one() -> None:
    model = nn.Linear(3, 2)
    _, larc = amp.initialize(
        model, LARC(torch.optim.SGD(model.parameters(), 0.25), clip=False), opt_level="O2", verbosity=0
    )
    assert copy.deepcopy(larc).clip is False


def test_copies_of_the_older_fp16_optimizer() -> None:
    model = nn.Linear(3, 2).half()
    wrapped = FP16_Optimizer(torch.optim.SGD(model.parameters(), 0.25), static_loss_scale=4.0)
    again = copy.deepcopy(wrapped)
    assert again.cur_scale == 4.0
    assert again.optimizer is not wrapped.optimizer
    assert again.optimizer.param_groups[0]["params"][0] is again.fp32_groups[0][0]
