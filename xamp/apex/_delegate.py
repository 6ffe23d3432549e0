"""``xamp.initialize(backend="apex", delegate=True)``: a session in which an installed, real ``apex.amp`` does the work.

The real ``apex.amp`` is ROCm's, Ascend's, or a version of NVIDIA's from before its removal. It changes models and
optimizers in its own way. This module maps a policy to the arguments of that ``apex.amp``, and maps its scalers and
masters to the names that xamp's functions and checkpoints use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.apex import _real
from xamp.contract import Backend
from xamp.errors import BackendUnavailable, StateError, UnsupportedPolicy
from xamp.policy import LEVELS, Policy, Request
from xamp.scaling import masters
from xamp.scaling.block import Block
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.engine import Engine
from xamp.scaling.scale import ScaleRules
from xamp.sessions.session import register
from xamp.sessions.set_up import Arguments

__all__ = ["hand_over", "real_amp"]

_NUMBERS = {
    "init_scale": "dynamic_init_scale",
    "growth_factor": "scale_growth_factor",
    "backoff_factor": "scale_backoff_factor",
    "growth_interval": "scale_window",
}
"""Settings of the loss scales: xamp's name -> the name in Ascend's Apex, the only one in which they can be set."""


def real_amp() -> Any:
    """The real ``apex.amp``.

    Raises:
        BackendUnavailable: there is none, or importing it fails; the message says what is installed instead.
    """
    found = _real.find()
    if found is None or not found.has_amp:
        what = "no package named apex is installed" if found is None else f"`import apex` finds {found.says}"
        raise BackendUnavailable(f"there is no apex.amp to hand over to: {what}\nleave delegate=True out")
    try:
        amp = importlib.import_module("apex.amp")
    except Exception as error:  # a missing torch._six, an extension for another torch
        raise BackendUnavailable(
            f"the apex.amp that is installed does not import on torch {torch.__version__}: {type(error).__name__}: "
            f"{error}\nleave delegate=True out, or install an Apex for this torch"
        ) from error
    if not hasattr(amp, "initialize"):
        raise BackendUnavailable("the apex.amp that is installed has no initialize\nleave delegate=True out")
    return amp


def hand_over(policy: Policy, backend: Backend, device: torch.device, arguments: Arguments) -> Engine:
    """Let the real ``apex.amp`` put models and optimizers under ``policy``.

    Raises:
        UnsupportedPolicy: the real ``apex.amp`` cannot do that, or refuses; models and optimizers are as it left them.
        BackendUnavailable: there is no real ``apex.amp``.
    """
    amp = real_amp()
    options = _options(amp, policy, arguments)
    try:
        if arguments.optimizers:
            amp.initialize(list(arguments.given), list(arguments.optimizers), **options)
        else:
            amp.initialize(list(arguments.given), **options)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UnsupportedPolicy(
            f"initialize(level={policy.level!r}, backend='apex', delegate=True): the real apex.amp refuses: {error}"
        ) from error
    policy = dataclasses.replace(policy, checks=policy.dynamic)  # with a static scale, Apex never skips a step
    engine = DelegatedEngine(policy, backend, device, amp, arguments)
    register(engine, arguments.objects)
    return engine


def _options(amp: Any, policy: Policy, arguments: Arguments) -> dict[str, Any]:
    """The arguments of ``apex.amp.initialize`` for ``policy``."""
    known = inspect.signature(amp.initialize).parameters
    level = LEVELS[policy.level]
    asked = {name: getattr(policy, name) for name in _NUMBERS}
    options = {_NUMBERS[name]: value for name, value in asked.items() if value != getattr(Request, name)}
    refused = [name for name in asked if _NUMBERS[name] in options and _NUMBERS[name] not in known]
    refused += ["keep_fp32"] if policy.keep_fp32 else []
    refused += ["methods"] if tuple(policy.methods) != tuple(Request.methods) else []
    refused += ["process_group"] if arguments.process_group is not None else []
    refused += ["fused"] if policy.fused in (True, "one-pass") else []
    refused += (
        ["cast_model_inputs"] if policy.excluded_inputs or (level.casts_parameters and not policy.input_dtype) else []
    )
    refused += ["cast_model_outputs"] if policy.output_dtype is None else []
    refused += ["dtype"] if level.dtype and policy.dtype != getattr(torch, level.dtype) else []
    if refused:
        raise UnsupportedPolicy(
            f"initialize(backend='apex', delegate=True, {refused[0]}=...): the real apex.amp has no such setting. "
            f"Leave {' and '.join(refused)} out, or leave delegate=True out."
        )
    if level.casts_parameters:
        options["keep_batchnorm_fp32"], options["master_weights"] = policy.keep_batchnorm_fp32, policy.master_weights
    return {
        **options,
        "opt_level": policy.level,
        "loss_scale": policy.loss_scale,
        "cast_model_outputs": policy.output_dtype,
        "num_losses": policy.num_losses,
        "verbosity": arguments.verbosity,
        "min_loss_scale": policy.min_loss_scale,
        "max_loss_scale": policy.max_loss_scale,
    }


class _Scale:
    """Gives one of Apex's loss scales the attributes of :class:`xamp.scaling.scale.LossScaler`."""

    def __init__(self, scaler: Any, policy: Policy) -> None:
        self._scaler = scaler
        self.rules = ScaleRules.of(policy)

    @property
    def scale(self) -> float:
        return float(self._scaler.loss_scale())

    @property
    def growth_tracker(self) -> int:
        return int(self._scaler._unskipped)

    def parts(self) -> tuple[list[object], list[torch.Tensor]]:
        return [self._scaler], []

    def set(self, scale: float, growth_tracker: int = 0) -> None:
        self._scaler._loss_scale, self._scaler._unskipped = scale, growth_tracker


class DelegatedEngine(Engine):
    """The engine that xamp's functions use for such a session.

    Attributes:
        amp: the real ``apex.amp``.
    """

    def __init__(self, policy: Policy, backend: Backend, device: torch.device, amp: Any, arguments: Arguments) -> None:
        super().__init__(policy, backend, device, arguments.models, undo=arguments.undo, verbosity=arguments.verbosity)
        self.amp = amp
        self._scales: list[Any] = [_Scale(scaler, policy) for scaler in amp._amp_state.loss_scalers]
        self._own = amp._amp_state.loss_scalers, getattr(amp._amp_state, "opt_properties", None)
        self._optimizers = [weakref.ref(optimizer) for optimizer in arguments.optimizers]
        self._outcomes: Any = WeakIdKeyDictionary()
        for optimizer in arguments.optimizers:
            optimizer.register_step_post_hook(self._stepped)

    def is_handed_over(self) -> bool:
        """See :meth:`Engine.is_handed_over`."""
        return True

    @property
    def scalers(self) -> Any:
        """See :meth:`Engine.scalers`: Apex's."""
        return self._scales

    def before_saving(self) -> None:
        """See :meth:`Engine.before_saving`. Records the masters, which Apex makes late and only Apex knows."""
        self._note_masters()

    def serves(self, optimizer: object) -> bool:
        """See :meth:`Engine.serves`."""
        return any(ref() is optimizer for ref in self._optimizers)

    def scale_loss(
        self, loss: torch.Tensor, block: Block, optimizers: Optimizer | Sequence[Optimizer]
    ) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Use Apex's own ``scale_loss``, and record whether Apex will skip the next steps.

        First restore the scalers and properties of this session: a later call of Apex's ``initialize`` replaces them.
        """
        self.amp._amp_state.loss_scalers, self.amp._amp_state.opt_properties = self._own
        options = {"loss_id": self._scales.index(block.scaler), "delay_unscale": block.delay_unscale}
        options["delay_overflow_check"] = block.delay_overflow_check
        given = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        return self._watched(self.amp.scale_loss(loss, given, **options), given)

    @contextlib.contextmanager
    def _watched(self, context: Any, optimizers: Sequence[Optimizer]) -> Iterator[torch.Tensor]:
        skipping = [optimizer for optimizer in optimizers if _will_skip(optimizer)]
        with context as scaled:
            yield scaled
        for optimizer in optimizers:
            if _will_skip(optimizer) and not any(optimizer is other for other in skipping):
                self._outcomes[optimizer] = StepOutcome.SKIPPED
                self.counts.count(skipped=True)

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        self._outcomes[optimizer] = StepOutcome.APPLIED
        self.counts.count(skipped=False)

    def stats(self) -> Stats:
        """See :meth:`Engine.stats`."""
        return self.counts.stats

    def last_step(self) -> Any:
        """See :meth:`Engine.last_step`; a skip is known when ``scale_loss`` ends."""
        known = {found: self._outcomes.get(found) for ref in self._optimizers if (found := ref()) is not None}
        return next(iter(known.values()), None) if len(known) <= 1 else known

    def refuse_closing(self) -> None:
        """See :meth:`Engine.refuse_closing`.

        Raises:
            StateError: always, since Apex cannot undo its changes.
        """
        raise StateError(
            "session.close(): a real apex.amp has put these models and optimizers under its policy, and cannot take "
            "them out again. Make new ones."
        )

    def _note_masters(self) -> None:
        """Record for xamp's checkpoints which master belongs to which parameter."""
        if not self.policy.master_weights:
            return
        for optimizer in (found for ref in self._optimizers if (found := ref()) is not None):
            stash: Any = optimizer._amp_stash  # type: ignore[attr-defined]
            if not stash.lazy_init_called:
                optimizer._amp_lazy_init()  # type: ignore[attr-defined]
            for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
                if masters.master_of(param) is not master:
                    masters.set_low_precision(param, master)
                    masters.start_masters([(param, master)])


def _will_skip(optimizer: Any) -> bool:
    """Whether Apex has replaced the next step by one that does nothing."""
    return bool(getattr(getattr(optimizer, "_amp_stash", None), "already_patched", False))
