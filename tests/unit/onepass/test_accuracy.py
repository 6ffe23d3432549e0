"""How far 200 steps are from fp64, beside those of torch's fused forms or, for Apex's rules, of torch's operators.

Covers: xamp.onepass.kernels.
"""

from __future__ import annotations

from typing import Any

import onepass_fp64
import pytest
import torch
from onepass_cases import states_of

from xamp.apex import amp_C as typed
from xamp.onepass import Plan, Row, Rule

amp_C: Any = typed
STEPS, SIZE = 200, 1024
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
CASES: dict[str, tuple[Rule, dict[str, Any], Any]] = {
    "SGD": (Rule("sgd"), {"lr": 0.01, "weight_decay": 1e-2}, torch.optim.SGD),
    "nesterov": (
        Rule("sgd"), {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}, torch.optim.SGD
    ),
    "Adam": (Rule("adam"), ADAM, torch.optim.Adam),
    "AdamW": (Rule("adam", decoupled=True), ADAM, torch.optim.AdamW),
    "AdamW amsgrad": (Rule("adam", decoupled=True), {**ADAM, "amsgrad": True}, torch.optim.AdamW),
    "Adagrad": (Rule("adagrad"), {"lr": 0.01, "eps": 1e-10, "weight_decay": 1e-2}, torch.optim.Adagrad),
    "LAMB": (Rule("lamb", decoupled=True), ADAM, "lamb"),
    "LAMB, decay in the gradient": (Rule("lamb"), ADAM, "lamb"),
    "NovoGrad": (Rule("novograd", decoupled=True), {**ADAM, "betas": (0.95, 0.98)}, "novograd"),
    "NovoGrad, decay inside": (Rule("novograd"), {**ADAM, "betas": (0.95, 0.98)}, "novograd"),
}  # fmt: skip


class Other:
    """The same steps by who computes in fp32 too: a class of torch.optim, or a function of ``amp_C``."""

    def __init__(self, kind: Any, rule: Rule, group: dict[str, Any], param: torch.Tensor) -> None:
        self.param, self._kind, self._rule, self._group = torch.nn.Parameter(param.clone()), kind, rule, group
        self._states = [torch.zeros_like(param), torch.zeros_like(param)]
        self._norms, self._taken = torch.zeros(1), 0
        self._optimizer = None if isinstance(kind, str) else kind([self.param], **group, fused=True)

    def step(self, grad: torch.Tensor) -> None:
        self._taken += 1
        if self._optimizer is not None:
            self.param.grad = grad.clone()
            self._optimizer.step()
            return
        o, mode = self._group, int(self._rule.decoupled)
        numbers = o["lr"], *o["betas"], o["eps"], self._taken, 1, o["weight_decay"], 1, mode
        lists = [[grad], [self.param.detach()], [self._states[0]]]
        if self._kind == "lamb":
            one = torch.ones(1)
            amp_C.multi_tensor_lamb(0, torch.zeros(1), [*lists, [self._states[1]]], *numbers, one, 1.0)
        else:
            norms = grad.norm().reshape(1) if self._taken == 1 else self._norms  # Apex's class begins so
            self._norms.copy_(norms)
            amp_C.multi_tensor_novograd(0, torch.zeros(1), lists, self._norms, *numbers, 2)


@pytest.mark.parametrize("name", CASES)
def test_steps_are_as_near_to_fp64_as_others_are(name: str) -> None:
    rule, group, kind = CASES[name]
    torch.manual_seed(3)
    start = torch.randn(SIZE)
    row = Row(start.clone(), None, states_of(rule, group, start), torch.zeros(()))
    plan, other = Plan(rule, [row], block=SIZE), Other(kind, rule, group, start)
    right, *held = start.double(), *(state.double() for state in row.states)
    for count in range(1, STEPS + 1):
        grad = torch.randn(SIZE)
        other.step(grad)
        plan.step([grad], [group])
        right, *held = onepass_fp64.stepped(rule, right, held, grad, group, count)
    assert float((right - start).abs().mean()) > 1e-3, "it has moved"
    ours, theirs = (float((one.detach() - right).square().mean().sqrt()) for one in (row.param, other.param))
    assert 0.0 < ours <= 1.05 * theirs
    assert theirs < 1e-5


def test_zeros_that_never_had_a_gradient_stay() -> None:
    """Bit for bit, with no decay: as torch's do. Without eps they are 0 / 0, as torch's are."""
    for eps, wanted in ((1e-8, 1.0), (0.0, torch.nan)):
        rows = [
            Row(torch.ones(40), None, states)
            for states in ((torch.zeros(40), torch.zeros(40)), (torch.zeros(40), torch.zeros(40)))
        ]
        grads = [torch.zeros(40), torch.arange(40.0)]
        for _ in range(3):
            Plan(Rule("adam"), rows).step(grads, [{"lr": 0.5, "eps": eps}])
        torch.testing.assert_close(rows[0].param, torch.full((40,), wanted), rtol=0.0, atol=0.0, equal_nan=True)
        assert torch.equal(rows[1].param[1:] < 0.0, torch.ones(39, dtype=torch.bool))
        assert torch.equal(rows[1].param[0].isnan(), torch.tensor(eps == 0.0))


def test_a_moment_that_is_too_small_for_its_square_moves_by_its_eps() -> None:
    """The second moment is 0 and the first is not, so only the eps stands below it."""
    param, moments = torch.zeros(8), (torch.zeros(8), torch.zeros(8))
    Plan(Rule("adam"), [Row(param, None, moments)]).step([torch.full((8,), 1e-25)], [{"lr": 1.0, "eps": 1e-20}])
    assert bool((moments[1] == 0.0).all())
    torch.testing.assert_close(param, torch.full((8,), -1e-26 / 1e-20), rtol=1e-6, atol=0.0)
