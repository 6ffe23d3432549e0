"""Rules with their options, and rows to step by them, for tests of the kernels of :mod:`xamp.onepass`."""

from __future__ import annotations

from typing import Any

import torch

from xamp.onepass import Row, Rule

ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6}
CASES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "SGD": (Rule("sgd"), {"lr": 0.1}),
    "SGD maximize": (Rule("sgd"), {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "momentum": (Rule("sgd"), {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "nesterov": (Rule("sgd"), {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "decay after": (Rule("sgd", wd_after_momentum=True), {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adam": (Rule("adam"), {**ADAM, "weight_decay": 0.1}),
    "Adam maximize": (Rule("adam"), {**ADAM, "maximize": True, "amsgrad": True}),
    "AdamW": (Rule("adam", decoupled=True), {**ADAM, "weight_decay": 0.1}),
    "AdamW amsgrad": (Rule("adam", decoupled=True), {**ADAM, "weight_decay": 0.1, "amsgrad": True}),
    "no correction": (Rule("adam", decoupled=True), {**ADAM, "bias_correction": False}),
    "Adagrad": (Rule("adagrad"), {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1, "lr_decay": 0.2}),
    "Adagrad decoupled": (Rule("adagrad", decoupled=True), {"lr": 0.1, "eps": 1e-10, "weight_decay": 0.1}),
    "LAMB": (Rule("lamb", decoupled=True), {**ADAM, "weight_decay": 0.1}),
    "LAMB, decay in the gradient": (Rule("lamb"), {**ADAM, "weight_decay": 0.1, "grad_averaging": False}),
    "LAMB without decay": (Rule("lamb"), ADAM),
    "NVLAMB": (Rule("lamb", use_nvlamb=True), ADAM),
    "NovoGrad": (Rule("novograd", decoupled=True), {**ADAM, "weight_decay": 0.1}),
    "NovoGrad, decay inside": (Rule("novograd"), {**ADAM, "weight_decay": 0.1, "grad_averaging": False}),
    "NovoGrad from zero": (Rule("novograd"), {**ADAM, "init_zero": True}),
    "NovoGrad by the largest": (Rule("novograd"), {**ADAM, "norm_type": 0}),
}
SHAPES = ((5, 7), (70,), (1,), (), (0, 3), (2, 3, 4))
LOWER = (torch.float16, torch.bfloat16, None)


def states_of(rule: Rule, group: dict[str, Any], param: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if rule.name == "sgd":
        return (torch.zeros_like(param),) if group.get("momentum") else ()
    if rule.name == "novograd":
        return torch.zeros_like(param), torch.zeros(())
    count = {"adam": 3 if group.get("amsgrad") else 2, "adagrad": 1, "lamb": 2}[rule.name]
    return tuple(torch.zeros_like(param) for _ in range(count))


def rows_of(rule: Rule, group: dict[str, Any], shapes: Any = SHAPES) -> list[Row]:
    rows = []
    for number, shape in enumerate(shapes):
        param, lower = torch.randn(shape), LOWER[number % 3]
        low = None if lower is None else torch.full(shape, 77.0, dtype=lower)  # poisoned: a step must write it
        rows.append(Row(param, low, states_of(rule, group, param), torch.zeros(())))
    return rows
