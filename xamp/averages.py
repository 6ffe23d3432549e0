"""``xamp.ema``: an average of weights, fp32 at every level.

It reads the fp32 masters where a parameter is in low precision, and the parameter itself elsewhere. It finds them anew
at each update, by qualified name in the model without its wrappers. So it does not matter whether ``initialize``, a
wrapper or ``torch.compile`` came before it or after it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xamp.distributed import fsdp, ranks
from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.scaling import masters, unscale
from xamp.scaling.counts import StepOutcome
from xamp.scaling.step import OptimizerState
from xamp.sessions.foreign import unwrap
from xamp.sessions.session import find_session, session_for
from xamp.torch_compat import kernels
from xamp.torch_compat.torch_private import autocast

__all__ = ["Average", "ema", "was_skipped"]

_FORMAT, _SCHEMA = "xamp.ema", 1
_BUFFERS = ("copy", "average", "leave")


def ema(
    model: nn.Module,
    decay: float | Callable[[int], float],
    *,
    buffers: str = "copy",
    applied_only: object = None,
) -> Average:
    """Make an exponential moving average of the weights of ``model``, which starts at the weights as they are.

    ::

        average = xamp.ema(model, 0.999)
        for x, y in loader:
            ...
            optimizer.step()
            average.update()
        with average.swapped():
            evaluate(model)

    The average is fp32 (fp64 for fp64 weights) at every level. It is made from the fp32 masters at O2 and O5.

    Args:
        model: a model, before or after ``initialize``, in any wrapper; a model that ``initialize`` never sees too.
        decay: how much of the average an update keeps, from 0 to 1; or a function of the number of updates so far,
            such as ``lambda n: min(0.999, (1 + n) / (10 + n))`` for a warm-up.
        buffers: ``"copy"``: an update copies the persistent buffers, as batch norm's statistics. ``"average"``:
            averages the floating ones and copies the others. ``"leave"``: the model keeps its own.
        applied_only: whose outcome says that a step was skipped, after which an update does nothing. None: the
            optimizers of the model, where a session manages it. A GradScaler or an optimizer: its outcome. True: as
            None, and a model without a session is an error. False: each update counts; after a skipped step it moves
            the average once more towards weights that did not change. No update waits for the device, unless ``decay``
            is a function.

    Raises:
        PolicyError: an argument cannot be right.
    """
    return Average(model, decay, buffers, applied_only)


class Average:
    """An average of the weights of a model; see :func:`ema`.

    Attributes:
        weights: the average by qualified name of the parameter or buffer, fp32 or fp64; of buffers that are copied,
            the copy. Of a sharded parameter it is this rank's shard.
    """

    def __init__(
        self, model: nn.Module, decay: float | Callable[[int], float], buffers: str, applied_only: object
    ) -> None:
        if not isinstance(model, nn.Module):
            raise PolicyError(f"ema(model={type(model).__name__}): must be an nn.Module.")
        if not callable(decay):
            _checked_decay(decay)
        if buffers not in _BUFFERS:
            raise PolicyError(f"ema(buffers={buffers!r}): no such choice. Choices: {', '.join(map(repr, _BUFFERS))}.")
        self._given = model
        self._decay = decay
        self._buffers = buffers
        self._applied_only = applied_only
        self._swapped = False
        self._updates = 0
        self._without_effect: torch.Tensor | None = None  # how many of these came after a step that the device skipped
        self.weights = {name: source.clone() for name, (_, source) in self._sources().items()}

    @property
    def updates(self) -> int:
        """The number of updates so far, but for those that did nothing. Reading it may wait for the device."""
        if self._without_effect is not None:
            self._updates -= int(self._without_effect)
            self._without_effect = None
        return self._updates

    # ---------------------------------------------------------------- what is averaged

    @property
    def _model(self) -> nn.Module:
        return unwrap(self._given)

    def _reshard(self) -> None:
        """Under FSDP: make the parameters this rank's shards, and let the next forward gather what is in them then."""
        if ranks.is_running():
            fsdp.reshard(self._given.modules())

    def _sources(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return by name each tensor of the model and its exact values, which are fp32 if the tensor is lower."""
        self._reshard()
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        found.update({name: (param, _exact(param)) for name, param in self._model.named_parameters()})
        if self._buffers != "leave":
            found.update({name: (buffer, _exact(buffer)) for name, buffer in _persistent_buffers(self._model)})
        return found

    def _fitting(self, call: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return :meth:`_sources`, and bring :attr:`weights` to the same names and devices.

        Raises:
            StateError: a tensor has another shape than its average.
        """
        sources = self._sources()
        for name, (_, source) in sources.items():
            kept = self.weights.get(name)
            if kept is not None and kept.shape != source.shape:
                raise StateError(
                    f"{call}: {name!r} now has shape {tuple(source.shape)}, and its average {tuple(kept.shape)}. Make "
                    "a new average with xamp.ema after the model has changed."
                )
        moved = {name: self.weights[name] for name in sources if name in self.weights}
        self.weights = {
            name: moved[name].to(source.device) if name in moved else source.clone()
            for name, (_, source) in sources.items()
        }
        return sources

    # ---------------------------------------------------------------- the update

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now. Call it after ``optimizer.step()``.

        After a step that was skipped it does nothing: see ``applied_only`` of :func:`ema`.
        Parameters that came since the last update start with their own values; those that are gone are dropped.

        Raises:
            StateError: the average is swapped into the model, or a parameter has changed its shape.
            PolicyError: ``decay`` was a function, and what it returned is no number from 0 to 1.
        """
        self._refuse_swapped("average.update()")
        params = dict(self._model.named_parameters())
        skipped: bool | torch.Tensor = False
        if self._applied_only is not False:
            skipped = was_skipped(self._applied_only, self._given, list(params.values()))
        if skipped is True:
            return
        decay = _checked_decay(self._decay(self.updates) if callable(self._decay) else self._decay)
        before = self.weights
        sources = self._fitting("average.update()")
        moving: list[tuple[torch.Tensor, torch.Tensor]] = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, (_, source) in sources.items():
            averages = source.is_floating_point() or source.is_complex()
            averages = averages and (name in params or self._buffers == "average") and name in before
            (moving if averages else copied).append((self.weights[name], source))
        if isinstance(skipped, torch.Tensor):
            _move_by_flag(moving, copied, 1.0 - decay, skipped)
            before_this = self._without_effect
            self._without_effect = skipped.clone() if before_this is None else before_this + skipped
        else:
            if moving:
                _move(moving, 1.0 - decay)
            for average, source in copied:
                average.copy_(source)
        self._updates += 1

    # ---------------------------------------------------------------- its use

    @contextlib.contextmanager
    def swapped(self) -> Iterator[nn.Module]:
        """Run the block with the averaged weights in the model, and restore the model bit for bit, in any case.

        The model stays at its level: low-precision parameters get the average rounded to their dtype, and masters get
        it exactly, so that ``model.state_dict()`` in the block holds the average in fp32. No tensor moves to another
        address, so compiled models and wrappers need not notice. The block holds a second copy of the weights.

        Yields:
            The model that :func:`ema` was given.

        Raises:
            StateError: the average is swapped in already, or a parameter has changed its shape.
        """
        self._refuse_swapped("average.swapped()")
        sources = self._fitting("average.swapped()")
        pairs = [
            (target, self.weights[name])
            for name, (tensor, _) in sources.items()
            for target in (tensor, masters.master_of(tensor))
            if target is not None
        ]
        backup = [_values(target).clone() for target, _ in pairs]
        self._swapped = True
        try:
            for target, average in pairs:
                _values(target).copy_(average)
            autocast.clear_autocast_cache()  # it knows weights by their versions, which stay
            yield self._given
        finally:
            self._reshard()
            for (target, _), before in zip(pairs, backup, strict=True):
                _values(target).copy_(before)
            autocast.clear_autocast_cache()
            self._swapped = False

    def copy(self) -> nn.Module:
        """Return a copy of the model without its wrappers, with the averaged weights, under the same policy.

        At O2, O3 and O5 its parameters are rounded to the level's dtype, as the model's are.
        """
        self._refuse_swapped("average.copy()")
        if any(map(fsdp.is_sharded, self._given.modules())):
            raise StateError(
                "average.copy(): FSDP shards the model, and torch copies no such module. Evaluate the average in `with "
                "average.swapped():`, or load what is saved inside of that block into a model without FSDP."
            )
        sources = self._fitting("average.copy()")
        model = self._model
        made = copy.deepcopy(model)
        tensors: dict[str, torch.Tensor] = dict(made.named_parameters(remove_duplicate=False))
        tensors.update(made.named_buffers(remove_duplicate=False))
        with torch.no_grad():
            for name in sources:
                _values(tensors[name]).copy_(self.weights[name])
        for param in made.parameters():
            param.grad = None
        return made

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return the average as Python numbers and CPU tensors, which ``torch.load(weights_only=True)`` takes.

        It does not hold ``decay``: give :func:`ema` the same one in the run that resumes.
        """
        saved = {name: torch.empty_like(w, device="cpu").copy_(w) for name, w in self.weights.items()}
        return {"format": _FORMAT, "schema": _SCHEMA, "updates": self.updates, "weights": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of :meth:`state_dict`, of a run at any level: all of it or nothing.

        Raises:
            CheckpointError: the state does not fit the model; the message names the key.
            StateError: the average is swapped into the model.
        """
        self._refuse_swapped("average.load_state_dict(state)")
        updates, saved = _read(state)
        sources = self._sources()
        for name in sorted(sources.keys() ^ saved.keys()):
            where = "is missing in the state" if name in sources else "is nothing that this average averages"
            raise _misfit(f"state['weights'][{name!r}] {where} (it was made with buffers={self._buffers!r})")
        for name, (_, source) in sources.items():
            if saved[name].shape != source.shape:
                raise _misfit(
                    f"state['weights'][{name!r}] has shape {tuple(saved[name].shape)}, and the model's is "
                    f"{tuple(source.shape)}"
                )
        self.weights = {
            name: saved[name].to(device=source.device, dtype=source.dtype, copy=True)
            for name, (_, source) in sources.items()
        }
        self._updates, self._without_effect = updates, None

    def _refuse_swapped(self, call: str) -> None:
        if self._swapped:
            raise StateError(f"{call}: inside `with average.swapped()`. Call it after the block.")


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` without gradient: of its master, or in fp32 if it is lower, of this rank."""
    is_buffer = masters.has_fp32(tensor)
    values = _values(masters.fp32_of(tensor, wait=False) if is_buffer else masters.exact(tensor))
    return values.float() if values.dtype in masters.LOWER else values


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage of ``tensor``, or of this rank's shard: writing to it makes no new version of the tensor.

    Autograd and the masters read versions: a graph made before the swap must stay usable after it.
    """
    return ranks.local(tensor).data


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}".lstrip("."), buffer


def _move(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], weight: float) -> None:
    """Move each average towards its source, by ``weight`` of the way."""
    try:
        kernels.lerp_([average for average, _ in pairs], [source for _, source in pairs], weight)
    except RuntimeError:  # a storage format of the device's own, which operators on lists refuse before they begin
        for average, source in pairs:
            average.lerp_(source, weight)


def _move_by_flag(
    moving: Sequence[tuple[torch.Tensor, torch.Tensor]],
    copied: Sequence[tuple[torch.Tensor, torch.Tensor]],
    weight: float,
    skipped: torch.Tensor,
) -> None:
    """Move the averages, and copy what is copied, unless the flag ``skipped`` is 1.0. The host does not read it."""
    steps = [source - average for average, source in moving]
    unscale.multiply_(steps, (1.0 - skipped) * weight)
    for (average, _), step in zip(moving, steps, strict=True):
        average.add_(step)
    for average, source in copied:
        average.copy_(torch.where(skipped.to(source.device).bool(), average, source))


def _checked_decay(decay: object) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0.0 <= decay <= 1.0:
        raise PolicyError(
            f"ema(decay={decay!r}): must be a number from 0 to 1, or a function that returns one for the number of "
            "updates so far. 0.999 keeps 99.9 % of the average at each update."
        )
    return float(decay)


def _misfit(why: str) -> CheckpointError:
    return CheckpointError(f"average.load_state_dict(state): {why}. Nothing was loaded.")


def _read(state: object) -> tuple[int, Mapping[str, torch.Tensor]]:
    """Return the number of updates and the weights in ``state``, checked as far as they can be without a model."""
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise _misfit(f"state is not one of xamp.ema (its 'format' is not {_FORMAT!r})")
    if state.get("schema") != _SCHEMA:
        raise _misfit(f"state['schema'] is {state.get('schema')!r}, and this xamp reads {_SCHEMA}")
    updates, weights = state.get("updates"), state.get("weights")
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise _misfit(f"state['updates'] is {updates!r}, and must be a whole number from 0")
    if not isinstance(weights, Mapping):
        raise _misfit("state['weights'] must be a dict of tensors")
    for name, tensor in weights.items():
        if not isinstance(tensor, torch.Tensor):
            raise _misfit(f"state['weights'][{name!r}] is a {type(tensor).__name__}, and must be a tensor")
    return updates, weights


def was_skipped(source: Any, model: nn.Module, params: Sequence[torch.Tensor]) -> bool | torch.Tensor:
    """Return whether the last step was skipped: of several optimizers, whether each skipped it.

    Args:
        source: whose outcome counts: a GradScaler or a managed optimizer; True: that of the session of ``model``; None:
            the same where it has a session, and where it has none no step was skipped.
        model: the model.
        params: its parameters. Optimizers that hold none of them do not count, unless ``source`` names what counts.

    Returns:
        A bool, or a flag of one element on the device (1.0: skipped) where the host would have to wait for it.

    Raises:
        StateError: ``source`` is managed by no session.
    """
    lasts: list[StepOutcome | torch.Tensor | None]
    if hasattr(source, "_all_steps"):  # a GradScaler
        lasts = [steps.last for steps in source._all_steps()]
    else:
        states = _states(source, model)
        if source is None or source is True:
            held = set(map(id, params))
            states = [each for each in states if any(id(p) in held for p in each.gradients.params.of_the_models)]
        lasts = [state.outcomes.last for state in states]
    flags: list[torch.Tensor] = []
    for last in lasts:
        if isinstance(last, torch.Tensor) and not last.is_cpu:
            flags.append(last)
        elif last is not StepOutcome.SKIPPED and not (isinstance(last, torch.Tensor) and bool(last)):
            return False
    if not flags:
        return len(lasts) > 0
    return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).min()


def _states(source: Any, model: nn.Module) -> list[OptimizerState]:
    if source is None:
        found = find_session(model)
        engine: Any = None if found is None else found.engine
    else:
        call = f"ema(applied_only={source if source is True else type(source).__name__})"
        engine = session_for(call, model if source is True else source).engine
    return [] if engine is None else [state for state in engine.states if state.is_alive]
