"""The gradients of one optimizer: scaled on entering ``scale_loss``, unscaled and moved to the masters on leaving.

On entering, gradients of earlier losses on parameters without a master are multiplied by the scale, so that the
backward adds scaled to scaled, or put aside where that would not be exact; masters keep theirs. On leaving, gradients
of low-precision parameters move into the masters, and all that is new is multiplied by 1/scale and checked on the
device. Until ``optimizer.step()`` they are unscaled, so that clipping and logging see the numbers that fp32 would give.

:class:`Gradients` owns them: it answers for a parameter where its gradient is, and every clear, drop, move and hold is
begun by one of its methods. :class:`State` says what they are to whoever looks from outside, as the tests of this table
do. A cell is the state that comes next; "error" stands for a StateError that changes nothing. If the body raises after
its backward began, the gradients to which that backward added are dropped; masters, which it did not reach, keep
theirs::

    call                              CLEAR     SCALED    UNSCALED  SPENT
    scale_loss                        UNSCALED  UNSCALED  UNSCALED  UNSCALED
    scale_loss(delay_unscale=True)    SCALED    SCALED    SCALED    SCALED
    its body raises, no backward ran  CLEAR     SCALED    UNSCALED  SPENT
    its body raises after backward()  CLEAR     CLEAR     CLEAR     CLEAR
    the same, where masters are all   CLEAR     CLEAR     UNSCALED  SPENT
    backward() without scale_loss     SPENT     SCALED    UNSCALED  SPENT
    clip_grad_norm_                   CLEAR     error     UNSCALED  SPENT
    optimizer.step()                  CLEAR     error     SPENT     error
    optimizer.zero_grad()             CLEAR     CLEAR     CLEAR     CLEAR
    model.zero_grad()                 CLEAR     CLEAR     CLEAR     CLEAR
    xamp.load_state_dict              CLEAR     SCALED    SPENT     SPENT

At a level with masters the gradients of a ``backward()`` without ``scale_loss`` are on the model, and also after
UNSCALED an error at the next call that reads or steps; without masters they are in the sum, and nobody can tell. A
``scale_loss`` that finds no gradient, and leaves none, changes no state.

With ``fused="one-pass"`` the gradients of UNSCALED and SPENT may be held (:mod:`xamp.scaling.held`): off the model,
and not yet in the masters. The table is the same.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from xamp.contract import Backend
from xamp.distributed.ranks import local
from xamp.errors import StateError
from xamp.policy import Policy
from xamp.scaling import masters, moves, unscale
from xamp.scaling.backwards import Backwards
from xamp.scaling.fellows import Unreduced
from xamp.scaling.masters import Pair
from xamp.scaling.moves import Fate, GradientSentinel
from xamp.scaling.parameters import Parameters, any_has_gradient
from xamp.scaling.scale import LossScaler

if TYPE_CHECKING:  # loaded where steps in one pass are asked for
    from xamp.scaling.held import Held
    from xamp.scaling.one_pass import OnePass

__all__ = ["Gradients", "State", "clear_gradients", "optimizer_of"]

_owners: Any = WeakIdKeyDictionary()  # low-precision parameter -> the Gradients that answer for it, weakly


class State(enum.Enum):
    """The state of an optimizer's gradients."""

    CLEAR = "there are none"
    SCALED = "they are multiplied by a scale, which a later scale_loss takes out"
    UNSCALED = "they came through scale_loss since the last step"
    SPENT = "a step has seen them, or they did not come through scale_loss"


class _Pending(NamedTuple):
    """The scale of gradients that were left scaled, and the reason.

    Attributes:
        window: :attr:`xamp.scaling.scale.LossScaler.window` of the scale.
        inverse: 1/scale, a copy.
        why: the reason, for messages.
    """

    window: int
    inverse: torch.Tensor
    why: str


class _Snapshot(NamedTuple):
    """The gradients as a backward found them, to find out after an exception whether the body changed them.

    Attributes:
        grads: the gradients.
        versions: theirs.
        multiplied: they were multiplied by the scale.
    """

    grads: Sequence[torch.Tensor] = ()
    versions: Sequence[int] = ()
    multiplied: bool = False

    @classmethod
    def of(cls, grads: Sequence[torch.Tensor], *, multiplied: bool = False) -> _Snapshot:
        return cls(grads, [_version(grad) for grad in grads], multiplied)

    def is_untouched(self, now: Sequence[torch.Tensor]) -> bool:
        """Return whether ``now`` holds the same tensors as on entry, and nobody has written to them."""
        return len(now) == len(self.grads) and all(
            a is b and _version(a) == v for a, b, v in zip(now, self.grads, self.versions, strict=True)
        )


_NO_GRADIENTS = _Snapshot()


def _version(grad: torch.Tensor) -> int:
    """Return a number that each write changes: autograd writes into the shell of a DTensor, FSDP2 into its part."""
    return grad._version + local(grad)._version


class Gradients:
    """The gradients of one optimizer.

    Attributes:
        params: what the optimizer steps.
        came_through: they came through ``scale_loss`` since the last step; somebody may have cleared them since.
        pending: what is known of gradients that are still scaled; None: there are none.
        backwards: the loss scales of the backwards since the last step.
        held: those that were taken off the model for a step in one pass; None: they are in ``.grad``.
        one_pass: holds gradients and steps with them; None: nobody asked for that.
    """

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        optimizer: weakref.ReferenceType[Optimizer],
        unreduced: Unreduced,
        met_sparse: Callable[[Optimizer], None],
    ) -> None:
        self.params = Parameters()
        self.came_through = False
        self.pending: _Pending | None = None
        self.backwards = Backwards()
        self.held: Held | None = None
        self.one_pass: OnePass | None = None
        self._policy = policy
        self._backend = backend
        self._optimizer = optimizer
        self._unreduced = unreduced
        self._met_sparse = met_sparse
        self._snapshot = _NO_GRADIENTS
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and gradients that were put aside
        self._sentinel: GradientSentinel | None = None  # None: no masters, or their parameters keep gradients

    def find_parameters(self, groups: Iterable[Mapping[str, Any]], pairs: Iterable[Pair]) -> None:
        """Read an optimizer's ``groups`` again. ``pairs``: all parameters of the session with their masters."""
        self.take_in_clears()
        self.move_held()
        before = self._sentinel
        was_there = before is not None and before.fate() is Fate.UNTOUCHED
        if before is not None:
            before.take()
        self.params = params = Parameters.of(groups, pairs)
        self._sentinel = self._make_sentinel()
        if self._sentinel is not None and was_there:
            self._sentinel.put()
        for param, _ in params.pairs:
            _owners[param] = weakref.ref(self)

    def _make_sentinel(self) -> GradientSentinel | None:
        return GradientSentinel(self.params.pairs, weakref.ref(self)) if self.params.pairs else None

    def use_one_pass(self, one_pass: OnePass | None) -> None:
        """Hold gradients for steps in one pass from now on; None: no more."""
        self.move_held()
        self.one_pass = one_pass

    # ---------------------------------------------------------------- where they are

    def present(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each stepped tensor that has a gradient, and that gradient; held ones are scaled as they are."""
        found = [(p, p.grad) for p in self.params.stepped if p.grad is not None]
        return found if self.held is None else [*found, *self.held.present()]

    def count_missing(self) -> int:
        """Return how many stepped tensors have no gradient."""
        return len(self.params.stepped) - len(self.present())

    def not_finite(self) -> list[torch.Tensor]:
        """Return the stepped tensors whose gradient holds inf or nan, in order. Waits for the device."""
        found = {id(p) for p, grad in self.present() if not bool(unscale.values(grad).isfinite().all())}
        return [p for p in self.params.stepped if id(p) in found]

    def all_zero(self) -> bool:
        """Return whether every gradient is zero or absent. Waits for the device."""
        of_the_models = [p.grad for p, _ in self.params.pairs if p.grad is not None]
        return not any(bool(unscale.values(g).any()) for g in (*(g for _, g in self.present()), *of_the_models))

    @property
    def state(self) -> State:
        """The state of the gradients; see the module."""
        if self.pending is not None and self._scaled():
            return State.SCALED
        if not self.were_cleared():
            return State.UNSCALED
        return State.SPENT if self.has_stray() else State.CLEAR

    def has_stray(self) -> bool:
        """Return whether some gradients did not come through ``scale_loss`` since the last step."""
        if not self.came_through and self._is_any_present():
            return True
        return self._sentinel is not None and self._sentinel.has_others()

    def were_cleared(self) -> bool:
        """Return whether the gradients that came through ``scale_loss`` since the last step are gone."""
        return not self.came_through or not (self._is_any_present() or self.params.in_shards)

    def _is_any_present(self) -> bool:
        return self.held is not None or any_has_gradient(self.params.stepped)

    def _without_master(self) -> list[torch.Tensor]:
        return [p.grad for p in self.params.without_master if p.grad is not None]

    def _scaled(self) -> list[torch.Tensor]:
        """Return the gradients that are scaled while some are pending: those of the models, and unreduced ones."""
        own = [p.grad for p in self.params.of_the_models if p.grad is not None]
        return [*own, *self._unreduced.gradients()]

    # ---------------------------------------------------------------- refused, and what others did to them

    def refuse(self, call: str) -> Fate:
        """Raise a StateError where ``call`` cannot be right, whatever it is: a part of the gradients was cleared.

        Returns:
            The fate of the model's gradients.
        """
        if self._sentinel is None and self.held is None:
            return Fate.NOTHING_LEFT
        fate = Fate.NOTHING_LEFT
        if self._sentinel is not None:
            self._sentinel.adopt_copies()
            fate = self._sentinel.fate()
        if self.held is not None and fate is not Fate.CLEARED:
            self.held.refuse(call)
        if fate is Fate.CLEARED_IN_PART:
            raise StateError(
                f"{call}: since scale_loss the gradients of a part of the model were cleared, by p.grad = None or by "
                "zero_grad() of a submodule, and at this level the fp32 masters hold the gradients. Clear those of a "
                "part inside of the with block, after backward(), and all of them with optimizer.zero_grad()."
            )
        return fate

    def adopt_copies(self) -> None:
        """Let copies that a wrapper has made of the sentinel, as it does where a forward begins, stand for it."""
        if self._sentinel is not None:
            self._sentinel.adopt_copies()

    def refuse_reading(self, call: str) -> bool:
        """Raise a StateError where ``call`` would read gradients that are scaled, or not of ``scale_loss`` alone.

        Return whether :meth:`take_in_clears` may have something to take in.
        """
        if self._sentinel is None and self.held is None and self.pending is None:
            return False  # nothing but the gradients of what is stepped
        fate = self.refuse(call)
        there = None if self.held is None else self._sentinel
        if fate is Fate.WRITTEN or (there is not None and there.has_others()):
            raise moves.error_for_written(call)
        if self.pending is not None:
            self.refuse_scaled(call)
        return fate is Fate.CLEARED or self.pending is not None

    def refuse_scaled(self, call: str) -> None:
        """Raise a StateError if gradients are still scaled."""
        if self.pending is not None and self._scaled():
            raise StateError(
                f"{call}: the gradients are still scaled, because {self.pending.why}. Run a scale_loss over this "
                "optimizer that unscales them first, or clear them."
            )

    def take_in_clears(self) -> None:
        """Drop gradients whose counterparts on the model somebody has cleared since. Called after a ``refuse``."""
        if self._sentinel is not None and self._sentinel.fate() is Fate.CLEARED:
            self._drop_masters()
            self._sentinel.take()
        if self.pending is not None and not self._scaled():
            self._forget_pending()

    # ---------------------------------------------------------------- into the scale

    def look_before_entry(self) -> None:
        """Before a backward: take in what others did to the gradients meanwhile, and let masters have theirs."""
        if self._sentinel is not None or self.pending is not None:
            self.take_in_clears()
            self._take_zeros()
        if self.held is not None:
            self.move_held()

    def enter(self, scaler: LossScaler) -> None:
        """Bring existing gradients to the scale of the backward that comes, or put them aside."""
        if self.pending is not None:
            self._rescale(self.pending, scaler)
            return
        self._aside = []
        if self.params.pairs:
            self._keep_strays(scaler)
        existing, unreduced = self._without_master(), self._unreduced.gradients()
        if not existing and not unreduced:
            self._snapshot = _NO_GRADIENTS
            self.backwards.nothing_left()
            return
        counted_elsewhere = self.backwards.counted_elsewhere(scaler)
        if not self._policy.scales:
            self._snapshot = _Snapshot.of([*existing, *unreduced])
            return
        multiplied = self._may_multiply(scaler, counted_elsewhere)
        unscale.multiply_([*existing, *unreduced] if multiplied else unreduced, scaler.scale)
        if not multiplied:
            self._aside = [(p, p.grad.detach().clone()) for p in self.params.without_master if p.grad is not None]
            unscale.zero_(existing)
        self._snapshot = _Snapshot.of([*existing, *unreduced], multiplied=multiplied)

    def _take_zeros(self) -> None:
        """Take the sentinel away. What a backward without ``scale_loss`` has added to it stays."""
        if self._sentinel is None:
            return
        if self._sentinel.fate() is Fate.WRITTEN and not self._sentinel.has_numbers():
            self._drop_masters()  # by zero_()
        self._sentinel.take()

    def _keep_strays(self, scaler: LossScaler) -> None:
        """Let gradients of low-precision parameters count, which a ``backward()`` without ``scale_loss`` has left."""
        strays = [p.grad for p, _ in self.params.pairs if p.grad is not None]
        if not strays:
            return
        if not self._unreduced.by_wrapper():
            moves.transfer(self.params, None)
        elif self._policy.scales:  # a wrapper may yet reduce them
            unscale.multiply_(strays, scaler.scale)

    def _may_multiply(self, scaler: LossScaler, counted_elsewhere: bool) -> bool:
        """Return whether existing gradients may be multiplied by the scale, and be checked once more.

        Gradients that came without ``scale_loss`` under a wrapper must: it may have yet to reduce them with the next.
        Others may where the product is exact and no overflow among them was counted: that would hide one of this
        backward, or be counted again.
        """
        if self._unreduced.by_wrapper() and not self.came_through:
            return True
        return scaler.exact and self.params.in_fp32 and not counted_elsewhere

    def _rescale(self, pending: _Pending, scaler: LossScaler) -> None:
        """Bring gradients that are still scaled to another scale."""
        scaled = self._scaled()
        if pending.window != scaler.window:  # no two scalers have the same
            unscale.multiply_(scaled, scaler.scale * pending.inverse)
            self.pending = _Pending(scaler.window, scaler.inverse.clone(), pending.why)
        self._snapshot = _Snapshot.of(scaled)

    # ---------------------------------------------------------------- out of the scale

    def unscale(self, scaler: LossScaler, found_inf: torch.Tensor | None, first: bool, counts: bool = True) -> None:
        """Unscale the gradients of the backward that just ended.

        Args:
            scaler: the scale that the gradients have.
            found_inf: fp32, one element, raised to 1.0 if a gradient is not finite; None: gradients are not checked.
            first: this is the first check since the last step, so gradients left from before it are checked too.
            counts: the check counts for the window of the scale.
        """
        self.pending = None
        self.backwards.checked(scaler, counts=counts)
        self.held = None if self.one_pass is None else self._hold(self.one_pass, scaler, found_inf)
        grads = self._without_master()
        if self._policy.scales and not (self.held is not None and found_inf is not None):  # else a kernel has done it
            self._unscale(grads, scaler, found_inf, self.params.without_master)
        moved = self.held is not None
        if self.params.pairs and self.held is None:
            moved = self._move_to_masters(scaler, found_inf, first)
        if self._sentinel is not None:
            self._sentinel.put()
        if self._aside:
            self._put_back(found_inf if first else None)
        self._snapshot = _NO_GRADIENTS
        if grads or moved or self.params.in_shards:
            self.came_through = True
        if self._policy.casts_parameters and (optimizer := self._optimizer()) is not None:
            self._backend.join_gradients(optimizer)

    def _hold(self, one_pass: OnePass, scaler: LossScaler, found_inf: torch.Tensor | None) -> Held | None:
        """Take the gradients off the model for a step in one pass, if they may be held."""
        optimizer = self._optimizer()
        if optimizer is None or self.params.has_gradient_on_master():
            return None
        if self._unreduced.by_wrapper() and any(p.grad is not None and p.grad._is_view() for p, _ in self.params.pairs):
            return None  # DDP writes its buckets anew in the next forward
        held = one_pass.hold(optimizer, scaler.inverse if self._policy.scales else None, found_inf)
        if held is not None:
            self._drop_low_precision()
        return held

    def _move_to_masters(self, scaler: LossScaler, found_inf: torch.Tensor | None, first: bool) -> bool:
        """Move the gradients from the low-precision parameters to the masters; return whether there was any."""
        if first and found_inf is not None:
            self._check_left_over([m.grad for _, m in self.params.pairs if m.grad is not None], found_inf)
        return moves.transfer(self.params, self._finisher(scaler, found_inf))

    def _finisher(self, scaler: LossScaler, found_inf: torch.Tensor | None) -> moves.Finish | None:
        return (lambda grads: self._unscale(grads, scaler, found_inf)) if self._policy.scales else None

    def _put_back(self, found_inf: torch.Tensor | None) -> None:
        """Add the gradients that were put aside, but for those cleared meanwhile; check them if ``found_inf`` is."""
        back = [(p.grad, old) for p, old in self._aside if p.grad is not None]
        self._aside = []
        if back and found_inf is not None:
            self._check_left_over([old for _, old in back], found_inf)
        unscale.add_(back)

    def _unscale(
        self,
        grads: list[torch.Tensor],
        scaler: LossScaler,
        found_inf: torch.Tensor | None,
        params: Sequence[torch.Tensor] = (),
    ) -> None:
        """Multiply ``grads`` by 1/scale and check them.

        Args:
            grads: the gradients.
            scaler: the scale that they have.
            found_inf: see :meth:`unscale`.
            params: the parameters that hold ``grads`` as ``.grad``; empty where ``grads`` are new fp32 copies.
        """
        if not grads:
            return
        if found_inf is None:
            unscale.multiply_(grads, scaler.inverse)
            return
        unscale_ = self._backend.unscale_
        if self.params.in_parts:  # torch would ask the ranks of the mesh for their flags; they agree later
            grads = [*map(local, grads)]
        if self.params.of_one_kind and grads[0].device == found_inf.device:
            try:
                unscale_(grads, found_inf, scaler.inverse)
                return
            except (RuntimeError, NotImplementedError):
                # torch refuses sparse and complex gradients before it changes anything. To look for them first would
                # cost 10 us at 300 gradients.
                if not any(g.is_sparse or g.is_complex() for g in grads):
                    raise
        if any(g.is_sparse for g in grads):
            if (optimizer := self._optimizer()) is not None:
                self._met_sparse(optimizer)
            if params:
                unscale.coalesce_half(params)
                grads = [p.grad for p in params if p.grad is not None]
        unscale.unscale_by_group_(grads, found_inf, scaler.inverse, unscale_)

    def _check_left_over(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Check gradients that the user did not clear after the last step, which may have been skipped."""
        unscale.check(grads, found_inf, self._backend.unscale_)

    def postpone(self, scaler: LossScaler, why: str) -> None:
        """Leave the gradients scaled until a later ``scale_loss``. What was put aside stays there until then."""
        self.pending = _Pending(scaler.window, scaler.inverse.clone(), why)
        self.backwards.owe(scaler)
        self._snapshot = _NO_GRADIENTS

    # ---------------------------------------------------------------- held ones

    def move_held(self) -> None:
        """Move held gradients into the masters: somebody reads them there, or they cannot be held any longer."""
        held, self.held = self.held, None
        if held is not None:
            with torch.inference_mode(False):
                held.move(moves.chunks)

    def held_norm(self, norm_type: Any) -> torch.Tensor | None:
        """Return the norm of all unscaled gradients where they are held, fp32; None if they are not, or none can."""
        held, optimizer = self.held, self._optimizer()
        is_order = isinstance(norm_type, float | int) and norm_type > 0
        if held is None or self.one_pass is None or optimizer is None or not is_order:
            return None
        return self.one_pass.norm(optimizer, held, float(norm_type))

    def clip_held(self, norm: torch.Tensor, max_norm: Any) -> None:
        """Clip gradients whose norm is ``norm``: held ones when they are read, the others now."""
        held, optimizer = self.held, self._optimizer()
        if held is not None and self.one_pass is not None and optimizer is not None:
            self.one_pass.clip(optimizer, held, norm.to(held.pairs[0][1].device), max_norm)

    def end_step(self, *, drop_held: bool = False) -> None:
        """Note that a step has seen the gradients. ``drop_held``: nobody may read those that were held any more."""
        self.came_through = False
        self.backwards = Backwards()  # the record of this step keeps the old one's numbers
        if drop_held:
            self.held = None

    # ---------------------------------------------------------------- dropped and cleared

    def drop_backward(self, scaler: LossScaler) -> None:
        """Drop the gradients that a backward has added whose body raised.

        Gradients that the body did not touch become what they were; others are dropped, because nobody can take half a
        backward out of them. So are low-precision gradients that came without ``scale_loss`` under a wrapper.
        """
        if self.pending is not None:
            if not self._snapshot.is_untouched(self._scaled()):
                self.drop()
            return
        self._drop_low_precision()
        if not self._snapshot.is_untouched([*self._without_master(), *self._unreduced.gradients()]):
            self.drop()
        elif self._snapshot.multiplied:
            unscale.multiply_(self._snapshot.grads, scaler.inverse)
        else:
            if self._policy.scales and (unreduced := self._unreduced.gradients()):
                unscale.multiply_(unreduced, scaler.inverse)
            self._put_back(None)
        self._snapshot = _NO_GRADIENTS
        if self._sentinel is not None and self.params.has_gradient_on_master():
            self._sentinel.put()

    def drop(self) -> None:
        """Drop all gradients, those put aside, held or still scaled as well."""
        for param in (*self.params.of_the_models, *self.params.stepped):
            param.grad = None
        unscale.zero_(self._unreduced.gradients())
        self.held = None
        self._aside = []
        self._forget_pending()
        self.came_through = False
        if self._sentinel is not None:
            self._sentinel.forget()

    def cleared(self) -> None:
        """After ``optimizer.zero_grad()``: drop what that does not reach."""
        self.came_through = False
        if unreduced := self._unreduced.gradients():
            unscale.zero_(unreduced)
        self._aside = []
        if self.pending is not None or self.backwards.owed:
            self._forget_pending()
        if self.params.pairs:
            self.held = None
            self._drop_low_precision()
            if self._sentinel is not None:
                self._sentinel.forget()

    def clear(self, params: Sequence[nn.Parameter]) -> None:
        """Clear the gradients of the masters of some parameters, whose own were cleared just now."""
        if self.held is not None and not self.held.clear(params):
            self.held = None
        for param in params:
            master = masters.master_of(param)
            if master is not None:
                master.grad = None
        if self._sentinel is not None:
            self._sentinel.renew()

    def _drop_low_precision(self) -> None:
        for param, _ in self.params.pairs:
            param.grad = None

    def _drop_masters(self) -> None:
        self.held = None
        for _, master in self.params.pairs:
            master.grad = None

    def _forget_pending(self) -> None:
        self.pending = None
        self.backwards.owe_nothing()


def optimizer_of(param: torch.Tensor) -> Optimizer | None:
    """Return the managed optimizer that steps the master of ``param``; None: it has no master, or none steps it."""
    ref = _owners.get(param)
    owner = None if ref is None else ref()
    return None if owner is None else owner._optimizer()


def clear_gradients(model: nn.Module) -> None:
    """Clear the gradients of the masters of ``model``'s parameters, where ``zero_grad`` has cleared its own."""
    found: dict[int, tuple[Gradients, list[nn.Parameter]]] = {}
    for param in model.parameters() if masters.any_low_precision() else ():
        ref = _owners.get(param)
        if ref is not None and (owner := ref()) is not None:
            found.setdefault(id(owner), (owner, []))[1].append(param)
    for owner, params in found.values():
        owner.clear(params)
