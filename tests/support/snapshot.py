"""Snapshots of models and optimizers, down to the bits, to compare them later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_SLOT: Any = torch.Tensor.grad
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_OF_TORCH = ("_opt_called", "_step_count", "_need_device_dtype_check_for_fused")  # torch sets them in a step


class Snapshot:
    """Types, instance dicts, hooks, parameters, buffers, gradients, groups and states of some objects."""

    def __init__(self, *objects: nn.Module | Optimizer) -> None:
        self._objects = objects
        self._before = [_describe(found, values=True) for found in objects]
        self._forms = [_describe(found, values=False) for found in objects]

    def assert_same(self) -> None:
        """Fail if anything has changed."""
        for before, found in zip(self._before, self._objects, strict=True):
            _compare(before, _describe(found, values=True))

    def assert_same_form(self) -> None:
        """Fail if anything but numbers, gradients and optimizer state has changed; for after training and ``close``."""
        for before, found in zip(self._forms, self._objects, strict=True):
            _compare(before, _describe(found, values=False))


def _compare(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert {*now} - {*before} == set(), "new"
    assert {*before} - {*now} == set(), "gone"
    for key, value in before.items():
        assert now[key] == value, key


def _describe(found: nn.Module | Optimizer, *, values: bool) -> dict[str, Any]:
    return _of_optimizer(found, values) if isinstance(found, Optimizer) else _of_model(found, values)


def _of_model(model: nn.Module, values: bool) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, module in model.named_modules():
        made[f"{name}: type"] = type(module)
        for key, value in module.__dict__.items():
            if key in _OF_MODULES or (key == "training" and not values):
                continue
            made[f"{name}: {key}"] = _items(value)
        for kind in _OF_MODULES:
            for key, value in getattr(module, kind).items():
                form: Any = id(value) if kind == "_modules" else _tensor(value, values)
                if kind == "_buffers" and not values and value is not None:
                    form = form[1:]  # it may be another tensor after close(): what counts is its place
                made[f"{name}: {kind}.{key}"] = form
    return made


def _of_optimizer(optimizer: Optimizer, values: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"type": type(optimizer)}
    for key, value in optimizer.__dict__.items():
        if key not in ("state", "param_groups", *_OF_TORCH):
            made[key] = _items(value)
    made["groups"] = id(optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        made[f"groups[{index}]"] = (id(group), id(group["params"]))
        made[f"groups[{index}] keys"] = list(group)
        for key, value in group.items():
            made[f"groups[{index}].{key}"] = [_tensor(p, values) for p in value] if key == "params" else value
    if values:
        made["state"] = id(optimizer.state)
        for param, state in sorted(optimizer.state.items(), key=lambda item: id(item[0])):
            for key, value in state.items():
                made[f"state[{id(param)}].{key}"] = _tensor(value, values)
    return made


def _items(value: object) -> Any:
    return [(key, id(item)) for key, item in value.items()] if isinstance(value, Mapping) else id(value)


def _tensor(value: object, values: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    form = (id(value), type(value), value.dtype, value.device, value.requires_grad)
    if isinstance(value, nn.parameter.UninitializedParameter):
        return form
    form = (*form, tuple(value.shape), value.stride())  # type: ignore[assignment]
    return (*form, _bits(value), _grad(value)) if values else form


def _grad(value: torch.Tensor) -> Any:
    found = _SLOT.__get__(value) if value.is_leaf else None  # to ask a master whose gradient waits would move it there
    return None if found is None else _tensor(found, True)


def _bits(value: torch.Tensor) -> Any:
    return None if value.is_meta else value.detach().reshape(-1).view(torch.uint8).tolist()
