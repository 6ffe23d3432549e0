"""The gradients of one optimizer: scaled on entering ``scale_loss``, unscaled and moved to the masters on leaving.

On entering, gradients of earlier losses on parameters without a master are multiplied by the scale, so that the
backward adds scaled to scaled; masters keep theirs. On leaving, gradients of low-precision parameters move into the
masters, and all that is new is multiplied by 1/scale and checked on the device. Until ``optimizer.step()`` they are
unscaled, so that clipping and logging see the numbers that fp32 would give.

What a call does depends on the :class:`State`. A cell of this table is the state that comes next; "error" stands for a
StateError that changes nothing. If the body raises after its backward began, what that backward added to is dropped.
Of CLEAR/UNSCALED the second word is for masters: nothing was added to them yet, so they keep their gradients::

    call                              CLEAR     SCALED    UNSCALED        SPENT
    scale_loss                        UNSCALED  UNSCALED  UNSCALED        UNSCALED
    scale_loss(delay_unscale=True)    SCALED    SCALED    SCALED          SCALED
    its body raises, no backward ran  CLEAR     SCALED    UNSCALED        SPENT
    its body raises after backward()  CLEAR     CLEAR     CLEAR/UNSCALED  CLEAR/SPENT
    backward() without scale_loss     SPENT     SCALED    UNSCALED        SPENT
    clip_grad_norm_                   CLEAR     error     UNSCALED        SPENT
    optimizer.step()                  CLEAR     error     SPENT           error
    optimizer.zero_grad()             CLEAR     CLEAR     CLEAR           CLEAR

Comprehensions bind a gradient by ``for g in (p.grad,)``: for ``(g := p.grad)``, whose name belongs to the function
around, Python takes 1.7 times as long.
"""

from __future__ import annotations

import enum
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.contract import Backend
from xamp.distributed.ranks import is_part, is_shard, local
from xamp.errors import StateError
from xamp.plans.waiting import Waiting
from xamp.policy import Policy
from xamp.scaling import masters, moves, unscale
from xamp.scaling.fused import FusedChoice
from xamp.scaling.one_pass import OnePass
from xamp.scaling.overflow_flag import read_flag
from xamp.scaling.scale import LossScaler

__all__ = ["NOTHING", "OUTSIDE", "Entry", "Gradients", "Pending"]

_params_of = operator.itemgetter("params")


class State(enum.Enum):
    """The state of an optimizer's gradients."""

    CLEAR = "there are none"
    SCALED = "they are multiplied by a scale, which a later scale_loss takes out"
    UNSCALED = "they came through scale_loss since the last step"
    SPENT = "a step has seen them, or they did not come through scale_loss"


class Pending(NamedTuple):
    """What is known of gradients that ``delay_unscale``, or a wrapper that has yet to reduce them, left scaled."""

    version: int
    """:attr:`xamp.scaling.scale.LossScaler.version` of the scale."""
    inverse: torch.Tensor
    """1/scale, a copy."""
    why: str
    """The reason, for messages."""
    overflow: torch.Tensor | None
    """On a chip that reports an overflow by a flag: the flag so far, because the next backward clears it."""


class Entry:
    """The gradients on entering ``scale_loss``, to find out after an exception whether the body changed them."""

    def __init__(
        self,
        grads: Sequence[torch.Tensor] = (),
        stash: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        complete: bool = True,
    ) -> None:
        self.grads = grads
        self.stash = stash  # (parameter, its gradient before)
        self.versions = [_version(g) for g in grads]
        self.complete = complete  # False: these are the gradients of before, and one operation changes them now

    def was_multiplied(self) -> bool:
        """Return whether the operation that was to multiply the gradients was run, on all of them."""
        return all(_version(g) == v + 1 for g, v in zip(self.grads, self.versions, strict=True))

    def untouched(self, now: Sequence[torch.Tensor]) -> bool:
        """Return whether ``now`` holds the same tensors as on entry, and nobody has written to them."""
        return len(now) == len(self.grads) and all(
            a is b and _version(a) == v for a, b, v in zip(now, self.grads, self.versions, strict=True)
        )

    def to_put_back(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs (gradient now, its value that was put aside), without gradients cleared in the meantime."""
        return [(p.grad, old) for p, old in self.stash or () if p.grad is not None]


def _version(grad: torch.Tensor) -> int:
    """Return a number that each write changes: autograd writes into the shell of a DTensor, FSDP2 into its part."""
    part = local(grad)
    return grad._version if part is grad else grad._version + part._version


NOTHING = Entry()  # there were no gradients
OUTSIDE = Entry()  # no backward has been entered: the gradients are what they were


class Gradients:
    """The gradients of one optimizer.

    Attributes:
        direct: parameters that the optimizer steps directly, because they have no master.
        pairs: low-precision parameters and the masters that the optimizer steps in their place.
        stepped: all tensors that the optimizer steps: ``direct`` and the masters.
        in_parts: some of ``direct`` are DTensors, or local tensors of such, so this rank has parts of them.
        count: how many parameters the groups hold.
        ready: gradients came through ``scale_loss`` since the last step, and nothing has dropped them.
        pending: what is known of gradients that are still scaled; None: there are none.
        used: by index, the loss scales that the gradients had since the last step, with
            :attr:`xamp.scaling.scale.LossScaler.updates` at the last check that counts for the window; None: none does.
        owed: by index, the loss scales of gradients that are still scaled. A later check moves them.
        mixed: the next check also sees gradients that were counted before; see :meth:`_notice_counted`.
        hidden: returns gradients that a wrapper keeps outside of any ``.grad``, to reduce them later; None: no wrapper.
        forward_overflow: on a chip that reports an overflow by a flag: the flag of the forwards since the last check.
        one_pass: what lets gradients wait for a step in one pass; None: no such step.
        waiting: the gradients that wait; None: those of the masters are where everybody looks for them.
        leaves_low_precision: low-precision parameters keep their scaled gradients after the masters have got theirs.
        sets_aside: gradients of earlier losses are put aside during a backward, and not checked again.
    """

    leaves_low_precision = False
    sets_aside = False

    def __init__(
        self,
        policy: Policy,
        backend: Backend,
        saturates: bool,
        fused: FusedChoice,
        optimizer: weakref.ReferenceType[Optimizer],
    ) -> None:
        self.direct: list[torch.Tensor] = []
        self.pairs: list[masters.Pair] = []
        self.stepped: list[torch.Tensor] = []
        self.ready = False
        self.used: dict[int, int | None] = {}
        self.owed: dict[int, LossScaler] = {}
        self.mixed = False
        self.hidden: Callable[[], Sequence[torch.Tensor]] | None = None
        self.forward_overflow: torch.Tensor | None = None
        self.one_pass: OnePass | None = None
        self.waiting: Waiting | None = None
        self.count = 0
        self._held: list[nn.Parameter] = []  # what the groups held when they were read
        self._has_counted = False
        self._scales = policy.scales
        self._reads_flag = policy.checks and saturates
        self._joins = policy.casts_parameters
        self._backend = backend
        self._fused = fused
        self._optimizer = optimizer
        self.pending: Pending | None = None
        self._entry = OUTSIDE
        self._sentinel: moves.GradientSentinel | None = None  # None: no masters, or their parameters keep gradients

    def find_parameters(self, groups: Iterable[Mapping[str, Any]], pairs: Iterable[masters.Pair]) -> None:
        """Sort the parameters in an optimizer's ``groups`` into :attr:`direct` ones and masters of ``pairs``."""
        if self.waiting is not None:
            self.materialize()
        param_of = {id(m): p for p, m in pairs}
        self.direct, self.pairs = [], []
        self._held = _all_in(groups)
        self.count = len(self._held)
        for param in self._held:
            low_precision = param_of.get(id(param))
            if low_precision is None:
                self.direct.append(param)
            else:
                self.pairs.append((low_precision, param))
        self.stepped = [*self.direct, *(m for _, m in self.pairs)]
        self.in_parts = any(map(is_part, self.direct))
        self._of_one_kind = len(set(map(unscale.kind, self.stepped))) <= 1
        self._in_fp32 = all(p.dtype == torch.float32 for p in self.direct)
        before = self._sentinel
        self._sentinel = moves.GradientSentinel(self.pairs) if self.pairs and not self.leaves_low_precision else None
        if before is not None and before.collect() and self._sentinel is not None:
            self._sentinel.leave()

    def not_held(self, groups: Sequence[Mapping[str, Any]]) -> list[nn.Parameter] | None:
        """Return the parameters in ``groups`` that were not there when :meth:`find_parameters` read them.

        None where the groups hold what they held, in the same order. To find that out costs 8 us for 300 parameters.
        """
        now = groups[0]["params"] if len(groups) == 1 else _all_in(groups)
        if len(now) == self.count and all(map(operator.is_, now, self._held)):
            return None
        known = set(map(id, self._held))
        return [p for p in now if id(p) not in known]

    def of_direct(self) -> list[torch.Tensor | None]:
        """Return the gradients of :attr:`direct`, in its order."""
        return [param.grad for param in self.direct]

    def model_params(self) -> list[torch.Tensor]:
        """Return the parameters as the models and their wrappers know them: low-precision parameters, not masters."""
        return [*self.direct, *(p for p, _ in self.pairs)]

    def not_finite(self) -> list[torch.Tensor]:
        """Return the stepped tensors whose gradient holds inf or nan. Waits for the device."""
        with_grad = [(p, p.grad) for p in self.stepped if p.grad is not None]
        return [p for p, grad in with_grad if not bool(unscale.values(grad).isfinite().all())]

    def all_zero(self) -> bool:
        """Return whether every gradient is zero or absent. Waits for the device."""
        grads = [p.grad for p in (*self.stepped, *self.model_params()) if p.grad is not None]
        return not any(bool(unscale.values(grad).any()) for grad in grads)

    @property
    def in_shards(self) -> bool:
        """Whether FSDP1 divides a parameter between ranks, so that others may have all gradients of this optimizer."""
        return any(map(is_shard, self.stepped))

    # ---------------------------------------------------------------- into the scale

    def drop_low_precision(self) -> None:
        """Clear the gradients of the low-precision parameters."""
        for param, _ in self.pairs:
            param.grad = None

    def enter(self, scaler: LossScaler) -> None:
        """Before a backward: bring existing gradients to the scale of that backward, or put them aside."""
        if self.waiting is not None:
            self.materialize("scale_loss")
        if self._sentinel is not None:
            self._sentinel.collect("scale_loss")
        if self.pending is not None:
            self._enter_pending(self.pending, scaler)
            return
        self.mixed = False
        # A backward() without scale_loss may have left gradients: they count.
        if self.pairs and any(p.grad is not None for p, _ in self.pairs):
            self._entry = NOTHING
            if self.hidden is None:
                moves.transfer(self.pairs, None)
            elif self._scales:  # a wrapper may yet reduce them
                unscale.multiply_([g for p, _ in self.pairs for g in (p.grad,) if g is not None], scaler.scale)
        existing = [g for p in self.direct for g in (p.grad,) if g is not None]
        unreduced: list[torch.Tensor] = []
        if self.hidden is not None:
            unreduced = self._unreduced()
            existing += unreduced
        if not existing:
            self._entry, self._has_counted = NOTHING, False
            return
        self._notice_counted(scaler)
        if not self._scales:
            self._entry = Entry(existing)
        elif unreduced or (not self.sets_aside and self._may_multiply(scaler)):
            self._entry = Entry(existing, complete=False)
            unscale.multiply_(existing, scaler.scale)
            self.mixed = self._has_counted
            self._entry = Entry(existing)
        else:
            stash = [(p, p.grad.detach().clone()) for p in self.direct if p.grad is not None]  # memory may run out here
            self._entry = Entry(existing, stash, complete=False)
            unscale.zero_(existing)
            self._entry = Entry(existing, stash)

    def _notice_counted(self, scaler: LossScaler) -> None:
        """Record whether existing gradients were counted for another window than that of ``scaler``.

        They were checked under another scale, or before a step of another optimizer ended the window. An overflow among
        them must not be counted again.
        """
        counted = self._has_counted and len(self.used) > 0
        for index, updates in self.used.items():
            counted = counted or index != scaler.index or updates != scaler.updates
        self._has_counted = counted

    def _may_multiply(self, scaler: LossScaler) -> bool:
        """Return whether existing gradients may be multiplied by the scale, and be checked once more.

        Gradients that came without ``scale_loss`` under a wrapper must: it may have yet to reduce them with the next.
        Others may where the product is exact and no overflow among them was counted: that would hide one of this
        backward, or be counted again.
        """
        if self.hidden is not None and not self.ready:
            return True
        return scaler.exact and self._in_fp32 and not self._has_counted

    def were_cleared(self) -> bool:
        """Return whether the gradients that came through ``scale_loss`` since the last step are gone."""
        return not self.ready or not (self.in_shards or any(p.grad is not None for p in self.stepped))

    def _unreduced(self) -> list[torch.Tensor]:
        """Return what :attr:`hidden` returns; nothing where no wrapper shares the models."""
        return [] if self.hidden is None else list(self.hidden())

    def _enter_pending(self, pending: Pending, scaler: LossScaler) -> None:
        scaled = [*self._scaled(), *self._unreduced()]
        self._entry = NOTHING
        self.mixed = self.mixed and len(scaled) > 0
        if pending.version != scaler.version:  # no two scalers have the same
            unscale.multiply_(scaled, scaler.scale * pending.inverse)
            self.pending = Pending(scaler.version, scaler.inverse.clone(), pending.why, pending.overflow)
        self._entry = Entry(scaled)

    def _scaled(self) -> list[torch.Tensor]:
        """Return the gradients on the models' own parameters, which are scaled while gradients are pending."""
        return [g for p in self.model_params() for g in (p.grad,) if g is not None]

    # ---------------------------------------------------------------- out of the scale

    def unscale(self, scaler: LossScaler, found_inf: torch.Tensor | None, first: bool, counts: bool = True) -> None:
        """Unscale the gradients of the backward that just ended.

        Args:
            scaler: the scale that the gradients have.
            found_inf: fp32, one element, raised to 1.0 if a gradient is not finite; None: gradients are not checked.
            first: this is the first check since the last step, so gradients left from before it are checked too.
            counts: the check counts for the window of the scale.
        """
        pending, self.pending = self.pending, None
        if pending is not None or self.forward_overflow is not None:
            for earlier in (self.forward_overflow, None if pending is None else pending.overflow):
                if earlier is not None and found_inf is not None:
                    torch.maximum(found_inf, earlier, out=found_inf)
            self.forward_overflow = None
        if counts:
            self.used[scaler.index] = scaler.updates
            if self.owed:
                self.used.update({index: owed.updates for index, owed in self.owed.items()})
        else:
            self.used.setdefault(scaler.index, None)
        waits = False
        if self.one_pass is not None:
            waits = self._wait(self.one_pass, scaler, found_inf)
        grads = [g for param in self.direct for g in (param.grad,) if g is not None]
        if self._scales and not (waits and found_inf is not None):
            self._unscale(grads, scaler, found_inf, self.direct)
        moved = waits
        if self.pairs and not waits:
            moved = self._move_to_masters(scaler, found_inf, first)
        if self._entry.stash is not None:
            back = self._entry.to_put_back()
            if first and found_inf is not None:
                self._check_left_over([old for _, old in back], found_inf)
            unscale.add_(back)
        self._entry = OUTSIDE
        if grads or moved or self.in_shards:
            self.ready = True
        if self._joins and (optimizer := self._optimizer()) is not None:
            self._backend.join_gradients(optimizer)

    def _wait(self, one_pass: OnePass, scaler: LossScaler, found_inf: torch.Tensor | None) -> bool:
        """Let the gradients wait for a step in one pass, if they may; see :meth:`OnePass.wait`."""
        if (optimizer := self._optimizer()) is None:
            return False
        return one_pass.wait(optimizer, scaler.inverse if self._scales else None, found_inf)

    def _move_to_masters(self, scaler: LossScaler, found_inf: torch.Tensor | None, first: bool) -> bool:
        """Move the gradients from the low-precision parameters to the masters; return whether there was any."""
        if first and found_inf is not None:
            self._check_left_over([g for _, m in self.pairs for g in (m.grad,) if g is not None], found_inf)
        moved = moves.transfer(self.pairs, self._finisher(scaler, found_inf), leave=self.leaves_low_precision)
        if self._sentinel is not None:
            self._sentinel.leave()
        return moved

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
        if self.in_parts:  # torch would ask the ranks of the mesh for their flags; they agree later
            grads = [*map(local, grads)]
        if self._of_one_kind and grads[0].device == found_inf.device:
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
                self._fused.met_sparse(optimizer)
            if params:
                unscale.coalesce_half(params)
                grads = [g for p in params for g in (p.grad,) if g is not None]
        unscale.unscale_by_group_(grads, found_inf, scaler.inverse, unscale_)

    def _finisher(self, scaler: LossScaler, found_inf: torch.Tensor | None) -> moves.Finish | None:
        return (lambda grads: self._unscale(grads, scaler, found_inf)) if self._scales else None

    def _check_left_over(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor) -> None:
        """Check gradients that the user did not clear after the last step, which may have been skipped."""
        if not self.sets_aside:
            unscale.check(grads, found_inf, self._backend.unscale_)

    # ---------------------------------------------------------------- left scaled, dropped, cleared

    def postpone(self, scaler: LossScaler, why: str) -> None:
        """Leave the gradients scaled until a later ``scale_loss``."""
        if self._entry.stash is not None:  # the later scale_loss knows no stash, so its values are scaled and added now
            back = self._entry.to_put_back()
            unscale.multiply_([old for _, old in back], scaler.scale)
            unscale.add_(back)
            self.mixed = True
        self.pending = Pending(scaler.version, scaler.inverse.clone(), why, self._flag_so_far(scaler))
        self.owed[scaler.index] = scaler
        self._entry = OUTSIDE

    def _flag_so_far(self, scaler: LossScaler) -> torch.Tensor | None:
        """Return the chip's overflow flag, over all backwards since gradients are pending; None where none is read."""
        if not self._reads_flag:
            return None
        found = read_flag(self._backend, scaler.scale.device)
        before = None if self.pending is None else self.pending.overflow
        return found if before is None else torch.maximum(found, before)

    def abandon(self, scaler: LossScaler) -> None:
        """Clean up after an exception in the body.

        Gradients that the body did not touch become what they were; others are dropped, because nobody can take half a
        backward out of them. So are low-precision gradients that came without ``scale_loss`` under a wrapper.
        """
        entry, self._entry = self._entry, NOTHING
        if entry is not OUTSIDE:
            self._take_back(entry, scaler)
        sentinel = self._sentinel if self.pending is None and self.waiting is None else None
        if sentinel is not None and any(m.grad is not None for _, m in self.pairs):
            sentinel.leave()
        self._entry = OUTSIDE

    def _take_back(self, entry: Entry, scaler: LossScaler) -> None:
        if self.pending is not None:
            if not entry.untouched([*self._scaled(), *self._unreduced()]):
                self._drop()
            return
        self.drop_low_precision()
        if not entry.complete and entry.stash is not None:
            for grad, old in entry.to_put_back():
                grad.copy_(old)
        elif not entry.complete and entry.was_multiplied():
            unscale.multiply_(entry.grads, scaler.inverse)
        elif not entry.untouched([*(p.grad for p in self.direct if p.grad is not None), *self._unreduced()]):
            self._drop()
        elif not entry.complete:
            return
        elif entry.stash is not None:
            unscale.add_(entry.to_put_back())
        elif entry.grads and self._scales:
            unscale.multiply_(entry.grads, scaler.inverse)

    def drop(self) -> None:
        """Drop all gradients, those put aside and those still scaled as well."""
        self._drop()
        self._entry = OUTSIDE
        self.mixed = False
        self.forward_overflow = None
        if self._sentinel is not None:
            self._sentinel.collect()

    def _drop(self) -> None:
        self.clear_waiting()
        for param in (*self.model_params(), *self.stepped):
            param.grad = None
        unscale.zero_(self._unreduced())
        self.pending = None
        self.owed.clear()
        self.ready = False

    def cleared(self) -> None:
        """After ``optimizer.zero_grad()``: drop pending gradients, low-precision ones and those put aside as well."""
        self.ready = False
        if self.hidden is not None:
            unscale.zero_(self._unreduced())
        self.pending = None
        if self.owed:
            self.owed.clear()
        if self.pairs:
            self.clear_waiting()
            self.drop_low_precision()
            if self._sentinel is not None:
                self._sentinel.forget()
        if self._entry.stash is not None:
            self._entry = NOTHING

    # ---------------------------------------------------------------- before a step

    def check_ready(self, call: str) -> None:
        """Check the gradients before ``call`` reads or steps them; clear the masters' if the model's were cleared.

        Raises:
            StateError: they are still scaled, or a backward ran without ``scale_loss``.
        """
        if self.waiting is not None and not self.waiting.settle(call):
            self._end_waiting()
        if self._sentinel is not None:
            self._sentinel.check(call)
        if self.pending is not None:
            self.refuse_scaled(call)

    def refuse_scaled(self, call: str) -> None:
        """Raise a StateError if gradients are still scaled."""
        if self.pending is None:
            return
        if self._scaled() or self._unreduced():
            raise StateError(
                f"{call}: the gradients are still scaled, because {self.pending.why}. Run a scale_loss over this "
                "optimizer that unscales them first, or clear them."
            )
        self.pending = None

    @property
    def state(self) -> State:
        """The state of the gradients; see the module."""
        if self.pending is not None and (self._scaled() or self._unreduced()):
            return State.SCALED
        if self.ready:
            return State.UNSCALED
        return State.SPENT if any(p.grad is not None for p in self.stepped) else State.CLEAR

    def has_stray(self) -> bool:
        """Return whether some gradients did not come through ``scale_loss`` since the last step."""
        if not self.ready and any(p.grad is not None for p in self.stepped):
            return True
        return self._sentinel is not None and self.waiting is None and self._sentinel.others()

    # ---------------------------------------------------------------- gradients that wait for a step in one pass

    def materialize(self, call: str = "") -> None:
        """Move the gradients that wait into the masters: somebody reads them there, or they cannot wait any longer.

        ``call`` is what asks, for messages. Empty: it does not matter whether a part of them was cleared.
        """
        waiting = self.waiting
        if waiting is None:
            return
        with torch.inference_mode(False):
            if waiting.settle(call):
                waiting.move(moves.chunk_limit(self.pairs))
            self._end_waiting()
            if self._sentinel is not None:
                self._sentinel.leave()

    def release(self, master: nn.Parameter) -> None:
        """Clear the gradient that waits for ``master``."""
        if self.waiting is not None and not self.waiting.release(master):
            self._end_waiting()

    def clear_waiting(self) -> None:
        """Clear the gradients that wait."""
        if self.waiting is not None:
            self.waiting.clear()
            self._end_waiting()

    def _end_waiting(self) -> None:
        if self.waiting is not None:
            self.waiting.let_go()
            self.waiting = None

    def waiting_norm(self, norm_type: Any) -> torch.Tensor | None:
        """Return the norm of all unscaled gradients where they wait, fp32; None if they do not, or no kernel has it."""
        waiting, optimizer = self.waiting, self._optimizer()
        if waiting is None or self.one_pass is None or optimizer is None or not _is_order(norm_type):
            return None
        return self.one_pass.norm(optimizer, waiting, float(norm_type))

    def clip_waiting(self, norm: torch.Tensor, max_norm: Any) -> None:
        """Clip gradients whose norm is ``norm``: those that wait when the pass reads them, the others now."""
        waiting, optimizer = self.waiting, self._optimizer()
        if waiting is not None and self.one_pass is not None and optimizer is not None:
            self.one_pass.clip(optimizer, waiting, norm, max_norm)

    def count_missing(self) -> int:
        """Return how many stepped tensors have no gradient."""
        if self.waiting is None:
            return [param.grad for param in self.stepped].count(None)
        return self.waiting.grads.count(None) + self.of_direct().count(None)

    def stepped_in_one_pass(self) -> bool:
        """Return whether a pass has written the model with the masters; give these their new versions then."""
        waiting = self.waiting
        if waiting is None or not waiting.began:
            return False
        torch.autograd.graph.increment_version(waiting.launch.written())
        if waiting.in_graph:
            self.clear_waiting()  # replays write others, of which nobody is told
        return True


def _is_order(norm_type: Any) -> bool:
    return isinstance(norm_type, float | int) and norm_type > 0


def _all_in(groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    return list(itertools.chain.from_iterable(map(_params_of, groups)))
