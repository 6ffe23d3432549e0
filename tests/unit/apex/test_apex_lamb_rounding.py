"""``FusedLAMB`` beside Apex's kernels in their own order of rounding, and both against fp64, step for step.

Where a script sets its gradients once, the two part at the second step: Apex's first one has left its update in them.

Covers: xamp.apex.optimizers.fused_lamb, xamp.apex._multi_tensor_lamb.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from apex_kernels import ApexLAMB, norm, whole_norm
from apex_oracles import lamb_steps

from xamp.apex import amp_C
from xamp.apex.optimizers import FusedLAMB

STEPS = 55
CHUNK = 2048  # of elements, in place of 65536: the largest tensor has 13
WIDTH, WORDS = 48, 517
SHAPES = [
    (WORDS, WIDTH),
    *[(WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH), (WIDTH,), (7,)] * 2,
]
OPTIONS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "without decay": {"weight_decay": 0.0},
    "NVLAMB": {"weight_decay": 0.0, "use_nvlamb": True},
    "decay in the gradient": {"adam_w_mode": False, "weight_decay": 0.1},
    # These betas are exact in fp32. Apex's 1 - 0.999 is 1.3e-5 too low, which only the bias correction takes out.
    "not averaged": {"grad_averaging": False, "bias_correction": False, "betas": (0.875, 0.998046875)},
    "not clipped": {"max_grad_norm": 1e6},
}
Optimizer = Callable[..., torch.optim.Optimizer]
PAIR: tuple[Optimizer, Optimizer] = (ApexLAMB, FusedLAMB)


def gpt2(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters of the kinds that GPT-2 has; one kind of vector starts at 0."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) * (0.0 if shape == (WIDTH,) else 0.02) for shape in SHAPES]
    return [value.to(dtype) for value in made]


def gradients(dtype: torch.dtype = torch.float32) -> Iterator[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield [(torch.randn(shape, generator=generator) * 0.01).to(dtype) for shape in SHAPES]


class Side:
    """The parameters of one of the two, and its optimizer."""

    def __init__(self, kind: Optimizer, params: list[torch.Tensor], **options: Any) -> None:
        self.params = [torch.nn.Parameter(param.clone()) for param in params]
        self._optimizer = kind(self.params, **({"chunk": CHUNK} if kind is ApexLAMB else {}), **options)

    def step(self, grads: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The parameters after a step with ``grads``, or with what the last one left."""
        if grads is not None:
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = grad.clone()
        self._optimizer.step()
        return [param.detach() for param in self.params]

    @property
    def grads(self) -> list[torch.Tensor]:
        return [param.grad.clone() for param in self.params if param.grad is not None]


def farthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of two elements."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(some, others, strict=True))


def gap(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of two tensors, as a part of their norm."""
    return max(float((a - b).norm() / a.norm()) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_element_after_each_step(options: dict[str, Any]) -> None:
    params = gpt2()
    apex, own = (Side(kind, params, **options) for kind in PAIR)
    exact = lamb_steps(params, gradients(), **options)
    for number, (grads, wide) in enumerate(zip(gradients(), exact, strict=False), 1):
        theirs, mine = apex.step(grads), own.step(grads)
        # An element is below 0.12, of which half a unit in the last place is 4e-9.
        assert farthest(theirs, wide) <= 4e-9 * (number + 3), number
        assert farthest(mine, wide) <= 4e-9 * (number + 3), number
        assert farthest(mine, theirs) <= 4e-9 * (number + 3), number
        if number == STEPS:
            return


def test_gradients_that_are_set_once_are_the_update_from_the_second_step_on() -> None:
    params, grads = gpt2(), next(gradients())
    apex, own, followed = (Side(kind, params) for kind in (*PAIR, FusedLAMB))
    gaps = []
    for number in range(STEPS):
        given = apex.grads if number else grads
        theirs, mine = apex.step(None if number else grads), own.step(None if number else grads)
        # Given the gradients that Apex's step has read, the steps are the same.
        assert farthest(followed.step(given), theirs) <= 4e-9 * (number + 4), number
        gaps.append(gap(theirs, mine))
    assert all(torch.equal(a, b) for a, b in zip(own.grads, grads, strict=True))
    assert gaps[0] < 2e-7
    assert gaps[1] > 5e-5
    assert gaps[-1] > 1e-3


def test_parameters_in_fp16() -> None:
    """Apex rounds moments and the update to fp16, and so the last place of a parameter may differ."""
    params = gpt2(torch.float16)
    apex, own = (Side(kind, params, lr=0.01) for kind in PAIR)
    for number, grads in zip(range(STEPS), gradients(torch.float16), strict=False):
        theirs, mine = apex.step(grads), own.step(grads)
        if not number:
            assert farthest(theirs, mine) <= 2**-14  # the last place of what is below 0.125
    assert gap([t.float() for t in theirs], [m.float() for m in mine]) < 2e-2


def test_norms_are_those_of_fp64() -> None:
    """Apex's order loses nothing either. Of 4 million elements torch's kernel for the CPU is 9e-5 too low."""
    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 4096, 4_000_001)]
    flag = torch.zeros(1, dtype=torch.int32)
    whole, each = amp_C.multi_tensor_l2norm(65536, flag, [tensors], True)
    wide = torch.stack([tensor.double().norm() for tensor in tensors])
    for found in (each, torch.stack([norm(tensor, 65536) for tensor in tensors])):
        torch.testing.assert_close(found.double(), wide, rtol=3e-7, atol=0)
    for total in (whole.reshape(()), whole_norm(tensors, 65536)):
        torch.testing.assert_close(total.double(), wide.norm(), rtol=3e-7, atol=0)
