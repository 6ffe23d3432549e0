"""``FP16_Optimizer``: an optimizer of an fp16 model with fp32 masters, as it was before ``apex.amp``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xamp.apex import amp_C
from xamp.apex._loss_scaler import LossScaler
from xamp.apex.fp16_utils.fp16util import clip_grad_norm
from xamp.apex.multi_tensor_apply import multi_tensor_applier
from xamp.errors import CheckpointError
from xamp.values.log import say

__all__ = ["FP16_Optimizer"]


class ShowsInner:
    """Passes ``state`` and ``param_groups`` on to :attr:`optimizer`.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    optimizer: Any

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        """The groups of the wrapped optimizer, with the masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value


class FP16_Optimizer(ShowsInner):
    """Wraps an optimizer: its fp16 (or bf16) parameters are replaced by fp32 masters, and the loss is scaled.

    ``loss.backward()`` becomes ``optimizer.backward(loss)``.

    Args:
        init_optimizer: the optimizer; its groups are changed.
        static_loss_scale: the loss scale, never checked.
        dynamic_loss_scale: have a dynamic scale in its place; an overflow skips the step.
        dynamic_loss_args: arguments of :class:`xamp.apex._loss_scaler.LossScaler`, such as ``init_scale``.
        verbose: tell each parameter in the log.

    Raises:
        TypeError: a parameter is neither fp32 nor of 16 bits.
    """

    refused_by_amp = "apex.fp16_utils.FP16_Optimizer"

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        self.verbose = verbose
        self.optimizer = init_optimizer
        self.fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp16_groups: list[list[torch.Tensor]] = []
        self.fp32_from_fp32_groups: list[list[torch.Tensor]] = []
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                _check_dtype(param)
        for index, group in enumerate(self.optimizer.param_groups):
            self.maybe_print(f"FP16_Optimizer processing param group {index}:")
            self._take(group)
        self.all_fp16_params = [p for group in self.fp16_groups for p in group]
        self.all_fp32_from_fp16_params = [p for group in self.fp32_from_fp16_groups for p in group]
        self.all_fp32_from_fp32_params = [p for group in self.fp32_from_fp32_groups for p in group]
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts state that exists to the masters' dtype
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        self.loss_scaler = LossScaler("dynamic", **(dynamic_loss_args or {}))
        if not self.dynamic_loss_scale:
            self.loss_scaler = LossScaler(static_loss_scale)
        self.overflow = False
        self.first_closure_call_this_step = True
        self.clip_grad_norm = clip_grad_norm

    def _take(self, group: dict[str, Any]) -> None:
        halves: list[torch.Tensor] = []
        masters: list[torch.Tensor] = []
        floats: list[torch.Tensor] = []
        for index, param in enumerate(group["params"]):
            if not param.requires_grad:
                continue
            self.maybe_print(f"FP16_Optimizer received {param.type()} with {param.size()}")
            if param.dtype == torch.float32:
                floats.append(param)
                continue
            master = param.detach().clone().float().requires_grad_()
            group["params"][index] = master
            halves.append(param)
            masters.append(master)
            if param in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(param)
        self.fp16_groups.append(halves)
        self.fp32_from_fp16_groups.append(masters)
        self.fp32_from_fp32_groups.append(floats)

    def maybe_print(self, msg: str) -> None:
        """Write ``msg`` into the log where ``verbose`` was asked for."""
        if self.verbose:
            say("%s", msg, level=logging.INFO)

    def __getstate__(self) -> Any:
        raise RuntimeError("FP16_Optimizer should be serialized using state_dict().")

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("FP16_Optimizer should be deserialized using load_state_dict().")

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Set the gradients of masters and model to zero; or to None."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for param in [*params, *self.all_fp16_params]:
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale the loss, run backward, and write the unscaled gradients into the masters.

        Args:
            loss: a scalar of any dtype; is scaled in fp32.
            update_master_grads: False leaves the last part to a call of :meth:`update_master_grads`.
            retain_graph: as of ``Tensor.backward``.
        """
        (loss.float() * self.loss_scaler.loss_scale()).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Write the model's gradients, unscaled, into the masters', look for an overflow, and move the scale."""
        self.loss_scaler.clear_overflow_state()
        self._unscale(self.all_fp16_params, self.all_fp32_from_fp16_params)
        self._unscale(self.all_fp32_from_fp32_params, self.all_fp32_from_fp32_params)
        self.overflow = self.loss_scaler.update_scale()

    def _unscale(self, model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor]) -> None:
        grads, targets = [], []
        for param, master in zip(model_params, master_params, strict=True):
            if param.grad is None:
                if master is not param:
                    master.grad = None
                continue
            if master.grad is None:
                master.grad = torch.empty_like(master)
            grads.append(param.grad)
            targets.append(master.grad)
        self.loss_scaler.unscale(grads, targets, self.loss_scaler.loss_scale())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and write them into the model; nothing after an overflow.

        ``closure`` must call :meth:`backward` in place of ``loss.backward()``. It is run again after an overflow.
        """
        if self.overflow and closure is None:
            say("Gradient overflow.  Skipping step, reducing loss scale to %s", self.loss_scaler.loss_scale())
            return None
        result = self.optimizer.step() if closure is None else self._step_with_closure(closure)
        self._master_params_to_model_params()
        return result

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        def run() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._master_params_to_model_params()
            loss = closure()
            while self.overflow:
                say("OVERFLOW within closure! Skipping step, reducing loss scale to %s", self.loss_scaler.loss_scale())
                loss = closure()
            return loss

        try:
            return self.optimizer.step(run)
        finally:
            self.first_closure_call_this_step = True

    def _master_params_to_model_params(self) -> None:
        if self.all_fp16_params:
            flag = torch.zeros(1, dtype=torch.int32, device=self.all_fp16_params[0].device)
            lists = [self.all_fp32_from_fp16_params, self.all_fp16_params]
            multi_tensor_applier(amp_C.multi_tensor_scale, flag, lists, 1.0)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of the masters' gradients and return it; -1 after an overflow."""
        if self.overflow:
            return -1
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return self.clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Any]] | None:
        """Return the masters' gradients, a list for each group; None after an overflow."""
        if self.overflow:
            say(
                "Warning:  calling FP16_Optimizer.inspect_master_grad_data while in an overflow state.  Gradients are "
                "currently invalid (may be inf, nan, or stale).  Returning None.",
                level=logging.WARNING,
            )
            return None
        return [
            [None if param.grad is None else param.grad.data for param in group["params"]]
            for group in self.optimizer.param_groups
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return scale, masters and the state of the optimizer, as plain data: it loads with ``weights_only=True``."""
        return {
            "loss_scaler": {key: value for key, value in vars(self.loss_scaler).items() if key != "_overflow_buf"},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class or Apex's saved, and write the masters into the model.

        Raises:
            CheckpointError: the state lacks a key, or its masters do not fit. Nothing has changed then.
        """
        self._check_state(state_dict)
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.dynamic_loss_scale = bool(state_dict["dynamic_loss_scale"])
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        _load_scaler(self.loss_scaler, state_dict["loss_scaler"], self.dynamic_loss_scale)
        with torch.no_grad():
            for current, saved in zip(self.fp32_from_fp16_groups, state_dict["fp32_from_fp16"], strict=True):
                for master, value in zip(current, saved, strict=True):
                    master.copy_(value)
        self._master_params_to_model_params()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step")
        if missing := [key for key in (*keys, "optimizer_state_dict", "fp32_from_fp16") if key not in state_dict]:
            raise CheckpointError(
                f"FP16_Optimizer.load_state_dict: the state has no {', '.join(missing)}. It must come from "
                "FP16_Optimizer.state_dict()."
            )
        own = [[tuple(p.shape) for p in group] for group in self.fp32_from_fp16_groups]
        saved = [[tuple(p.shape) for p in group] for group in state_dict["fp32_from_fp16"]]
        if own != saved:
            raise CheckpointError(
                "FP16_Optimizer.load_state_dict: fp32_from_fp16 holds masters of the shapes "
                f"{saved}, and this optimizer has {own}. Make it from the same model and groups."
            )

    @property
    def loss_scale(self) -> Any:
        """The loss scale."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: Any) -> None:
        self.loss_scaler._loss_scale = value


def _check_dtype(param: torch.Tensor) -> None:
    if param.requires_grad and param.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(
            "Wrapped parameters must be either torch.FloatTensor, torch.HalfTensor or torch.BFloat16Tensor. "
            f"Received {param.type()}"
        )


def _load_scaler(scaler: LossScaler, saved: Any, dynamic: bool) -> None:
    """Read a scaler that was saved: as plain data, or as an object of Apex's, of either generation."""
    found: dict[str, Any] = dict(saved if isinstance(saved, dict) else vars(saved))
    scaler.dynamic = bool(found.get("dynamic", dynamic))
    scaler._loss_scale = found.get("_loss_scale", found.get("cur_scale", scaler._loss_scale))
    scaler._unskipped = int(found.get("_unskipped", 0))
    scaler._has_overflow = bool(found.get("_has_overflow", False))
    for key in ("_max_loss_scale", "_min_loss_scale", "_scale_seq_len"):
        setattr(scaler, key, found.get(key, getattr(scaler, key)))
    scaler._scale_seq_len = found.get("scale_window", scaler._scale_seq_len)
    scaler._scale_factor = found.get("scale_factor", found.get("_scale_factor", scaler._scale_factor))
