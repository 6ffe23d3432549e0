"""Optimizers of ``xamp.apex`` where parameters and gradients are in a storage format of torch_npu's own.

Its operators on lists refuse such a format. The reference is the same training with all in the usual format.

Covers: xamp.apex.optimizers, backends.npu.torch_npu_features.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.apex import optimizers
from xamp.registry import registry

NPU = torch.device("npu", 0)
torch_npu: Any = sys.modules["torch_npu"]
ND, FRACTAL_NZ = 2, 29

MAKERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(optimizers, name) for name in optimizers.__all__ if name != "FP16_Optimizer"},
    "FusedAdam, capturable": functools.partial(optimizers.FusedAdam, capturable=True),
    "FusedAdam, no AdamW": functools.partial(optimizers.FusedAdam, adam_w_mode=False, weight_decay=0.1),
    "FusedSGD, nesterov": functools.partial(optimizers.FusedSGD, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def _formats_allowed() -> Iterator[None]:
    before = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "enable"})
    yield
    torch_npu._C._npu_setOption({"ALLOW_INTERNAL_FORMAT": "disable" if before == b"disable" else "enable"})


def cast(tensor: torch.Tensor, form: int) -> torch.Tensor:
    made: torch.Tensor = torch.ops.npu.npu_format_cast(tensor, form)
    assert torch.ops.npu.get_npu_format(made) == form
    return made


def train(make: Callable[..., Any], level: str, forms: tuple[int, int, int]) -> list[torch.Tensor]:
    """Train three steps; ``forms`` are the formats of the weight and its gradient before each."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32).to(NPU)
    small = [name for name in ("eps", "e") if name in inspect.signature(make).parameters] if level == "O3" else []
    optimizer = make(model.parameters(), lr=0.01, **dict.fromkeys(small, 1e-4))
    xamp.initialize(model, optimizer, level, verbosity=0)
    for step, form in enumerate(forms):
        model.weight.data = cast(model.weight.data, form)
        optimizer.zero_grad()
        loss = model(torch.full((4, 32), 0.1 * (step + 1), device=NPU)).float().square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        for param in xamp.master_params(optimizer):
            if param.dim() == 2 and param.grad is not None:
                param.grad = cast(param.grad, form)
        optimizer.step()
    return [cast(p.detach(), ND).cpu() for p in (*xamp.master_params(optimizer), *model.parameters())]


@pytest.mark.parametrize("level", registry.resolve("npu", "npu").capabilities(NPU).levels)
@pytest.mark.parametrize("name", MAKERS)
def test_they_train_as_in_the_usual_format(name: str, level: str) -> None:
    """Also where the format is another one in each step."""
    wanted = train(MAKERS[name], level, (ND, ND, ND))
    for forms in ((FRACTAL_NZ, FRACTAL_NZ, FRACTAL_NZ), (ND, FRACTAL_NZ, ND)):
        found = train(MAKERS[name], level, forms)
        for each, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, other, rtol=0, atol=0)
