"""A model that runs many operators of the op table, and the dtypes that a region must give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

import xamp
from xamp.casting import recompute
from xamp.policy import LEVELS, levels_where

torch.set_num_threads(1)  # a second thread slows kernels this small

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOWER: dict[str, torch.dtype] = {
    level: getattr(torch, str(LEVELS[level].dtype)) for level in levels_where(lambda row: row.casts_operators)
}


def start(model: Any, level: str = "O4", op_policy: str = "portable", **options: Any) -> Any:
    """``model`` in a session on the CPU."""
    return xamp.initialize(model, level=level, op_policy=op_policy, backend="cpu", verbosity=0, **options)


def region(level: str = "O4", op_policy: str = "portable") -> Any:
    """A new region of a session that is used for nothing else."""
    return xamp.session(start(nn.Linear(1, 1), level, op_policy)).autocast()


class Calls(nn.Module):
    """Calls its argument in its forward."""

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


class Many(nn.Module):
    """Rows of 8 numbers through operators of every rule, most of which a CPU's own list lacks.

    Attributes:
        dtypes: the dtypes of each operator's results, by name, one entry for each run, recomputations included.
    """

    def __init__(self, checkpoints: tuple[bool, ...] = (), *, noting: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.cell = nn.GRUCell(8, 8)
        self.last = nn.Linear(8, 8)
        self.checkpoints = checkpoints
        self.noting = noting
        self.dtypes: dict[str, list[torch.dtype]] = {}

    def note(self, **made: torch.Tensor) -> Any:
        if self.noting:
            for name, tensor in made.items():
                self.dtypes.setdefault(name, []).append(tensor.dtype)
        return next(iter(made.values()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        lower = self.note(linear=self.first(x))
        weights = self.note(softmax=F.softmax(lower, -1))
        normed = self.note(layer_norm=self.norm(lower))
        product = self.note(einsum=torch.einsum("bi,bj->ij", normed, weights))
        grown = self.note(exp=torch.exp(self.note(mv=torch.mv(product, product[0]))))
        state = self.note(gru_cell=self.cell(lower))
        mixed = self.note(addcmul=torch.addcmul(lower, state, weights))
        total = self.note(sum=lower.sum(-1, keepdim=True))
        powers = self.note(pow=torch.pow(mixed.abs() + 1.0, 1.5))
        return self.note(last=self.last(powers + total + grown))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run: Callable[..., Any] = self.body
        for reentrant in self.checkpoints:
            run = _checkpointed(run, reentrant)
        made: torch.Tensor = run(x * 1.0)
        return made


def _checkpointed(run: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return lambda x: checkpoint(run, x, use_reentrant=reentrant)


CHECKPOINTING = ["torch's", "another's"]


def checkpointing(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch's checkpointing as xamp patched it; or remove the patch, so that it is like another library's."""
    recompute.watch()
    if whose == "another's":
        module, reentrant = torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction
        name = "_checkpoint_without_reentrant_generator"
        known: Any = getattr(module, f"{name}_impl", None) or getattr(module, name)
        monkeypatch.setattr(module, known.__name__, known.__wrapped__)
        forward: Any = reentrant.forward
        monkeypatch.setattr(reentrant, "forward", staticmethod(forward.__wrapped__))


def many(checkpoints: tuple[bool, ...] = (), *, noting: bool = True) -> Many:
    """A :class:`Many`, with the same weights each time."""
    torch.manual_seed(1)
    return Many(checkpoints, noting=noting)


def batch() -> torch.Tensor:
    """The same (4, 8) numbers each time, which require a gradient."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()


def promised(level: str = "O4") -> dict[str, set[torch.dtype]]:
    """The dtypes that :class:`Many` must record under the portable policy."""
    raised = ("softmax", "layer_norm", "exp", "addcmul", "sum", "pow")
    lowered = ("linear", "einsum", "mv", "gru_cell", "last")
    return {name: {FP32} for name in raised} | {name: {LOWER[level]} for name in lowered}


def noted(model: Many) -> dict[str, set[torch.dtype]]:
    return {name: set(found) for name, found in model.dtypes.items()}


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the parameters and of ``x``; checks that all exist and are finite."""
    found = [p.grad for p in model.parameters()] + [x.grad]
    assert all(g is not None and bool(g.isfinite().all()) for g in found)
    return [g for g in found if g is not None]


def assert_equal(mine: Any, others: Any) -> None:
    """Check that the tensors are equal, bit for bit and in dtype."""
    for a, b in zip(mine, others, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
