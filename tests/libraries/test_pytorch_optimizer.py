"""pytorch_optimizer: every class that trains in fp32 by a plain ``step()``, and its SAM.

Covers: xamp.scaling.optimizer, xamp.scaling.param_groups.
"""

from __future__ import annotations

import inspect
import io
from typing import Any

import pytest
import torch
from library_loop import LEVELS, STEPS, Case, by_hand, check, distance, library
from torch import nn
from torch.optim import SGD, Optimizer

import xamp

pytorch_optimizer = library("pytorch_optimizer")
# SGD, Adam and others of torch are among its names too.
CLASSES = {
    name: found
    for name in sorted(dir(pytorch_optimizer))
    if inspect.isclass(found := getattr(pytorch_optimizer, name))
    and issubclass(found, Optimizer)
    and found.__module__.startswith("pytorch_optimizer.")
}
SAMPLE = ("AdaBelief", "Lion", "Muon", "Prodigy", "ScheduleFreeAdamW", "SOAP")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def squares(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    return output.float().square().mean()  # type: ignore[no-any-return]


def case_of(name: str) -> Case:
    cls = CLASSES[name]
    needed: dict[str, Any] = {"lr": 0.01} if "lr" in inspect.signature(cls).parameters else {}
    by_shape = "use_muon" in inspect.getsource(cls)

    def optimizer(params: Any) -> Any:
        given = list(params)
        if by_shape:  # matrices are stepped in another way than vectors
            given = [{"params": [p for p in given if (p.dim() == 2) is use], "use_muon": use} for use in (True, False)]
        made = cls(given, **needed)
        getattr(made, "train", lambda: None)()  # of those that average: they want to be told
        return made

    return Case("pytorch_optimizer", f"optimizer {name}", net, lambda: {"input": torch.randn(5, 6)}, squares, optimizer)


def resumes_in_fp32(case: Case) -> bool:
    """Whether the optimizer's own state is all that it needs to go on, in plain fp32."""
    found = []
    for stop in (False, True):
        model, optimizer = case.start()
        for step in range(STEPS):
            if stop and step == STEPS // 2:
                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                model, optimizer = case.start()
                states = torch.load(file, weights_only=False)
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            batch = case.inputs(step)
            optimizer.zero_grad()
            case.loss(model(**batch), batch).backward()
            optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return torch.equal(*found)


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.thorough) for name in CLASSES]
)
def test_an_optimizer_trains_as_by_hand(name: str) -> None:
    case = case_of(name)
    try:
        by_hand(case, "O0")
        resumes = resumes_in_fp32(case)
    except Exception as error:
        pytest.skip(f"does not train in fp32 by step(): {type(error).__name__}: {error}")
    for level in ("O1", "O2", "O4", "O5"):
        check(case, level, resumes=resumes, moves=0.0)  # some warm up, and have hardly moved after four steps


@pytest.mark.parametrize("level", LEVELS)
def test_sam(level: str) -> None:
    """Two forwards a step: the loss at the weights, and at the weights moved uphill."""

    def train(start: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = net()
        optimizer = pytorch_optimizer.SAM(list(model.parameters()), SGD, lr=0.05, rho=0.05)
        start(model, optimizer)
        for step in range(3):
            for half in (optimizer.first_step, optimizer.second_step):
                torch.manual_seed(step)
                loss = model(torch.randn(5, 6)).float().square().mean()
                if xamp_is_on:
                    with xamp.scale_loss(loss, optimizer) as scaled:
                        scaled.backward()
                else:
                    loss.backward()
                half(zero_grad=True)
        return {name: value.float() for name, value in model.state_dict().items()}

    xamp_is_on = True
    found = train(lambda m, o: xamp.initialize(m, o, level, verbosity=0, loss_scale=64.0))
    xamp_is_on = False
    expected = train(lambda m, o: None)
    torch.manual_seed(1)
    before = dict(net().named_parameters())
    assert distance(before, expected) > 0.01, "it trains"
    assert distance(found, expected) < 0.005, "as fp32 does, but for rounding"
