"""Faults at random places of small models are found by name: by find_nonfinite, by profile, and by trace and compare.

Ten seeds for each of three models: 30 placements of each fault.

Covers: xamp.debug.nonfinite, xamp.debug.profiling, xamp.debug.alignment.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import MODELS, Slot, loss_of, made, optimizer_of, plant, train

import xamp
from xamp.debug import compare, find_nonfinite, profile, read

SEEDS = range(10)
LEVELS = ("O0", "O1", "O2", "O4", "O5")
OPERATORS = {
    "aten.log": lambda x: x + (x - x).sum() * 0 + torch.log(x.abs() * 0).sum(),
    "aten.div": lambda x: x / (x * 0 + 0.0).sum().reshape(1),
    "aten.exp": lambda x: torch.exp(x.abs() * 0 + 1000),
    "aten.sqrt": lambda x: x + torch.sqrt(-1 - x.abs()),
    "aten.mul": lambda x: (x * 0 + 3e4).mul_(3e36),
}


class InfInBackward(torch.autograd.Function):
    """The identity, whose backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / torch.zeros_like(gradients[0])


def underflow(x: torch.Tensor) -> torch.Tensor:
    """``x`` in fp32, zeros in fp16; the gradient is that of the identity."""
    return x + ((x.detach() * 1e-9) * 1e9 - x.detach())


def one_step(model: Any, level: str) -> Any:
    optimizer = optimizer_of(model)
    xamp.initialize(model, optimizer, level=level, verbosity=0, init_scale=2.0**10)
    with find_nonfinite(model, optimizer) as found:
        optimizer.zero_grad()
        with xamp.scale_loss(loss_of(model(model.batch())), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return found.first


@pytest.mark.parametrize("kind", MODELS)
def test_an_inf_in_an_operator_is_found_by_name(kind: str) -> None:
    for seed in SEEDS:
        pick = random.Random(seed + 100)
        model, slot = made(kind, seed)
        operator, level = pick.choice(sorted(OPERATORS)), pick.choice(LEVELS)
        plant(model, slot, OPERATORS[operator])
        first = one_step(model, level)
        assert first is not None, (seed, slot, operator, level)
        found = first.module, first.kind, first.phase, ".".join(first.operator.rstrip("_").split(".")[:2]).rstrip("_")
        assert found == (slot, "operator", "forward", operator), (seed, level, first)


@pytest.mark.parametrize("kind", MODELS)
def test_an_inf_in_backward_is_found_by_name(kind: str) -> None:
    for seed in SEEDS:
        model, slot = made(kind, seed)
        plant(model, slot, InfInBackward.apply)
        first = one_step(model, random.Random(seed).choice(LEVELS))
        assert first is not None
        assert (first.module, first.kind, first.phase) == (slot, "operator", "backward"), (seed, first)
        assert first.operator.startswith("aten.div")


@pytest.mark.parametrize("kind", MODELS)
def test_an_underflow_in_a_layer_is_found_by_name(kind: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        level = ("O1", "O2", "O3")[seed % 3]
        model, slot = made(kind, seed)
        plant(model, slot, underflow)
        found = profile(model, model.batch(), level, loss=loss_of, tries=2, reference="fp32")
        assert found.keep_fp32[:1] == [slot], (seed, level, found.table())
        row = next(row for row in found.rows if row.module == slot)
        assert row.underflow == max(other.underflow for other in found.rows) > 0.4
        files = [tmp_path / f"{seed}.{name}.trace" for name in ("O0", level)]
        for path, chosen in zip(files, ("O0", level), strict=True):
            model, slot = made(kind, seed)
            plant(model, slot, underflow)
            train(model, optimizer_of(model), chosen, 6, seed=seed, path=path, init_scale=2.0**10)
        parted = compare(*map(read, files))
        assert (parted.module, parted.first and parted.first.step) == (slot, 0), (seed, level, parted.first)


@pytest.mark.parametrize("kind", MODELS)
def test_a_mis_scaled_optimizer_is_found_by_name(kind: str, tmp_path: Path) -> None:
    for seed in SEEDS:
        pick = random.Random(seed)
        model, _ = made(kind, seed)
        owners = [name for name, module in model.named_modules() if module._parameters and not isinstance(module, Slot)]
        name, begin, by = pick.choice(owners), pick.choice([0, 8]), pick.choice([0.25, 4.0])
        right, wrong = tmp_path / f"{seed}.right.trace", tmp_path / f"{seed}.wrong.trace"
        steps = begin + 8
        train(model, optimizer_of(model), "O0", steps, seed=seed, path=right)
        model, _ = made(kind, seed)
        optimizer = optimizer_of(model)
        place = owners.index(name)

        def at(step: int, optimizer: Any = optimizer, place: int = place, begin: int = begin, by: float = by) -> None:
            if step == begin:
                optimizer.param_groups[place]["lr"] *= by

        train(model, optimizer, pick.choice(["O1", "O4"]), steps, seed=seed, path=wrong, at=at, init_scale=2.0**10)
        found = compare(read(right), read(wrong))
        assert found.first is not None, (seed, name, begin, by)
        assert (found.module, found.first.key.kind, found.first.step) == (name, "update", begin), (
            seed,
            by,
            found.first,
        )
        assert found.factor == pytest.approx(by, rel=0.1)


@pytest.mark.parametrize("kind", MODELS)
def test_healthy_runs_at_two_levels_do_not_part(kind: str, tmp_path: Path) -> None:
    for seed in range(4):
        files = []
        for level in ("O0", ("O1", "O2", "O4", "O5")[seed]):
            model, _ = made(kind, seed)
            files.append(tmp_path / f"{seed}.{level}.trace")
            train(model, optimizer_of(model), level, 20, seed=seed, path=files[-1], init_scale=2.0**10)
        found = compare(*map(read, files))
        assert found.same, (seed, files, found.first)
