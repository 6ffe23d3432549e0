"""The closure of a step.

Covers: xamp.torch_compat.closures.
"""

from __future__ import annotations

import torch

from xamp.torch_compat.closures import loss_of


def test_a_closure_runs_its_backward_where_gradients_are_off() -> None:
    weight = torch.tensor([3.0], requires_grad=True)

    def closure() -> torch.Tensor:
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert loss_of(closure).item() == 9.0
        assert not torch.is_grad_enabled()
    assert weight.grad is not None
    assert weight.grad.item() == 6.0


def test_without_a_closure_there_is_no_loss() -> None:
    assert loss_of(None) is None
