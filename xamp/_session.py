"""Sessions, and the functions that people call in a training step.

A :class:`Session` is what one ``initialize`` made: it owns the policy, the loss scalers and the state of each
optimizer, and keeps models and optimizers weakly, so that it goes when they go. The order of a step is in
:class:`_ScaledLoss` and :meth:`Session.leave`; what happens to gradients is in :mod:`xamp._step`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp import _distributed, _masters
from xamp._forward import Region
from xamp._optimizer import replace_params, state_of
from xamp._scale import DeviceState, LossScaler
from xamp._step import OptimizerState, StepOutcome
from xamp.contract import Backend
from xamp.errors import PolicyError, StateError
from xamp.policy import Policy

__all__ = [
    "Session",
    "StepOutcome",
    "clip_grad_norm_",
    "find_session",
    "loss_scale",
    "master_params",
    "scale_loss",
    "session",
]

# Each model, wrapper and optimizer that was given to initialize -> its session.
_sessions: MutableMapping[Any, Session] = WeakIdKeyDictionary()


class Stats:
    """Counts of optimizer steps, over all optimizers of a session.

    Attributes:
        applied: steps taken.
        skipped: steps left out because a gradient overflowed.
    """

    def __init__(self, applied: int = 0, skipped: int = 0) -> None:
        self.applied = applied
        self.skipped = skipped

    def __repr__(self) -> str:
        return f"Stats(applied={self.applied}, skipped={self.skipped})"


class Session:
    """What one call of ``initialize`` set up.

    Attributes:
        policy: the effective setting.
        backend: the backend in use.
        device: where the loss scale lives: the device of the models' first parameter.
        enabled: False where ``initialize(enabled=False)`` made it; everything then does nothing.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        device: torch.device,
        models: Sequence[nn.Module],
        *,
        process_group: Any = None,
        verbosity: int = 1,
        enabled: bool = True,
    ) -> None:
        self.policy = policy
        self.backend = backend
        self.device = device
        self.enabled = enabled
        self.verbosity = verbosity
        self.scalers: list[LossScaler] = []
        self.states: list[OptimizerState] = []
        self._models = [weakref.ref(model) for model in models]
        self._group = process_group
        self._wrappers = _distributed.Wrappers(self._models, process_group)
        self._pairs: list[_masters.Pair] = []
        self._shared = False
        self._used = False
        self._stats = Stats()
        self._undo = contextlib.ExitStack()
        self._closed = False

    # ---------------------------------------------------------------- what people read

    @property
    def last_step(self) -> StepOutcome | dict[Optimizer, StepOutcome | None] | None:
        """What the last ``optimizer.step()`` did, by optimizer where there are several. May wait for the device."""
        outcomes = {state.optimizer: _outcome(state) for state in self.states}
        return next(iter(outcomes.values()), None) if len(outcomes) <= 1 else outcomes

    @property
    def stats(self) -> Stats:
        """Counts of applied and skipped steps. Waits for the device."""
        late = [overflowed for state in self.states for overflowed in state.unobserved()]
        skipped = sum(late)
        return Stats(self._stats.applied + len(late) - skipped, self._stats.skipped + skipped)

    @property
    def counts(self) -> Stats:
        """The counts that the host has; without waiting."""
        return self._stats

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The policy as a context manager, for code outside ``forward``. At O0, O2, O3 and O5 it switches casts off."""
        if not self.enabled:
            return contextlib.nullcontext()
        lower = self.policy.dtype if self.policy.autocast else None
        return Region(self.device.type, lower, None, None).autocast()

    def close(self) -> None:
        """Give the models and optimizers back as plain fp32 objects. A second call does nothing.

        Raises:
            StateError: a ``scale_loss`` is open, or somebody else changed the class of a model since.
        """
        if self._closed:
            return
        if any(state.open for state in self.states):
            raise StateError("session.close(): inside `with xamp.scale_loss(...)`. Close after the block.")
        self._undo.close()
        self._closed = True
        for key in [key for key, value in _sessions.items() if value is self]:
            del _sessions[key]

    # ---------------------------------------------------------------- set up by initialize

    def register(self, objects: Iterable[object], undo: contextlib.ExitStack) -> None:
        """Make :func:`session` find this session by each of ``objects``; ``undo`` takes everything back on close."""
        self._undo = undo
        for found in objects:
            _sessions[found] = self

    def register_more(self, objects: Iterable[object], undo: contextlib.ExitStack) -> None:
        """The same for what came later: taken back first."""
        self._undo.push(undo)
        for found in objects:
            _sessions[found] = self

    def prepare_state(self, optimizers: int) -> None:
        """Make the device state for that many optimizers."""
        self.memory = DeviceState(self.policy.num_losses, optimizers, self.device)
        self.scalers = [LossScaler(self.policy, self.memory, i) for i in range(self.policy.num_losses)]

    def add_pairs(self, pairs: Iterable[_masters.Pair]) -> None:
        """Take note of masters that an optimizer of this session holds."""
        known = {id(m) for _, m in self._pairs}
        self._pairs += [pair for pair in pairs if id(pair[1]) not in known]

    def pairs(self) -> Sequence[_masters.Pair]:
        """All lowered parameters and their masters."""
        return self._pairs

    def set_states(self, states: list[OptimizerState]) -> None:
        """The optimizers' states, complete."""
        self.states = states
        self._find_shared()

    def _find_shared(self) -> None:
        ids = [id(p) for state in self.states for p in state.model_params()]
        self._shared = len(set(ids)) < len(ids)

    def adopt_group(self, state: OptimizerState, group: dict[str, Any]) -> None:
        """A group was added to an optimizer: give its lowered parameters masters."""
        if self.policy.master_weights:
            pairs = [(p, m) for p in group["params"] if (m := _masters.ensure_master(p, self.policy)) is not None]
            self.add_pairs(pairs)
            replace_params(state.optimizer, pairs)
        if self.policy.checks or self.policy.master_weights:
            state.fused.switch_on(state.optimizer)
        state.find_parameters()
        self._find_shared()

    def names_of(self, params: Iterable[torch.Tensor]) -> list[str]:
        """Qualified names of parameters, or of the parameters whose masters they are, for messages."""
        models = [model for ref in self._models if (model := ref()) is not None]
        names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"models[{index}]." if len(models) > 1 else ""
            for name, param in model.named_parameters():
                names[id(param)] = prefix + name
        names.update({id(m): names[id(p)] for p, m in self._pairs if id(p) in names})
        return [names.get(id(p), f"a parameter of shape {tuple(p.shape)} outside the models") for p in params]

    # ---------------------------------------------------------------- the step

    def enter(self, states: Sequence[OptimizerState], scaler: LossScaler) -> None:
        """Before a backward."""
        if self._pairs:
            self._settle_masters()
        self.backend.before_backward(self.device)
        for state in states:
            state.enter(scaler)

    def _settle_masters(self) -> None:
        """At first use, and when a DDP appeared: masters follow what was written into the parameters, ranks agree."""
        fresh = self._wrappers.adopt(p for p, _ in self._pairs)
        if not self._used or fresh:
            _masters.reconcile(self._pairs)
            self._used = True
        for ddp in fresh:
            held = {id(p) for p in ddp.parameters()}
            masters = [m.detach() for p, m in self._pairs if id(p) in held]
            _distributed.share_from_rank_zero(masters, ddp.process_group)

    def leave(
        self, states: Sequence[OptimizerState], scaler: LossScaler, delay_unscale: bool, delay_overflow_check: bool
    ) -> None:
        """After a backward: unscale, check, move the scale; or put all of that off."""
        if not self._pairs:
            self._wrappers.adopt(p for state in states for p in state.plain)
        if delay_unscale or self._wrappers.postponed():
            why = (
                "delay_unscale=True postponed it" if delay_unscale else "the wrapper's no_sync postponed its reduction"
            )
            for state in states:
                state.postpone(scaler, why)
            return
        done: set[int] | None = set() if self._shared and len(states) > 1 else None
        if not self.policy.checks:
            for state in states:
                state.unscale(scaler, None, done)
            return
        found_inf = self._check(states, scaler, done, delay_overflow_check)
        if not delay_overflow_check:
            scaler.update(found_inf)

    def _check(
        self, states: Sequence[OptimizerState], scaler: LossScaler, done: set[int] | None, throw_away: bool
    ) -> torch.Tensor:
        """Unscale and check; raises the sticky flags and returns one flag for all ``states``."""
        only = states[0]
        if len(states) == 1 and only.fresh and not throw_away:
            only.unscale(scaler, only.sticky, done)
            self._wrappers.agree(only.sticky, only.model_params)
            only.checked()
            return only.sticky
        flags = self.memory.flags
        flags.zero_()
        for state in states:
            state.unscale(scaler, state.flag, done)
        if done is not None:  # a gradient that two optimizers hold was looked at for one of them
            flags.fill_(flags.max())
        self._wrappers.agree(flags, lambda: [p for state in states for p in state.model_params()])
        if not throw_away:
            for state in states:
                state.keep_flag()
                state.checked()
        return flags.max()


def _outcome(state: OptimizerState) -> StepOutcome | None:
    if isinstance(state.outcome, torch.Tensor):
        state.outcome = StepOutcome.SKIPPED if bool(state.outcome) else StepOutcome.APPLIED
    return state.outcome


class _ScaledLoss:
    """The context manager of :func:`scale_loss`. A class, because a generator costs more than its body here."""

    __slots__ = ("_delay_overflow_check", "_delay_unscale", "_loss", "_scaler", "_session", "_states")

    def __init__(
        self,
        session: Session,
        states: Sequence[OptimizerState],
        scaler: LossScaler,
        loss: torch.Tensor,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._session = session
        self._states = states
        self._scaler = scaler
        self._loss = loss
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check

    def __enter__(self) -> torch.Tensor:
        for state in self._states:
            if state.open:
                raise StateError(
                    "scale_loss(loss, optimizer): another scale_loss over this optimizer is open. Leave it first, or "
                    "add the losses up and scale their sum."
                )
        self._session.enter(self._states, self._scaler)
        if not self._session.policy.scales:
            return self._loss
        scale = self._scaler.scale
        return self._loss * (scale if self._loss.device == scale.device else scale.to(self._loss.device))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._session.leave(self._states, self._scaler, self._delay_unscale, self._delay_overflow_check)
            return
        for state in self._states:
            state.abandon(self._scaler)


def find_session(found: object) -> Session | None:
    """The session that ``found`` belongs to, or None."""
    try:
        return _sessions.get(found)
    except TypeError:  # no weak references to it
        return None


def session(obj: object) -> Session:
    """The session of a model or optimizer that was given to ``initialize``.

    Raises:
        StateError: it was not, or its session was closed.
    """
    found = find_session(obj)
    if found is None:
        raise StateError(
            f"session({type(obj).__name__}): not given to xamp.initialize, or its session was closed. Pass the very "
            "model or optimizer that initialize returned; a copy has no session."
        )
    return found


def _the_session(call: str, obj: object) -> Session:
    """The session of ``obj``; for None the only one there is."""
    if obj is not None:
        return session(obj)
    live = list({id(s): s for s in _sessions.values()}.values())
    if len(live) != 1:
        raise StateError(
            f"{call}: {len(live)} sessions are live, so it must be told which. Pass a model or optimizer of the one "
            "meant."
        )
    return live[0]


def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Scale a loss, and unscale the gradients that its backward leaves.

    On leaving, the gradients of ``optimizers`` are plain again (at O2 and O5: in the masters' ``.grad``), have been
    checked for inf and nan, and the loss scale has moved once; all on the device. Where a wrapper postpones its
    reduction (``no_sync``), that waits for the first ``scale_loss`` whose backward reduces.

    Args:
        loss: one floating element, on the session's device type.
        optimizers: the optimizer, or all of them, whose parameters get gradients from ``loss``.
        loss_id: which loss scale, of the ``num_losses`` that ``initialize`` made.
        model: a DistributedDataParallel around the model, where xamp cannot see it run (all of it compiled).
        delay_unscale: leave the gradients scaled; a later ``scale_loss`` unscales them along with its own.
        delay_overflow_check: unscale, but neither skip the step nor move the scale for what this backward found.

    Returns:
        A context manager that yields the scaled loss, fp32.

    Raises:
        PolicyError: the loss or ``loss_id`` cannot be right.
        StateError: an optimizer that no session manages, or optimizers of different sessions.
    """
    states, owner = _states_of("scale_loss", optimizers)
    if model is not None:
        _distributed.note_given(model)
    if not owner.enabled:
        return contextlib.nullcontext(loss)
    _check_loss(loss, owner)
    scaler = _scaler_of("scale_loss", owner, loss_id)
    if loss.dtype in _masters.LOWER:
        loss = loss.float()
    if not owner.policy.scales and not owner.policy.master_weights:
        return contextlib.nullcontext(loss)
    return _ScaledLoss(owner, states, scaler, loss, delay_unscale, delay_overflow_check)


def _scaler_of(call: str, owner: Session, loss_id: object) -> LossScaler:
    """The scaler of ``loss_id``; raises a PolicyError where there is none."""
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(owner.scalers):
        raise PolicyError(
            f"{call}(loss_id={loss_id!r}): initialize was called with num_losses={owner.policy.num_losses}, so loss_id "
            f"is one of 0 to {len(owner.scalers) - 1}. Raise num_losses there."
        )
    return owner.scalers[loss_id]


def _check_loss(loss: object, owner: Session) -> None:
    if not isinstance(loss, torch.Tensor) or not loss.dtype.is_floating_point or loss.numel() != 1:
        shown = f"{loss.dtype}, shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PolicyError(
            f"scale_loss(loss): the loss must be one floating element, and is {shown}. Reduce it first, as with "
            "loss.mean()."
        )
    if loss.device.type != owner.device.type:
        raise PolicyError(
            f"scale_loss(loss): the loss is on {loss.device}, the model on {owner.device}. Compute the loss where the "
            "model is."
        )


def _states_of(call: str, optimizers: object) -> tuple[list[OptimizerState], Session]:
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise StateError(f"{call}: no optimizer given. Pass all whose parameters get gradients from this loss.")
    owners = [find_session(optimizer) for optimizer in given]
    for optimizer, owner in zip(given, owners, strict=True):
        if owner is None or (owner.enabled and state_of(optimizer) is None):
            raise StateError(
                f"{call}: {type(optimizer).__name__} was not given to xamp.initialize as an optimizer, or its session "
                "was closed. Call model, optimizer = xamp.initialize(model, optimizer, level=...) first."
            )
    if any(owner is not owners[0] for owner in owners):
        raise StateError(
            f"{call}: the optimizers belong to different sessions, which scale differently. Give all models and "
            "optimizers of one loss to one xamp.initialize call."
        )
    unique = {id(s): s for optimizer in given if (s := state_of(optimizer)) is not None}
    return list(unique.values()), owners[0]  # type: ignore[return-value]


def master_params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Iterate over what ``optimizer`` steps: the fp32 masters at O2 and O5, else the parameters.

    Raises:
        StateError: the gradients are still scaled, so whoever clips or reads them now would be wrong.
    """
    state = state_of(optimizer)
    if state is not None:
        state.settle("master_params(optimizer)")
    return (param for group in optimizer.param_groups for param in group["params"])


def clip_grad_norm_(
    optimizer: Optimizer | Sequence[Optimizer], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the norm of all gradients that ``optimizer`` is about to apply, in place, without waiting for the device.

    Args:
        optimizer: one, or several whose gradients count as one vector.
        max_norm: the norm to come down to.
        norm_type: of the p-norm; may be inf.

    Returns:
        The norm before, a scalar tensor.

    Raises:
        StateError: the gradients are still scaled.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    params = [param for one in given for param in master_params(one)]  # type: ignore[arg-type]
    return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)


def loss_scale(obj: object = None, loss_id: int = 0) -> float:
    """The loss scale now. Waits for the device.

    Args:
        obj: a model or optimizer; None where only one session is live.
        loss_id: which of the session's scales.

    Raises:
        StateError: no session, or several and ``obj`` is None.
        PolicyError: ``loss_id`` is out of range.
    """
    found = _the_session("loss_scale()", obj)
    if not found.enabled:
        return 1.0
    return float(_scaler_of("loss_scale", found, loss_id).scale)
