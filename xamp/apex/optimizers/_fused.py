"""What Apex's fused optimizers have in common: how they clear gradients, sort tensors by dtype and load states."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from xamp.errors import CheckpointError
from xamp.torch_compat import kernels

__all__ = ["FusedOptimizer"]

_GRAD, _IS_SPARSE = operator.attrgetter("grad"), operator.attrgetter("is_sparse")
_KIND = operator.attrgetter("dtype", "device")


class FusedOptimizer(Optimizer):
    """An optimizer that steps lists of tensors, as Apex's do.

    Attributes:
        set_grad_none: what ``zero_grad()`` does where its caller does not say.
        steps_in_fp32: the arithmetic is in fp32 whatever the dtype of a parameter, so a small ``eps`` counts.
    """

    set_grad_none = True
    steps_in_fp32 = True

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients to None or to zero; by default as ``set_grad_none`` says."""
        super().zero_grad(set_to_none=self.set_grad_none if set_to_none is None else set_to_none)

    def _with_gradients(self, group: dict[str, Any]) -> list[list[torch.Tensor]]:
        """Return the parameters of ``group`` that have a gradient, sorted into lists by dtype and device."""
        params = [param for param in group["params"] if param.grad is not None]
        if any(map(_IS_SPARSE, map(_GRAD, params))):
            raise RuntimeError(
                f"{type(self).__name__} does not support sparse gradients, please consider SparseAdam instead"
            )
        kinds = [*map(_KIND, params)]
        found = dict.fromkeys(kinds)  # in their order
        if not all(dtype.is_floating_point for dtype, _ in found):
            raise RuntimeError(f"{type(self).__name__} only support fp16 and fp32.")
        if len(found) == 1:
            return [params]
        return [[param for param, its in zip(params, kinds, strict=True) if its == kind] for kind in found]

    @staticmethod
    def _grads(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of parameters that have one."""
        return [*map(_GRAD, params)]

    @staticmethod
    def _numbers(group: dict[str, Any], rate: Any) -> tuple[Any, ...]:
        """Return what LAMB and NovoGrad take from a group, in the order of ``amp_C``."""
        corrects, averages = (1 if group[key] else 0 for key in ("bias_correction", "grad_averaging"))
        return (rate, *group["betas"], group["eps"], group["step"], corrects, group["weight_decay"], averages)

    def _state_list(
        self, params: Sequence[torch.Tensor], name: str, dtype: torch.dtype | None = None
    ) -> list[torch.Tensor]:
        """Return the state ``name`` of each parameter; where there is none yet, zeros of ``dtype`` are made."""
        states = [*map(self.state.__getitem__, params)]
        if not all(map(operator.contains, states, itertools.repeat(name))):
            for param, state in zip(params, states, strict=True):
                if name not in state:
                    (state[name],) = kernels.in_usual_format([torch.zeros_like(param, dtype=dtype)])
        return [*map(operator.itemgetter(name), states)]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or Apex's saved.

        torch casts moments to the dtype of their parameter. Moments that were saved in fp32 stay fp32 here.

        Raises:
            CheckpointError: the state is of another optimizer.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(saved_ids, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and self.state[param][key].dtype != value.dtype:
                    self.state[param][key] = value.detach().to(param.device, copy=True)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Refuse a state whose groups lack what a step reads."""
        needed = {key for key in self.defaults if key not in ("lr", "max_grad_norm")}
        for number, group in enumerate(state_dict.get("param_groups", ())):
            if missing := sorted(needed - set(group)):
                raise CheckpointError(
                    f"{type(self).__name__}.load_state_dict: group {number} of the state has no {', '.join(missing)}. "
                    f"It was saved by another optimizer; load it into that one, or start {type(self).__name__} anew."
                )
