"""The precision plugin for Fabric, without its base class, which is Fabric's."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import StateError
from xamp.integrations._lightning_plugin import Plugin
from xamp.policy import Request
from xamp.scaling.optimizer import state_of
from xamp.sessions.grad_scaler import GradScaler
from xamp.sessions.initialize import initialize
from xamp.sessions.scale_loss import scale_loss
from xamp.sessions.session import Session, find_session, session

__all__ = ["FabricRules"]


class FabricRules(Plugin):
    """The methods of ``FabricPrecision``; the class itself derives from Fabric's ``Precision`` too.

    Attributes:
        scaler: the loss scale of optimizers that xamp does not manage; None where the level needs none, or there is no
            model yet.
    """

    scaler: GradScaler | None = None

    def __init__(self, level: str = Request.level, **settings: Any) -> None:
        super().__init__(level, **settings)
        self._sessions: list[Session] = []

    def setup(self, fabric: Any, model: Any, *optimizers: Optimizer) -> Any:
        """Put model and optimizers under the level, masters included, then call ``fabric.setup``.

        Args:
            fabric: the Fabric that has this plugin.
            model: a model; or a list of models that share losses, as those of a GAN.
            *optimizers: the optimizers.

        Returns:
            What ``fabric.setup`` returns; for a list the list of models, and the optimizers.
        """
        models = list(model) if isinstance(model, (list, tuple)) else [model]
        for found in models:
            fabric.to_device(found)
        initialize(models, list(optimizers) or None, **self.settings)
        if models[0] is model:
            return fabric.setup(model, *optimizers)
        wrapped = [fabric.setup_module(found) for found in models]
        return (wrapped, fabric.setup_optimizers(*optimizers)) if optimizers else wrapped

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Put the module under the level, unless ``initialize`` has done so."""
        found = find_session(module)
        if found is None:
            if self.casts_parameters and self.level is not None and self.level.master_weights:
                raise StateError(
                    f"fabric.setup: level {self.settings['level']!r} makes fp32 masters, for which xamp must know the "
                    "optimizer first. Call plugin.setup(fabric, model, optimizer) in place of fabric.setup(model, "
                    "optimizer), where plugin is this FabricPrecision."
                )
            initialize(module, **self.settings)
            found = session(module)
        elif self.level is not None and found.policy.level != self.level.name:
            raise StateError(
                f"fabric.setup: this model is at level {found.policy.level} already, and the plugin's is "
                f"{self.level.name}. Call xamp.session(model).close() first, or give the plugin that level."
            )
        if not found.engine.states:  # no optimizer is managed, so the plugin scales
            self.scaler = self.scaler or _scaler_for(found)
        if all(found.engine is not known.engine for known in self._sessions):
            self._sessions.append(found)
        return module

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Run ``fabric.autocast()`` and forwards under the policy."""
        return self._sessions[0].autocast() if self._sessions else contextlib.nullcontext()

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward on the scaled loss."""
        managed = [found for found in self._sessions if found.engine.states]
        if model is not None:
            managed = [found for found in managed if found.engine is session(model).engine]
        if len(managed) > 1 or (managed and model is None and len(self._sessions) > 1):
            raise StateError(
                "fabric.backward(loss): models were given to several initialize calls, which scale differently. Say "
                "which one is meant: fabric.backward(loss, model=model); or give all that share a loss to one call."
            )
        if managed:
            optimizers = [state.optimizer for state in managed[0].engine.states if state.is_alive]
            with scale_loss(tensor, optimizers) as scaled:
                scaled.backward(*args, **kwargs)
        else:
            scaled = tensor if self.scaler is None else self.scaler.scale(tensor)
            super().backward(scaled, model, *args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Run the step, which is skipped after an overflow."""
        if self.scaler is None or state_of(optimizer) is not None:
            return super().optimizer_step(optimizer, **kwargs)  # type: ignore[misc]
        result = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return result

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale before clipping. Gradients of a managed optimizer are unscaled already."""
        if self.scaler is not None and state_of(optimizer) is None:
            self.scaler.unscale_(optimizer)

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return the numbers of the loss scale in use; see ``session(...).metrics()``."""
        if self.scaler is None and not self._sessions:
            raise StateError("metrics(): no model was set up yet. Call fabric.setup first.")
        return self._sessions[0].metrics(wait) if self.scaler is None else self.scaler.metrics(wait)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, and the state of models that ``initialize`` was given with their optimizers."""
        return {
            "scaler": {} if self.scaler is None else self.scaler.state_dict(),
            "sessions": [found.state_dict() for found in self._sessions if found.engine.states],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, after ``setup``."""
        managed = [found for found in self._sessions if found.engine.states]
        if len(managed) != len(state_dict["sessions"]):
            raise StateError(
                f"FabricPrecision.load_state_dict(state): it is of {len(state_dict['sessions'])} sessions, and there "
                f"are {len(managed)}. Call setup for the same models first."
            )
        for found, saved in zip(managed, state_dict["sessions"], strict=True):
            found.load_state_dict(saved)
        if self.scaler is not None and state_dict["scaler"]:
            self.scaler.load_state_dict(state_dict["scaler"])


def _scaler_for(found: Session) -> GradScaler | None:
    """Return a scaler by the policy of ``found``; None where that has no scale."""
    policy = found.policy
    if not policy.scales:
        return None
    if not policy.dynamic:
        made = GradScaler(policy.static_scale)
        made.set_growth_factor(1.0)
        made.set_backoff_factor(1.0)
        return made
    made = GradScaler(policy.init_scale, policy.growth_factor, policy.backoff_factor, policy.growth_interval)
    made.min_loss_scale, made.max_loss_scale = policy.min_loss_scale, policy.max_loss_scale
    return made
