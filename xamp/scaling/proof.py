"""Proves that an optimizer steps what it holds: one that steps other optimizers in it may have lost its parameters.

Masters take the parameters' places in the groups of an optimizer. One within, which was not found, keeps the model's
parameters, which get no gradients any more: nothing moves, and each step would count as applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from xamp.distributed import ranks
from xamp.errors import StateError

__all__ = ["Before"]


class Before:
    """What a step of ``optimizer`` finds, which holds the tensors ``stepped``."""

    def __init__(self, optimizer: Any, stepped: Iterable[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._params = [param for param in stepped if param.grad is not None]
        self._seen = self._versions()
        self._samples = [sample for param in self._params if (sample := _sample(param)) is not None]

    def _versions(self) -> list[Any]:
        """Return the versions of the parameters, and what tells of their state."""
        state = self._optimizer.state
        return [(param._version, _print_of(state.get(param))) for param in self._params]

    def has_written(self) -> bool:
        """Return whether the step has written into one of the parameters with gradients, or into its state.

        What a step writes through ``.data`` shows in the element with the largest gradient. Mostly no device is waited
        for.

        Raises:
            StateError: it has not, though it should have: neither the learning rate nor the gradient is so small that
                rounding may have taken the step away.
        """
        if self._seen != self._versions():
            return True
        if any(bool(param.detach().reshape(-1)[place] != value) for param, place, value, _ in self._samples):
            return True
        rates = {id(param): group.get("lr") for group in self._optimizer.param_groups for param in group["params"]}
        if any(_should_move(value, grad, rates.get(id(param))) for param, _, value, grad in self._samples):
            raise self._error()
        return False

    def run(self, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call ``base``, the step.

        Raises:
            StateError: it met dtypes that do not fit, and has written nothing: so do gradients that a model shows.
        """
        try:
            return base(*args, **kwargs)
        except RuntimeError as error:
            if "dtype" in str(error) and self._seen == self._versions():
                raise self._error() from error
            raise

    def _error(self) -> StateError:
        name, count = type(self._optimizer).__name__, len(self._params)
        return StateError(
            f"optimizer.step(): {name} has written into none of the {count} parameters with gradients that it holds, "
            "nor into its state of them. It may step other optimizers, which hold the parameters that it had before "
            "xamp.initialize. Give xamp.initialize these optimizers, as a list, and step each. One that steps only at "
            "some calls keeps their count in optimizer.state[param], as with state[param]['calls'] += 1."
        )


_Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _sample(param: torch.Tensor) -> _Sample | None:
    """Return ``param``, the place of its largest gradient, what it has there, and that gradient. Does not wait."""
    grad = param.grad
    if grad is None or grad.is_sparse or ranks.is_dtensor(grad) or ranks.is_dtensor(param) or not grad.numel():
        return None
    flat = grad.detach().reshape(-1)
    place = flat.abs().argmax()
    return param, place, param.detach().reshape(-1)[place].clone(), flat[place].clone()


def _print_of(state: Any) -> Any:
    """Return what changes when the state of a parameter does."""
    if isinstance(state, torch.Tensor):
        return state._version
    if isinstance(state, dict):
        return [(key, _print_of(value)) for key, value in state.items()]
    if isinstance(state, list | tuple):
        return [*map(_print_of, state)]
    return state if isinstance(state, int | float | str | None) else id(state)


def _should_move(value: torch.Tensor, grad: torch.Tensor, rate: Any) -> bool:
    """Return whether a step at this learning rate changes ``value``, fp32. Adafactor's rate may be None."""
    least = 2.0**-20 * float(value.abs())
    return bool(grad != 0) and (rate is None or abs(float(rate)) * min(float(grad.abs()), 1.0) > least)
