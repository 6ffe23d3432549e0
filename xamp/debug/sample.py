"""The statistics of one step of a run that is traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from xamp.debug.ranges import dense
from xamp.debug.trace_file import NO_GRADIENT
from xamp.scaling.optimizer import managed_by
from xamp.torch_compat import kernels
from xamp.torch_compat.torch_private import operators
from xamp.torch_compat.torch_private.autograd import current_autograd_node

__all__ = ["Sample", "per_element"]


class Sample:
    """The statistics of one step, between the end of the step before and its own end.

    Attributes:
        results: by module, in the order of calls: three tensors, and the number of elements.
        names: the names of the parameters.
    """

    def __init__(self, model: nn.Module | None, optimizer: Optimizer | None, *, looks: bool) -> None:
        self.results: dict[str, tuple[list[torch.Tensor], int]] = {}
        self._modules = {} if model is None else {id(m): name for name, m in model.named_modules()}
        self._optimizer = optimizer
        self.names, self._params = _parameters(model, optimizer)
        self._before = [value.clone() for value in _values(self._params)]
        self._gradients: list[torch.Tensor] | None = None
        self._hooks: list[Any] = []
        if looks and model is not None:
            self._hooks.append(hooks.register_module_forward_hook(self._look))
        if optimizer is not None:
            self._hooks.append(optimizers.register_optimizer_step_pre_hook(self._look_at_gradients))

    def stop(self) -> None:
        """Take the hooks away."""
        while self._hooks:
            self._hooks.pop().remove()

    def sizes(self) -> list[int]:
        """Return the number of elements of each result."""
        return [size for _, size in self.results.values()]

    def end(self) -> list[Any]:
        """Return all numbers of the sample, on the device."""
        self.stop()
        gradients = self._norms_of_gradients() if self._gradients is None else self._gradients
        after = _values(self._params)
        own = _norms(self._before)
        moved = _norms(operators.foreach_sub(after, self._before)) if after else []
        numbers = [number for found, _ in self.results.values() for number in found]
        return numbers + [number for each in zip(gradients, own, moved, strict=True) for number in each]

    def _look(self, module: nn.Module, args: Any, result: Any) -> None:
        name = self._modules.get(id(module))
        if name is None or name in self.results or not torch.is_grad_enabled():
            return  # evaluation between two steps has no gradients
        if current_autograd_node() is not None:
            return  # activation checkpointing repeats a forward
        value = next((part for found in _tensors(result) for part in dense(found)), None)
        if value is not None and value.numel():
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            norms = [torch.linalg.vector_norm(value, order, dtype=torch.float32) for order in (2, math.inf, 0)]
            self.results[name] = norms, value.numel()

    def _look_at_gradients(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer is self._optimizer and self._gradients is None:
            self._gradients = self._norms_of_gradients()

    def _norms_of_gradients(self) -> list[Any]:
        found = [next(dense(param.grad), None) for param in self._params]
        norms = iter(_norms([value for value in found if value is not None]))
        return [NO_GRADIENT if value is None else next(norms) for value in found]


def per_element(numbers: list[float], sizes: Sequence[int]) -> list[float]:
    """Turn the norm and the count of each result into a root mean square and a share of zeros."""
    for index, size in enumerate(sizes):
        numbers[3 * index] /= math.sqrt(size)
        numbers[3 * index + 2] = 1.0 - numbers[3 * index + 2] / size
    return numbers


def _norms(values: Sequence[torch.Tensor]) -> list[Any]:
    return kernels.norms(list(values), 2, torch.float32) if values else []


def _values(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [next(dense(param), torch.zeros(0)) for param in params]


def _parameters(model: nn.Module | None, optimizer: Optimizer | None) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors of what the optimizer steps, masters included; without one, of the model's."""
    own = {} if model is None else {id(param): (name, param) for name, param in model.named_parameters()}
    if optimizer is None:
        found = [pair for pair in own.values() if pair[1].requires_grad]
    else:
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        managed = managed_by(optimizer)
        if managed is not None:
            managed.state.gradients.move_held()
        given = [own[id(p)][0] if id(p) in own else f"parameter.{i}" for i, p in enumerate(stepped)]
        if managed is not None:
            names = managed.engine.models.names_of(stepped)
            given = [n if " " not in n else g for n, g in zip(names, given, strict=True)]
        found = list(zip(given, stepped, strict=True))
    return [name for name, _ in found], [param for _, param in found]


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    return (
        list(result.values()) if isinstance(result, dict) else list(result) if isinstance(result, (list, tuple)) else []
    )
