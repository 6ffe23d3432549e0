"""Sessions, and the functions that users call in a training step.

A :class:`Session` gives one model or optimizer access to its :class:`~xamp.scaling.engine.Engine`.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.casting.forward import Region
from xamp.contract import Backend
from xamp.errors import PolicyError, StateError
from xamp.ground.arguments import boolean, number
from xamp.ground.shown import shown
from xamp.policy import Policy
from xamp.scaling import distributed, masters, norms, shards
from xamp.scaling.engine import Engine, ScaledLoss
from xamp.scaling.optimizer import state_of
from xamp.scaling.rank_groups import Layout, layout_of
from xamp.scaling.scale import LossScaler
from xamp.scaling.step import OptimizerState, Stats, StepOutcome
from xamp.sessions import checkpoint, metrics
from xamp.sessions.typed import LastStep, SessionState
from xamp.sessions.wrappers import optimizer_in, unwrap

__all__ = [
    "Session",
    "StepOutcome",
    "clip_grad_norm_",
    "clip_grad_value_",
    "find_session",
    "forget_sessions",
    "load_state_dict",
    "loss_scale",
    "master_params",
    "register",
    "scale_loss",
    "session",
    "state_dict",
]

_NUMBERS = (float, int, torch.Tensor)

# Each model, wrapper and optimizer that was given to initialize -> its session.
_sessions: MutableMapping[Any, Session] = WeakIdKeyDictionary()


class Session:
    """The settings and the state that one call of ``initialize`` made, seen from one of its models or optimizers.

    Attributes:
        engine: the engine that all sessions of that call share.
    """

    def __init__(self, engine: Engine, seen_from: object) -> None:
        self.engine = engine
        self._seen_from = weakref.ref(seen_from)

    def __repr__(self) -> str:
        """Say what the session is, without waiting for the device: the newest steps may be missing in the numbers."""
        if not self.engine.enabled:
            return f"<xamp session: disabled, on {self.device}>"
        scales, applied, skipped = metrics.known(self.engine)
        optimizers = [type(state.optimizer) for state in self.engine.states if state.is_alive]
        names = ", ".join(getattr(kind, "_xamp_base", kind).__name__ for kind in optimizers) or "no optimizer"
        kind = "dynamic" if self.policy.dynamic else "static"
        scale = ", ".join(f"{scale:g}" for scale in scales)
        return (
            f"<xamp session: level {self.policy.level} on {self.device}, {names}, loss scale {scale} ({kind}), steps: "
            f"{applied} applied, {skipped} skipped>"
        )

    def __reduce__(self) -> Any:
        """Refuse to be pickled or copied: a session is a view of live objects.

        Raises:
            StateError: always.
        """
        raise StateError(
            "pickle or copy of a Session: it leads to live models and optimizers, so it cannot be pickled or copied. "
            "Save session.state_dict(), and load it into the session of the new model."
        )

    @property
    def policy(self) -> Policy:
        """The policy in effect, complete and checked."""
        return self.engine.policy

    @property
    def backend(self) -> Backend:
        """The backend in use."""
        return self.engine.backend

    @property
    def device(self) -> torch.device:
        """The device of the loss scale, which is that of the models' first parameter."""
        return self.engine.device

    @property
    def last_step(self) -> LastStep:
        """Outcome of the last ``step()``: a StepOutcome, or None before the first. May wait for the device.

        For the session of a model with several optimizers: a dict of these by optimizer.
        """
        state = state_of(self._seen_from())
        outcome: LastStep = self.engine.last_step() if state is None else state.known_outcome()
        return outcome

    @property
    def stats(self) -> Stats:
        """Counts of applied and skipped steps, over all optimizers, replays of a graph included. Waits for the device.

        Raises:
            LossScaleCollapsed: 50 overflows in a row at the floor, in replays of a captured graph; raised once.
        """
        self.engine.judge_replays()
        return self.engine.stats()

    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return plain numbers for a logger, under the same names at every level and for a ``GradScaler``.

        ``loss_scale`` (``loss_scale_1`` and so on for further losses); ``steps_applied`` and ``steps_skipped``, over
        all optimizers; ``last_step_skipped``, 1 where the last step was skipped; ``grad_norm``, what the last
        ``xamp.clip_grad_norm_`` returned, or without one the norm of the gradients there are, or nan where there are
        none; ``steps_late``, see ``wait``. For the session of a model, ``last_step_skipped`` counts its optimizers, and
        ``grad_norm`` is over all of them. A training step pays nothing for this. A norm of gradients that were not
        clipped is computed by this call; for sharded gradients it is nan.

        Args:
            wait: True: wait for the device, and return the numbers of this moment. False: do not wait where the device
                decides on steps and has asynchronous copies. The counts, the last outcome and the scale then lack the
                newest ``steps_late`` steps, at most 16 of each optimizer; the norm is that of an earlier call of this
                method, at most 16 calls before. On a CPU, and where the host decides on each step, nothing is late.
        """
        state = state_of(self._seen_from())
        return metrics.collect(self.engine, self.engine.states if state is None else [state], wait=wait)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the policy as a context manager, for code outside ``forward``.

        At O1 and O4 it casts as the forward does. At O0, O2, O3 and O5 it switches autocast off.
        """
        if not self.engine.enabled or not self.policy.apart:  # nothing casts, or the code outside is cast already
            return contextlib.nullcontext()
        lower = self.policy.dtype if self.policy.autocast else None
        return Region(self.device.type, lower, None, None, op_policy=self.policy.op_policy).autocast()

    @overload
    def state_dict(self, format: Literal["xamp"] = "xamp") -> SessionState: ...

    @overload
    def state_dict(self, format: str) -> Any: ...

    def state_dict(self, format: str = "xamp") -> Any:
        """See :func:`state_dict`, which also says what ``format`` may be."""
        return checkpoint.save(self.engine, format)

    def load_state_dict(self, state: Any) -> None:
        """Load ``state``: see :func:`load_state_dict`.

        With these two methods a session is a ``Stateful`` of torch.distributed.checkpoint.
        """
        checkpoint.load(self.engine, state)

    def close(self) -> None:
        """Make the models and optimizers plain fp32 objects again. A second call does nothing.

        If memory runs out, the session stays as it is. Ctrl-C during the call is raised when all is given back.

        Raises:
            StateError: a ``scale_loss`` is open, gradients are still scaled, or ``initialize(delegate=True)`` handed
                the models to another implementation.
        """
        self.engine.check_closable()
        self.engine.undo.prepare()
        self.engine.undo.unwind()


def register(engine: Engine, objects: Iterable[object]) -> None:
    """Make :func:`session` find ``engine`` for each of ``objects``."""
    for found in objects:
        _sessions[found] = Session(engine, found)


def forget_sessions(engine: weakref.ref[Engine], objects: Iterable[weakref.ReferenceType[Any]] | None = None) -> None:
    """Undo :func:`register`, for ``objects`` only or for all of the engine's."""
    keys = None if objects is None else {id(ref()) for ref in objects}
    for key, found in list(_sessions.items()):
        if found.engine is engine() and (keys is None or id(key) in keys):
            _sessions.pop(key, None)


def own_session(found: object) -> Session | None:
    """Return the session of what was itself given to ``initialize``, or None."""
    try:
        return _sessions.get(found)
    except TypeError:  # it admits no weak references
        return None


def find_session(found: object) -> Session | None:
    """Return the session of ``found``, or of what it wraps, or None."""
    own = own_session(found)
    if own is not None:
        return own
    inner = unwrap(found) if isinstance(found, nn.Module) else optimizer_in(found)
    return None if inner is None or inner is found else find_session(inner)


def session(obj: object) -> Session:
    """Return the session of a model or optimizer that was given to ``initialize``.

    Args:
        obj: the model, the optimizer, or what wraps one of them.

    Raises:
        StateError: the object was not given to ``initialize``, or its session was closed.
    """
    found = find_session(obj)
    if found is None:
        raise StateError(
            f"session({type(obj).__name__}): not given to xamp.initialize, or its session was closed. Pass the very "
            "model or optimizer that initialize returned; a copy has no session."
        )
    return found


def _the_engine(call: str, obj: object) -> Engine:
    """Return the engine of ``obj``; for None that of the only live session."""
    if obj is not None:
        return session(obj).engine
    live = list({id(found.engine): found.engine for found in _sessions.values()}.values())
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
    """Scale a loss, and unscale the gradients of its backward.

    ::

        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    At the end of the ``with`` block xamp unscales the gradients of ``optimizers`` (at O2 and O5 they are then in the
    masters' ``.grad``), checks them for inf and nan, and updates the loss scale once. All of this runs on the device.
    Where a wrapper postpones its reduction of the gradients (``no_sync``), all of this waits for the first
    ``scale_loss`` whose backward reduces.

    A stage of a pipeline, where the schedule runs backward and only the last stage has a loss, gives a one:
    ``torch.ones((), device=device)``. The result is the loss scale, by which the last stage multiplies its losses.

    Args:
        loss: a floating tensor of one element, on the session's device type.
        optimizers: the optimizer, or a list of all optimizers, whose parameters get gradients from ``loss``.
        loss_id: index of the loss scale to use, below the ``num_losses`` of ``initialize``.
        model: the DistributedDataParallel around the model. Needed only where xamp cannot see it run, because all of it
            is compiled.
        delay_unscale: leave the gradients scaled; a later ``scale_loss`` unscales them together with its own.
        delay_overflow_check: unscale the gradients, but ignore an overflow of this backward: neither skip the step nor
            move the scale.

    Returns:
        A context manager that yields the scaled loss, fp32.

    Raises:
        PolicyError: the loss or ``loss_id`` cannot be right; or ranks that share the model were given other settings.
        StateError: no session manages an optimizer, or the optimizers belong to different sessions; or another rank
            that shares the model does not come here.
    """
    states, engine = _states_of("scale_loss", optimizers)
    if model is not None:
        distributed.note_given(model)
    if not engine.enabled:
        if distributed.is_running():
            engine.compare_settings([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
        return _Unscaled(loss)
    _check_loss(loss, engine)
    scaler = _scaler_of("scale_loss", engine, loss_id)
    if engine.scale_loss is not None:
        given = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        return engine.scale_loss(
            loss, given, loss_id, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
        )
    if loss.dtype in masters.LOWER:
        loss = loss.float()
    if not engine.policy.manages_gradients:
        if distributed.is_running():
            engine.compare_settings([optimizers] if isinstance(optimizers, Optimizer) else optimizers)
        return _Unscaled(loss)
    return ScaledLoss(engine, states, scaler, loss, delay_unscale, delay_overflow_check)


class _Unscaled:
    """Yields a loss as it is. The compiler fails on a ``nullcontext(loss)`` with a ``backward`` in its body."""

    __slots__ = ("_loss",)

    def __init__(self, loss: torch.Tensor) -> None:
        self._loss = loss

    def __enter__(self) -> torch.Tensor:
        return self._loss

    def __exit__(self, *_: object) -> None:
        pass


def _scaler_of(call: str, engine: Engine, loss_id: object) -> LossScaler:
    """Return the scaler of ``loss_id``, or raise a PolicyError where there is none."""
    scalers = engine.scalers
    if not isinstance(loss_id, int) or not 0 <= loss_id < len(scalers):
        raise PolicyError(
            f"{call}(loss_id={shown(loss_id)}): initialize was called with num_losses={engine.policy.num_losses}, so "
            f"loss_id is one of 0 to {len(scalers) - 1}. Raise num_losses there."
        )
    return scalers[loss_id]


def _check_loss(loss: object, engine: Engine) -> None:
    if not isinstance(loss, torch.Tensor) or not loss.dtype.is_floating_point or loss.numel() != 1:
        shown = f"{loss.dtype}, shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise PolicyError(
            f"scale_loss(loss): the loss must be one floating element, and is {shown}. Reduce it first, as with "
            "loss.mean()."
        )
    if loss.device != engine.device and loss.device.type != engine.device.type:
        raise PolicyError(
            f"scale_loss(loss): the loss is on {loss.device}, the model on {engine.device}. Compute the loss where the "
            "model is."
        )


def _managed(optimizer: Any) -> Any:
    """``optimizer``, or the one inside it if only that was given to ``initialize``."""
    if state_of(optimizer) is not None or own_session(optimizer) is not None:
        return optimizer
    inner = optimizer_in(optimizer)
    return optimizer if inner is None or own_session(inner) is None else inner


def _states_of(call: str, optimizers: object) -> tuple[list[OptimizerState], Engine]:
    only = state_of(optimizers) or state_of(_managed(optimizers))
    if only is not None:
        return [only], only.engine  # type: ignore[return-value]  # the owner of a managed optimizer is an Engine
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise StateError(f"{call}: no optimizer given. Pass all whose parameters get gradients from this loss.")
    given = [_managed(optimizer) for optimizer in given]
    owners = [None if (found := find_session(optimizer)) is None else found.engine for optimizer in given]
    for optimizer, owner in zip(given, owners, strict=True):
        if owner is None or (owner.enabled and not owner.serves(optimizer)):
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
    """Iterate over the tensors that ``optimizer`` steps: the fp32 masters at O2 and O5, else the parameters.

    Raises:
        StateError: the gradients are still scaled, so it would be wrong to clip or read them now.
    """
    optimizer = _managed(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise StateError(f"master_params({type(optimizer).__name__}): must be given an optimizer.")
    state = state_of(optimizer)
    if state is not None:
        state.settle("master_params(optimizer)")
    return (param for group in optimizer.param_groups for param in group["params"])


def clip_grad_norm_(
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip the norm of all gradients that ``optimizer`` will apply, in place, without waiting for the device.

    Where parameters are sharded (FSDP1, FSDP2, DTensor), some or all of them, the norm is that of the whole gradients,
    the same on every rank, and every rank must call this.

    Args:
        optimizer: one optimizer, or several whose gradients count as one vector.
        max_norm: the largest norm allowed.
        norm_type: the p of the p-norm; may be inf.
        error_if_nonfinite: raise where the norm is inf or nan and the step would be taken with it. Where an overflow
            will skip the step anyway, nothing is raised, so that the loss scale can fall. Waits for the device.

    Returns:
        The norm before clipping, a scalar tensor.

    Raises:
        StateError: the gradients are still scaled; or FSDP1 shards them, and ``initialize`` was not given its module;
            or ``error_if_nonfinite``, and then no gradient was clipped.
        PolicyError: ``max_norm`` or ``norm_type`` is no number.
    """
    max_norm, norm_type = _as_number("max_norm", max_norm), _as_number("norm_type", norm_type)
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    params = [(one, param) for one in given for param in master_params(one)]  # type: ignore[arg-type]
    if boolean("error_if_nonfinite", error_if_nonfinite, call="clip_grad_norm_"):
        _refuse_nonfinite(given, params, norm_type)
    if norms.is_divided(param for _, param in params):
        norm = norms.clip([(param, _layout(one, param)) for one, param in params], max_norm, norm_type)
    else:
        norm = torch.nn.utils.clip_grad_norm_([param for _, param in params], max_norm, norm_type)
    for one in given:
        inner = _managed(one)
        metrics.note_norm(inner, state_of(inner), norm)
    return norm


def _refuse_nonfinite(given: Sequence[Any], params: Sequence[tuple[Any, torch.Tensor]], norm_type: float) -> None:
    """Raise a StateError where the norm is inf or nan, and none of the optimizers will skip its step for it."""
    if norms.is_divided(param for _, param in params):
        norm = norms.total([(param, _layout(one, param)) for one, param in params], norm_type)
    else:
        norm = torch.nn.utils.get_total_norm([p.grad for _, p in params if p.grad is not None], norm_type)
    states = [state for one in given if (state := state_of(_managed(one))) is not None]
    if math.isfinite(float(norm)) or any(bool(state.sticky) for state in states):
        return
    raise StateError(
        f"clip_grad_norm_(error_if_nonfinite=True): the {norm_type}-norm of the gradients is {float(norm)}, and the "
        "step would be taken. No gradient was clipped. Look for the first non-finite value with `with "
        'xamp.debug.find_nonfinite(model, optimizer) as found:`, or pass on_static_overflow="skip" to '
        "xamp.initialize, which then skips such steps."
    )


def clip_grad_value_(optimizer: Optimizer | Sequence[Optimizer], clip_value: float) -> None:
    """Clip each element of the gradients that ``optimizer`` will apply to at most ``clip_value`` in size, in place.

    Does not wait for the device. At O2 and O5 it clips the gradients of the fp32 masters. A step that overflowed is
    skipped all the same: its inf was seen before it was clipped. Sharded gradients are clipped on the rank that has
    them.

    Args:
        optimizer: one optimizer, or several.
        clip_value: the largest size allowed, of the unscaled gradients; 0 or more.

    Raises:
        StateError: the gradients are still scaled.
        PolicyError: ``clip_value`` is no such number.
    """
    limit = number("clip_value", clip_value, call="clip_grad_value_")
    if limit < 0:
        raise PolicyError(f"clip_grad_value_(clip_value={shown(clip_value)}): must be a number, 0 or above.")
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    params = [param for one in given for param in master_params(one)]  # type: ignore[arg-type]
    torch.nn.utils.clip_grad_value_([p for p in params if not shards.is_dtensor(p)], limit)
    for param in params:
        if shards.is_dtensor(param) and param.grad is not None:
            shards.local(param.grad).clamp_(-limit, limit)


def _layout(optimizer: object, param: torch.Tensor) -> Layout:
    """Return how the elements of a parameter of ``optimizer`` lie on the ranks."""
    found = find_session(optimizer)
    return layout_of(param, {}) if found is None else found.engine.layout(param)


def _as_number(name: str, value: Any) -> Any:
    return value if isinstance(value, _NUMBERS) else number(name, value, call="clip_grad_norm_")


def loss_scale(obj: object = None, loss_id: int = 0) -> float:
    """Return the loss scale; 1.0 for a disabled session. Waits for the device.

    Args:
        obj: a model or optimizer; None where only one session is live.
        loss_id: index of the loss scale in the session.

    Raises:
        StateError: there is no session, or there are several and ``obj`` is None.
        PolicyError: ``loss_id`` is out of range.
    """
    found = _the_engine("loss_scale()", obj)
    if not found.enabled:
        return 1.0
    return float(_scaler_of("loss_scale", found, loss_id).scale)


@overload
def state_dict(obj: object = None, format: Literal["xamp"] = "xamp") -> SessionState: ...


@overload
def state_dict(obj: object = None, *, format: str) -> Any: ...


@overload
def state_dict(obj: object, format: str) -> Any: ...


def state_dict(obj: object = None, format: str = "xamp") -> Any:
    """Return the state of a session: its loss scales and exact masters.

    A run that resumes exactly needs this besides the states of model and optimizer. The call waits for the device.

    Args:
        obj: a model or optimizer; None where only one session is live.
        format: ``"xamp"``; or ``"torch"`` or ``"torch_npu"`` for the state of their GradScaler, to go back to it: a
            list of such states if ``num_losses`` is above 1, an empty dict if ``enabled=False``.

    Returns:
        Plain dicts and lists of numbers, strings and CPU tensors, which ``torch.load(weights_only=True)`` takes. The
        tensors are copies: 4 bytes for each parameter that has a master.

    Raises:
        StateError: there is no session, or there are several and ``obj`` is None.
        PolicyError: there is no such format.
    """
    return checkpoint.save(_the_engine("state_dict()", obj), format)


def load_state_dict(state: Any, obj: object = None) -> None:
    """Load a state of :func:`state_dict`, of torch's or torch_npu's GradScaler, or of apex.amp.

    It may be loaded before or after the states of model and optimizer. A loss scale is loaded if it is dynamic both in
    the state and in this session, and is kept within this session's bounds; all other settings of the scale stay as
    ``initialize`` was told. A saved master is written into the master and its parameter, or cast into the parameter
    where this session has no master.

    Args:
        state: the state. xamp does not keep it.
        obj: a model or optimizer; None where only one session is live.

    Raises:
        CheckpointError: the state does not fit. The message names the key, and nothing was changed.
        StateError: there is no session, or there are several and ``obj`` is None, or a ``scale_loss`` is open.
    """
    checkpoint.load(_the_engine("load_state_dict()", obj), state)
