"""Sessions: what one call of ``initialize`` made, found from its models and optimizers.

A :class:`Session` gives one model or optimizer access to its :class:`~xamp.scaling.engine.Engine`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.casting.region import Region
from xamp.contract import Backend
from xamp.distributed import ddp as ddps
from xamp.distributed.ranks import is_running
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.scaling.counts import Stats, StepOutcome
from xamp.scaling.engine import Engine
from xamp.scaling.masters import is_low_precision
from xamp.scaling.optimizer import state_of
from xamp.sessions.foreign import optimizer_in, unwrap
from xamp.torch_compat.compiler import eager_by_rule
from xamp.values.log import say

if TYPE_CHECKING:
    from xamp.sessions.formats import SessionState  # a training need not load it
    from xamp.sessions.fp8_layers import Fp8Layer

__all__ = [
    "Session",
    "StepOutcome",
    "end_session",
    "find_session",
    "forget_sessions",
    "load_state_dict",
    "managed",
    "register",
    "session",
    "session_for",
    "state_dict",
    "the_engine",
]

LastStep: TypeAlias = StepOutcome | dict[Optimizer, StepOutcome | None] | None
"""The outcome of one optimizer's last step, None before the first; for several optimizers a dict of these."""

# Each model, wrapper and optimizer that was given to initialize -> its session.
_sessions: MutableMapping[Any, Session] = WeakIdKeyDictionary()


class Session:
    """The settings and the state that one call of ``initialize`` made, seen from one of its models or optimizers."""

    def __init__(self, engine: Engine, seen_from: object) -> None:
        self._engine = engine
        self._seen_from = weakref.ref(seen_from)

    @property
    def engine(self) -> Engine:
        """The engine that all sessions of the call share. What an exception has left half done is repaired first."""
        self._engine.settle()
        return self._engine

    def __repr__(self) -> str:
        """Say what the session is, without waiting for the device: the newest steps may be missing in the numbers."""
        if not self.engine.enabled:
            return f"<xamp session: disabled, on {self.device}>"
        from xamp.sessions import metrics  # a training need not load it

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
        """Raise a StateError: a session is a view of live objects, which cannot be pickled or copied."""
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
    def fp8(self) -> tuple[Fp8Layer, ...]:
        """For each linear layer of the models: name, shape, whether it runs in fp8, and why. Empty without fp8."""
        from xamp.sessions.fp8_layers import layers_of

        return layers_of(self.engine)

    @property
    def last_step(self) -> LastStep:
        """Outcome of the last ``step()``: a StepOutcome. May wait for the device.

        None before the first step, and after one that found no gradient, which counts neither as applied nor as
        skipped. For the session of a model with several optimizers: a dict of these by optimizer.
        """
        state = state_of(self._seen_from())
        outcome: LastStep = self.engine.last_step() if state is None else state.outcomes.known()
        return outcome

    @property
    def stats(self) -> Stats:
        """Counts of applied and skipped steps, over all optimizers, replays of a graph included. Waits for the device.

        Raises:
            LossScaleCollapsed: 50 overflows in a row at the floor, in replays of a captured graph; raised once.
        """
        self.engine.judge_unseen()
        return self.engine.stats()

    @eager_by_rule
    def metrics(self, wait: bool = False) -> dict[str, float]:
        """Return Python numbers for a logger, under the same names at every level and for a ``GradScaler``.

        ``loss_scale`` (``loss_scale_1`` and so on for further losses); ``steps_applied`` and ``steps_skipped``, over
        all optimizers; ``last_step_skipped``, 1 where the last step was skipped, and for the session of a model the
        number of optimizers that skipped; ``grad_norm``, over all of them, what the last ``xamp.clip_grad_norm_``
        returned, or without one the norm of the gradients there are, or nan where there are none or they are sharded;
        ``steps_late``, see ``wait``. A training step pays nothing for this.

        Args:
            wait: True: wait for the device, and return the numbers of this moment. False: do not wait where the device
                decides on steps and has asynchronous copies. The counts, the last outcome and the scale then lack the
                newest ``steps_late`` steps, at most 16 of each optimizer; the norm is that of an earlier call of this
                method, at most 16 calls before. On a CPU, and where the host decides on each step, nothing is late.
        """
        state = state_of(self._seen_from())
        from xamp.sessions import metrics

        return metrics.collect(self.engine, self.engine.states if state is None else [state], wait=wait)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the policy as a context manager, for code outside ``forward``.

        At O1 and O4 it casts as the forward does. At O0, O2, O3 and O5 it switches autocast off.
        """
        if not self.engine.enabled or not self.policy.apart:  # nothing casts, or the code outside is cast already
            return contextlib.nullcontext()
        lower = self.policy.dtype if self.policy.autocast else None
        policy = self.policy
        return Region(self.device.type, lower, None, None, op_policy=policy.op_policy, fp8=policy.fp8).autocast()

    @overload
    def state_dict(self, format: Literal["xamp"] = "xamp") -> SessionState: ...

    @overload
    def state_dict(self, format: str) -> Any: ...

    def state_dict(self, format: str = "xamp") -> Any:
        """See :func:`state_dict`, which also says what ``format`` may be."""
        from xamp.sessions import checkpoint  # a training need not load it

        return checkpoint.save(self.engine, format)

    def load_state_dict(self, state: Any) -> None:
        """Load ``state``: see :func:`load_state_dict`.

        With these two methods a session is a ``Stateful`` of torch.distributed.checkpoint.
        """
        from xamp.sessions import checkpoint

        checkpoint.load(self.engine, state)

    def close(self) -> None:
        """Give the models and optimizers back in fp32 and in their own classes. A second call does nothing.

        If memory runs out, the session stays as it is. Ctrl-C during the call is raised when all is given back. At O2,
        O3 and O5 a DistributedDataParallel around a model reduces no gradients after this call, and a warning says so:
        wrap the model again before you train on.

        Raises:
            StateError: a ``scale_loss`` is open, gradients are still scaled, or ``initialize(delegate=True)`` handed
                the models to another implementation.
        """
        if end_session(self.engine):
            say(
                "close(): the model's parameters are fp32 again, and the DistributedDataParallel around them reduces "
                "their gradients no more. To train on, wrap the model again: DistributedDataParallel(model).",
                level=logging.WARNING,
            )


def end_session(engine: Engine) -> bool:
    """Close a session (:meth:`Session.close`), and return whether a DDP is left that reduces no gradients any more.

    It waits for those of parameters in the dtype that they had.
    """
    engine.refuse_closing()
    engine.move_held("session.close()")
    low_precision = [p for model in engine.models.alive().values() for p in model.parameters() if is_low_precision(p)]
    left = ddps.around(low_precision) if low_precision and is_running() else {}
    engine.undo.prepare()
    engine.undo.unwind()
    ddps.end(left)
    return bool(left)


def register(engine: Engine, objects: Iterable[object]) -> None:
    """Make :func:`session` find ``engine`` for each of ``objects``."""
    for found in objects:
        _sessions[found] = Session(engine, found)


def forget_sessions(engine: Engine, objects: Iterable[weakref.ReferenceType[Any]] | None = None) -> None:
    """Undo :func:`register`, for ``objects`` only or for all of the engine's."""
    keys = None if objects is None else {id(ref()) for ref in objects}
    for key, found in list(_sessions.items()):
        if found._engine is engine and (keys is None or id(key) in keys):
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
    return session_for(f"session({type(obj).__name__})", obj)


def session_for(call: str, obj: object) -> Session:
    """Return the session of ``obj`` for the public ``call``, which its error names."""
    if (found := find_session(obj)) is not None:
        return found
    raise StateError(
        f"{call}: not given to xamp.initialize, or its session was closed. Pass the very model or optimizer that "
        "initialize returned; a copy has no session."
    )


def managed(optimizer: Any) -> Any:
    """Return ``optimizer``, or the one inside it if only that was given to ``initialize``."""
    if state_of(optimizer) is not None or own_session(optimizer) is not None:
        return optimizer
    inner = optimizer_in(optimizer)
    return optimizer if inner is None or own_session(inner) is None else inner


def the_engine(name: str, obj: object) -> Engine:
    """Return the engine of ``obj``, which the public call ``name`` was given; None: that of the only live session."""
    if obj is not None:
        return session_for(f"{name}(obj={type(obj).__name__})", obj).engine
    live = list({id(found._engine): found.engine for found in list(_sessions.values())}.values())
    if len(live) != 1:
        raise StateError(
            f"{name}(): {len(live)} sessions are live, so it must be told which. Pass a model or optimizer of the one "
            "meant."
        )
    return live[0]


@overload
def state_dict(obj: object = None, format: Literal["xamp"] = "xamp") -> SessionState: ...


@overload
def state_dict(obj: object = None, format: str = "xamp") -> Any: ...


def state_dict(obj: object = None, format: str = "xamp") -> Any:
    """Return the state of a session: its loss scales and exact masters.

    A run that resumes exactly needs this besides the states of model and optimizer. The call waits for the device.

    Args:
        obj: a model or optimizer; None where only one session is live.
        format: ``"xamp"``; or ``"torch"`` or ``"torch_npu"`` for the state of their GradScaler, to go back to it: a
            list of such states if ``num_losses`` is above 1, an empty dict if ``enabled=False``.

    Returns:
        Dicts and lists of numbers, strings and CPU tensors, which ``torch.load(weights_only=True)`` takes. The
        tensors are copies: 4 bytes for each parameter that has a master.

    Raises:
        StateError: there is no session, or there are several and ``obj`` is None.
        PolicyError: there is no such format.
    """
    from xamp.sessions import checkpoint

    return checkpoint.save(the_engine("state_dict", obj), format)


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
    from xamp.sessions import checkpoint

    checkpoint.load(the_engine("load_state_dict", obj), state)
