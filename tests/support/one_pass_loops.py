"""Training at O2 and O5 with a small model, in one pass and as torch steps, to compare the two."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import xamp

IN_ONE_PASS, AS_TORCH = "one-pass", "auto"

FORMS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "eps": 1e-4}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "eps": 1e-4}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}),
}


class Loop:
    """A model with an fp32 batch norm among low-precision layers, its optimizer, and what a run leaves.

    Attributes:
        masters: what the optimizer steps, listed before the first step.
        grads: by step, the gradients that a backward left on the model, unscaled in fp64; see :meth:`record`.
    """

    def __init__(
        self, fused: Any, level: str = "O2", form: str = "AdamW", *, norm: bool = True, **options: Any
    ) -> None:
        torch.manual_seed(0)
        parts = [nn.Linear(6, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), nn.Linear(5, 3)]
        self.model: Any = nn.Sequential(*parts)
        kind, own = FORMS[form]
        make: Any = kind
        self.optimizer: Any = make(self.model.parameters(), **own)
        if level == "O2":
            options = {"init_scale": 2.0**10, "growth_interval": 3, **options}
        xamp.initialize(self.model, self.optimizer, level, fused=fused, verbosity=0, **options)
        self.masters = list(xamp.master_params(self.optimizer))
        self.state: Any = self.optimizer._xamp.state
        self.made = 0
        self.norms: list[torch.Tensor] = []
        self.grads: list[list[torch.Tensor | None]] = []

    def loss(self, overflow: bool = False) -> torch.Tensor:
        """Return a loss of new data."""
        draw = torch.Generator().manual_seed(self.made)
        self.made += 1
        x, y = torch.randn(8, 6, generator=draw), torch.randn(8, 3, generator=draw)
        loss: torch.Tensor = nn.functional.mse_loss(self.model(x), y)
        return loss * 1e30 if overflow else loss

    def backward(self, overflow: bool = False, loss_id: int = 0) -> None:
        """Run one backward."""
        with xamp.scale_loss(self.loss(overflow), self.optimizer, loss_id) as scaled:
            scaled.backward()
            scale = xamp.loss_scale(self.optimizer, loss_id)
            params = list(self.model.parameters())
            self.grads.append([None if p.grad is None else p.grad.double() / scale for p in params])

    def iterate(self, overflow: bool = False, micro: int = 1, clip: float | None = None, kind: float = 2.0) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        for _ in range(micro):
            self.backward(overflow)
        if clip is not None:
            self.norms.append(xamp.clip_grad_norm_(self.optimizer, clip, kind))
        self.optimizer.step()

    def run(self, steps: Iterable[int], overflows: Sequence[int] = (), **options: Any) -> Loop:
        """Take steps, of which some overflow."""
        for number in steps:
            self.iterate(number in overflows, **options)
        return self

    def saved(self) -> tuple[Any, Any, Any]:
        """Return copies of the states of model, optimizer and session: torch loads tensors without copying them."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), xamp.state_dict(self.optimizer)))

    def load(self, saved: tuple[Any, Any, Any]) -> None:
        """Load what :meth:`saved` returned."""
        model, optimizer, session = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        xamp.load_state_dict(session, self.optimizer)

    # ---------------------------------------------------------------- what a run leaves

    def weights(self) -> list[torch.Tensor]:
        """The masters and fp32 parameters, then the model's parameters."""
        return [p.detach().clone() for p in (*self.masters, *self.model.parameters())]

    def moments(self) -> dict[tuple[int, str], torch.Tensor]:
        """The optimizer's state."""
        state = self.optimizer.state_dict()["state"]
        return {(number, key): value.clone() for number, each in state.items() for key, value in each.items()}

    def counted(self) -> tuple[Any, ...]:
        """Scales, and counts of steps."""
        stats = xamp.session(self.optimizer).stats
        scales = [float(scaler.scale) for scaler in self.optimizer._xamp.engine.scalers]
        return scales, stats.applied, stats.skipped, xamp.session(self.optimizer).last_step

    def holds(self) -> bool:
        """Whether gradients are held for a step in one pass."""
        return self.state.gradients.held is not None


def assert_near(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], error: float = 2e-6) -> None:
    """Check two lists of numbers; of low precision to one unit in the last place."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        limit = error if a.dtype == torch.float32 else float(torch.finfo(a.dtype).eps)
        torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True)


def assert_alike(found: Loop, wanted: Loop) -> None:
    """Check that two runs ended alike: counts equal, numbers as near as two forms of torch are."""
    assert found.counted() == wanted.counted()
    assert_near(found.weights(), wanted.weights())
    ours, theirs = found.moments(), wanted.moments()
    assert list(ours) == list(theirs)
    assert_near(list(ours.values()), list(theirs.values()))
    for number, tensor in enumerate(found.model.parameters()):
        stepped = found.masters[number].detach()
        assert torch.equal(tensor.detach(), stepped.to(tensor.dtype))
