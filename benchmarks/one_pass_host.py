"""The host's part of a check and a step in one pass, over torch's fused AdamW, with all kernels replaced by nothing.

Tensors have one element and lie on the CPU, and both sides take turns: what is left is Python and the calls that it
makes. Triton's own launcher is left out with the launches, as torch's operator is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

import xamp
from benchmarks.report import Figure
from xamp.plans import available, lists

COUNTS = (10, 171, 1000)
"""Of tensors: few, GPT-2's, many."""


class _Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return _nothing


def _nothing(*_: Any, **__: Any) -> None: ...


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Replace the kernels of xamp by nothing, on any device."""
    from xamp.onepass import kernels

    with contextlib.ExitStack() as stack:
        for name in kernels.__all__:
            stack.enter_context(mock.patch.object(kernels, name, _Nothing()))
        stack.enter_context(mock.patch.object(available, "_refusal_of", return_value=""))
        stack.enter_context(mock.patch.object(lists, "_on_host", new=True))
        stack.callback(lists._refusal.cache_clear)
        lists._refusal.cache_clear()
        yield


class _Tensors(nn.Module):
    """So many parameters of one element."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        total: torch.Tensor = self.held[0].sum()
        return total


class OurSide:
    """A check and a step at O2 by ``fused="one-pass"``: from the end of the backward on."""

    def __init__(self, count: int) -> None:
        self.model = _Tensors(count)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        xamp.initialize(self.model, self.optimizer, "O2", fused="one-pass", verbosity=0)
        self.params = list(self.model.parameters())
        self.loss = torch.zeros(())

    def seconds(self) -> float:
        """Take one step; return what it took."""
        self.optimizer.zero_grad()
        grads = [torch.ones_like(param) for param in self.params]
        with xamp.scale_loss(self.loss, self.optimizer):
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad
            begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


class StepAlone:
    """A step over fp32 parameters of the optimizer that ``make`` makes: torch's, or ``xamp.apex``'s by the kernels."""

    def __init__(self, count: int, make: Callable[[list[nn.Parameter]], Any]) -> None:
        self.params = [nn.Parameter(torch.ones(1)) for _ in range(count)]
        self.optimizer = make(self.params)

    def seconds(self) -> float:
        """Take one step; return what it took."""
        for param in self.params:
            param.grad = torch.ones_like(param)
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


def host(rounds: int = 60) -> list[Figure]:
    """Measure both sides in turn, for each count of tensors."""
    if importlib.util.find_spec("triton") is None:
        return [Figure("left out: Triton is not installed", 0.0, "ratio")]
    from xamp.apex.optimizers import FusedAdam

    figures = []
    with without_kernels():
        for count in COUNTS:
            theirs = functools.partial(torch.optim.AdamW, fused=True)
            sides = OurSide(count), StepAlone(count, FusedAdam), StepAlone(count, theirs)
            with mock.patch.object(torch, "_fused_adamw_", _nothing):  # not before: xamp tries whether it is right
                pairs = [tuple(side.seconds() for side in sides) for _ in range(rounds)][rounds // 6 :]
            *ours, torchs = (statistics.median(times) for times in zip(*pairs, strict=True))
            for what, took in zip(("check and step", "FusedAdam of xamp.apex"), ours, strict=True):
                name = f"one pass, host, {count} tensors: {what} over torch's fused AdamW"
                detail = f"{took * 1e6:.0f} us : {torchs * 1e6:.0f} us"
                figures.append(Figure(name, took / torchs, "ratio", detail=detail))
    return figures


if __name__ == "__main__":
    for figure in host():
        print(figure.case, f"{figure.value:.2f}", figure.detail)
