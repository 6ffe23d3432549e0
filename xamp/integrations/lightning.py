"""Precision plugins for Lightning's ``Trainer`` and for Fabric, on xamp's engine.

::

    from xamp.integrations.lightning import TrainerPrecision

    trainer = Trainer(plugins=[TrainerPrecision("O1")])

Packages ``lightning`` and ``pytorch_lightning`` with ``lightning_fabric`` are served: the one that is imported already,
else the one that is installed. They are imported when a plugin class is first asked for.

``TrainerPrecision(level, **settings)`` takes the arguments of ``xamp.initialize``. At O0, O1 and O4 the LightningModule
is the model, and its steps (``training_step`` and the others) run under the policy. At O2, O3 and O5 its child modules
are the models, so that losses in ``training_step`` and metrics stay fp32. Clipping, gradient accumulation, automatic
and manual optimization, toggled optimizers and checkpoints work as with Lightning's own plugins; a step that
overflowed is skipped. Hooks see gradients unscaled; at O2 and O5 these are in ``xamp.master_params(optimizer)``. When
``fit`` ends, the model is plain fp32 again.

What it cannot do: FSDP, DeepSpeed, XLA and other strategies that insist on a precision plugin of their own; an
optimizer that needs a closure (LBFGS) at levels with a loss scale or masters; a loss that is no single number.

``FabricPrecision(level, **settings)`` works with ``fabric.setup`` at O0, O1, O3 and O4. At O2 and O5 the optimizer must
be known before: ``plugin.setup(fabric, model, optimizer)`` does both. What it cannot do: the above; save its own state
with ``fabric.save``, unless it is put into the dict (``{"model": model, "xamp": plugin}``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.policy import Level, Request, parse_level
from xamp.scaling.optimizer import state_of
from xamp.sessions.grad_scaler import GradScaler
from xamp.sessions.initialize import initialize
from xamp.sessions.session import Session, clip_grad_norm_, find_session, master_params, scale_loss, session
from xamp.sessions.wrappers import unwrap

if TYPE_CHECKING:
    FabricPrecision: Any
    TrainerPrecision: Any

__all__ = ["FabricPrecision", "TrainerPrecision"]

_PACKAGES = {
    "TrainerPrecision": ("lightning.pytorch", "pytorch_lightning"),
    "FabricPrecision": ("lightning.fabric", "lightning_fabric"),
}


class _Plugin:
    """What both plugins share: the level, the other settings, and the name that Lightning has for it."""

    def __init__(self, level: str = Request.level, **settings: Any) -> None:
        known = inspect.signature(initialize).parameters
        unknown = [name for name in settings if name not in known or name in ("models", "optimizers")]
        if unknown:
            raise PolicyError(
                f"{type(self).__name__}({unknown[0]}=...): no such setting. It takes the arguments of xamp.initialize, "
                "without models and optimizers."
            )
        super().__init__()
        self.level: Level | None = parse_level(level)
        self.settings = {"level": level, **settings}

    @property
    def precision(self) -> str:
        """The nearest of Lightning's own names, which it shows and compares."""
        level = self.level
        if level is None or level.dtype is None:
            return "32-true"
        short = "bf16" if level.dtype == "bfloat16" else "16"
        return f"{short}-true" if level.casts_parameters else f"{short}-mixed"

    def main_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        """Iterate over what the optimizer steps: this is what is clipped."""
        return master_params(optimizer)

    @property
    def _casts_parameters(self) -> bool:
        return self.level is not None and self.level.casts_parameters


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``optimizer.step`` cannot be called without a closure."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class TrainerRules(_Plugin):
    """The methods of ``TrainerPrecision``; the class itself derives from Lightning's ``Precision`` too."""

    _session: Session | None = None
    _optimizers: Sequence[Optimizer] = ()
    _kept: dict[str, Any] | None = None  # the state of the last session, or one that was loaded before there is one

    # ---------------------------------------------------------------- set up and torn down

    def convert_module(self, module: Any) -> Any:
        """Cast the parameters where the level does, before a strategy wraps the module."""
        if self._casts_parameters:
            module.to(module.trainer.strategy.root_device)  # masters are made where the parameters are
            self._models = _parts(module)
            initialize(self._models, **self.settings)
            self._session = session(self._models[0])
        return module

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Put model and optimizers under the level. Called when the strategy has set them up."""
        real = [found for found in optimizers if type(found).__name__ != "_MockOptimizer"]  # of a module without any
        if not self._casts_parameters:
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
                found.close()
            except StateError:  # the run ended between a backward and its step
                for optimizer in self._optimizers:
                    optimizer.zero_grad()
                found.close()
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
        frozen = [p for p, master in self._session.engine.pairs() if not master.requires_grad]
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


def _without_masters(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "masters": [{} for _ in state["masters"]]} if "masters" in state else state


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules below ``module`` that have a forward and parameters; itself if there is none."""
    found: dict[int, nn.Module] = {}
    for child in module.children():
        if next(child.parameters(), None) is not None:
            inside = _parts(child) if type(child).forward is nn.Module.forward else [child]
            found.update((id(part), part) for part in inside)
    return list(found.values()) or [module]


class FabricRules(_Plugin):
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
            if self._casts_parameters and self.level is not None and self.level.master_weights:
                raise StateError(
                    f"fabric.setup: level {self.settings['level']!r} makes fp32 masters, for which xamp must know the "
                    "optimizer first. Call plugin.setup(fabric, model, optimizer) in place of fabric.setup(model, "
                    "optimizer), where plugin is this FabricPrecision."
                )
            initialize(module, **self.settings)
            found = session(module)
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


_RULES = {"TrainerPrecision": TrainerRules, "FabricPrecision": FabricRules}


@functools.cache
def _make(name: str, package: str) -> type:
    """Make the plugin class ``name`` on the ``Precision`` of ``package``."""
    base = importlib.import_module(f"{package}.plugins.precision").Precision
    rules = _RULES[name]
    return type(name, (rules, base), {"__doc__": rules.__doc__, "__module__": __name__, "__qualname__": name})


def _package(name: str) -> str:
    candidates = _PACKAGES[name]
    for package in candidates:
        if package in sys.modules:
            return package
    for package in candidates:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ModuleNotFoundError(
        f"xamp.integrations.lightning.{name} needs {candidates[0].partition('.')[0]}: pip install lightning"
    )


def __getattr__(name: str) -> Any:
    if name not in _RULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make(name, _package(name))
