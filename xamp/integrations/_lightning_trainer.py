"""The precision plugin for Lightning's Trainer, without its base class, which is Lightning's."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import StateError, UnsupportedPolicy
from xamp.integrations._lightning_plugin import Plugin
from xamp.sessions.clipping import clip_grad_norm_
from xamp.sessions.foreign import unwrap
from xamp.sessions.initialize import initialize
from xamp.sessions.scale_loss import scale_loss
from xamp.sessions.session import Session, end_session, session

__all__ = ["TrainerRules"]


class TrainerRules(Plugin):
    """The methods of ``TrainerPrecision``; the class itself derives from Lightning's ``Precision`` too."""

    _session: Session | None = None
    _optimizers: Sequence[Optimizer] = ()
    _kept: dict[str, Any] | None = None  # the state of the last session, or one that was loaded before there is one

    # ---------------------------------------------------------------- set up and torn down

    def convert_module(self, module: Any) -> Any:
        """Cast the parameters where the level does, before a strategy wraps the module."""
        if self.casts_parameters:
            module.to(module.trainer.strategy.root_device)  # masters are made where the parameters are
            self._models = _parts(module)
            initialize(self._models, **self.settings)
            self._session = session(self._models[0])
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Put model and optimizers under the level. Called when the strategy has set them up."""
        real = [found for found in optimizers if type(found).__name__ != "_MockOptimizer"]  # of a module without any
        if not self.casts_parameters:
            self._models = [unwrap(model)]
            initialize(self._models, real or None, **self.settings)
            self._session = session(self._models[0])
        elif real:
            initialize(self._models, real, **self.settings)
        assert self._session is not None, "made here or in convert_module"
        for optimizer in real:
            if self._session.policy.manages_gradients and _needs_closure(optimizer):
                self.teardown()
                raise UnsupportedPolicy(
                    f"TrainerPrecision({self.settings['level']!r}): {type(optimizer).__name__}.step needs a closure, "
                    "and would run backward without loss scale and masters. Use O0 or O4 for it."
                )
        self._optimizers = real
        if self._kept is not None and real:
            self._session.load_state_dict(self._kept)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Make model and optimizers plain fp32 again, where the model is now."""
        found, self._session = self._session, None
        if found is not None:
            devices = [next(model.parameters()).device for model in self._models]
            self._kept = _without_masters(found.state_dict())
            try:
                end_session(found.engine)
            except StateError:  # the run ended between a backward and its step
                for optimizer in self._optimizers:
                    optimizer.zero_grad()
                end_session(found.engine)
            for model, device in zip(self._models, devices, strict=True):
                model.to(device)
        self._optimizers, self._models = (), []
        super().teardown()  # type: ignore[misc]  # Lightning's

    # ---------------------------------------------------------------- the step

    def forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """Run a step of the LightningModule under the policy."""
        return contextlib.nullcontext() if self._session is None else self._session.autocast()

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Scale the loss, run the module's ``backward``, and unscale the gradients of all optimizers in use."""
        used = [found for found in self._optimizers if any(p.requires_grad for p in _stepped(found))]
        if self._session is None or not used:
            super().backward(tensor, model, optimizer, *args, **kwargs)  # type: ignore[misc]
            return
        with self._without_toggled(), scale_loss(tensor, used) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _without_toggled(self) -> Iterator[None]:
        """Keep gradients from parameters whose master Lightning's ``toggle_optimizer`` has frozen."""
        assert self._session is not None
        frozen = [p for p, master in self._session.engine.weights.pairs if not master.requires_grad]
        before = [p.grad for p in frozen]
        for param in frozen:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in zip(frozen, before, strict=True):
                param.grad = grad

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, then the hooks and the clipping, then the step, which is skipped after an overflow."""
        if self._session is None or not self._session.policy.manages_gradients:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)  # type: ignore[misc]
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        if result is None and model.automatic_optimization:  # training_step returned None: there was no backward
            return None
        optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the norm of what the optimizer steps; the norm is then in ``metrics()``."""
        clip_grad_norm_(optimizer, clip_val)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales and counts. The checkpoint has the masters in the model's state."""
        return self._kept or {} if self._session is None else _without_masters(self._session.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this plugin, or of a ``GradScaler``."""
        if self._session is None:
            self._kept = state_dict
        else:
            self._session.load_state_dict(state_dict)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the loss scale of a checkpoint that Lightning's own mixed precision has written."""
        theirs = checkpoint.get("MixedPrecision")
        if theirs and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(theirs)


def _stepped(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _without_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "masters": [{} for _ in state["masters"]]} if "masters" in state else dict(state)


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules below ``module`` that have a forward and parameters; itself if there is none."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        if next(child.parameters(), None) is not None:
            inside = _parts(child) if type(child).forward is nn.Module.forward else [child]
            found.update((id(part), part) for part in inside)
    return list(found.values()) or [module]


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
