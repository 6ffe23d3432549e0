"""Saves and loads what a session adds to a model and an optimizer: loss scales and exact fp32 masters.

Data flow of a load: :func:`xamp.sessions.formats.read` checks the state on its own. :func:`_writes_of` finds the
parameter of each saved tensor and refuses what does not fit. Nothing is written before that. A master is written
together with its parameter, so the states of model, optimizer and session can be loaded in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xamp.distributed.ranks import is_dtensor
from xamp.errors import CheckpointError, PolicyError
from xamp.scaling import masters
from xamp.sessions import formats
from xamp.sessions.formats import SavedScaler, SessionState
from xamp.values.log import say
from xamp.values.shown import shown
from xamp.values.undo import Undo

if TYPE_CHECKING:
    from xamp.scaling.engine import Engine
    from xamp.scaling.scale import LossScaler
    from xamp.scaling.step import OptimizerState

__all__ = ["load", "save"]

_CALL = "load_state_dict"


def save(engine: Engine, kind: str = "xamp") -> Any:
    """Return the state of ``engine`` in one of :data:`xamp.sessions.formats.FORMATS`. Waits for the device."""
    if kind not in formats.FORMATS:
        choices = ", ".join(map(repr, formats.FORMATS))
        raise PolicyError(f"state_dict(format={shown(kind)}): no such format. Choices: {choices}.")
    engine.before_saving()
    if kind != "xamp":
        found = [formats.write_foreign(_saved(scaler), scaler.rules, kind) for scaler in engine.scalers]
        return {} if not found else found[0] if len(found) == 1 else found  # {} is a disabled GradScaler's
    stats, models = engine.stats(), engine.models.alive()
    seen: set[int] = set()  # a master is saved once, and with its model where one has it
    named = [_copies(_masters_of(models[i]), seen) if i in models else {} for i in range(len(engine.models.refs))]
    saved: SessionState = {
        "format": "xamp",
        "schema": formats.SCHEMA,
        "level": engine.policy.level,
        "dtype": str(engine.policy.dtype).removeprefix("torch."),
        "steps": {"applied": stats.applied, "skipped": stats.skipped},
        "scalers": [_saved(scaler) for scaler in engine.scalers],
        "optimizers": [
            {
                "overflow_run": state.outcomes.overflow_run(),
                "masters": _copies({key: m for key, (p, m) in _held(state).items() if m is not p}, seen),
            }
            for state in engine.states
        ],
        "masters": named,
    }
    if engine.policy.fp8:
        from xamp.sessions.fp8_layers import chosen_by

        saved["fp8"] = chosen_by(engine.policy)
    return saved


def load(engine: Engine, saved_state: object) -> None:
    """Load ``saved_state``, in any format that xamp reads, into ``engine``: all of it or nothing.

    While it is loaded, what it replaces is kept in host memory: 6 bytes for each parameter that has a master.

    Raises:
        CheckpointError: the state does not fit; the message names the key.
        StateError: a ``scale_loss`` is open.
    """
    if not engine.enabled:
        return
    engine.refuse_open(_CALL, "Load after the block.")
    engine.before_saving()
    saved = formats.read(f"{_CALL}(state)", saved_state)
    moving = _moving_scales(engine, saved)
    _tell_kept_scale(engine, saved)
    if engine.policy.fp8 and "fp8" in saved:
        from xamp.sessions.fp8_layers import tell_of_another

        tell_of_another(saved["fp8"], engine.policy)
    writes = _writes_of(engine, saved)
    _tell_missing(engine, writes)
    runs = [optimizer["overflow_run"] for optimizer in saved["optimizers"]]
    engine.move_held(_CALL)
    stats, counts = engine.stats(), engine.counts  # now, because resume() drops the steps that are not counted yet
    undo = Undo()
    try:
        undo.steps.append(_snapshot_tensors(writes))
        _keep_numbers(engine, undo)
        _write(writes)
        for scaler, scale in zip(engine.scalers, moving, strict=False):
            scaler.set(scaler.rules.within(scale["scale"]), scale["growth_tracker"])
        known = dict(enumerate(runs)) if not engine.states or len(runs) == len(engine.states) else {}
        for optimizer in engine.states:
            optimizer.resume(known.get(optimizer.index, 0))
        engine.memory.lower_flags()
        counts.resume(saved["steps"], stats, known)
    except BaseException:
        undo.unwind()
        raise


def _snapshot_tensors(writes: Sequence[_Write]) -> Callable[[], None]:
    """Copy the tensors that :func:`_write` will overwrite to the host; return a function that writes them back."""
    targets = [t for param, _ in writes for t in (param, masters.master_of(param)) if t is not None]
    kept = [(target, _copy(target)) for target in targets]
    agreeing = [param for param, _ in writes if masters.is_equal(param)]

    def write_back() -> None:
        with torch.no_grad():
            for target, value in kept:
                target.copy_(value)  # of one dtype, so nothing is allocated on the device
        masters.remember_equal(agreeing)

    return write_back


def _keep_numbers(engine: Engine, undo: Undo) -> None:
    """Let ``undo`` put back the scales, and all that the host knows of them and of the steps."""
    undo.keep([engine.counts], [engine.memory.values])
    parts: Any = (*engine.scalers, *engine.states)
    for each in parts:
        undo.keep(*each.parts())


# ---------------------------------------------------------------- loss scales


def _saved(scaler: LossScaler) -> SavedScaler:
    scale, tracker = float(scaler.scale), int(scaler.growth_tracker)
    return {"dynamic": scaler.rules.dynamic, "scale": scale, "growth_tracker": tracker}


def _moving_scales(engine: Engine, saved: SessionState) -> Sequence[SavedScaler]:
    """Return the scales to load: none unless they are dynamic both here and in ``saved``; others stay as they are."""
    scales, here = saved["scalers"], len(engine.scalers)
    if not engine.policy.dynamic or any(scale["dynamic"] is False for scale in scales):
        return ()
    if scales and len(scales) != here:
        raise CheckpointError(
            f"{_CALL}(state): it holds {len(scales)} loss scales, and initialize was called with num_losses={here}: "
            f"the scale of loss_id={min(len(scales), here)} has no counterpart. Call initialize with the num_losses of "
            "the run that saved it. Nothing was loaded."
        )
    return scales


def _tell_kept_scale(engine: Engine, saved: SessionState) -> None:
    """Warn where the state has a static loss scale and this session a dynamic one: the scale is not loaded."""
    static = [scale["scale"] for scale in saved["scalers"] if scale["dynamic"] is False]
    if static and engine.policy.dynamic:
        here = ", ".join(str(float(scaler.scale)) for scaler in engine.scalers)
        say(
            "load_state_dict: the state's loss scale of %s is static and was not loaded; this session's is dynamic and "
            "stays %s. To go on with the static one: initialize(loss_scale=%s)",
            *(static[0], here, static[0]),
            level=logging.WARNING,
        )


# ---------------------------------------------------------------- masters


def _masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    pairs = ((name, p, masters.master_of(p)) for name, p in model.named_parameters())
    return {name: masters.exact(p) for name, p, m in pairs if m is not None}


def _copies(found: Mapping[str, torch.Tensor], seen: set[int]) -> dict[str, torch.Tensor]:
    """Copy the masters that are not ``seen`` yet into host memory."""
    # A DTensor is in parts on the ranks. Its master is in model.state_dict(), which every way of saving shards reads.
    new = {name: master for name, master in found.items() if not is_dtensor(master) and id(master) not in seen}
    seen.update(map(id, new.values()))
    return {name: _copy(master) for name, master in new.items()}


def _copy(master: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(master, device="cpu", requires_grad=False).copy_(master.detach())


def _held(state: OptimizerState) -> dict[str, tuple[Any, torch.Tensor]]:
    """Return the tensors that an optimizer steps, by ``"group.position"``: parameter, and master if there is one."""
    param_of: dict[int, Any] = {id(m): p for p, m in state.gradients.params.pairs}
    groups = state.optimizer.param_groups if state.is_alive else ()
    found = {f"{g}.{k}": p for g, group in enumerate(groups) for k, p in enumerate(group["params"])}
    return {key: (param_of.get(id(p), p), p) for key, p in found.items()}


_Write = tuple[torch.Tensor, torch.Tensor]
"""(the parameter, its exact value)."""


def _writes_of(engine: Engine, saved: SessionState) -> list[_Write]:
    """Return the parameters to write, with their values, or raise a CheckpointError. Writes nothing."""
    models = engine.models.alive()
    writes = []
    for index, named in enumerate(saved["masters"]):
        if named and index not in models:
            raise CheckpointError(
                f"{_CALL}(state): state['masters'][{index}] belongs to a further model, and initialize was "
                f"given {len(models)} that still exist. Give it the models of the run that saved this. Nothing was "
                "loaded."
            )
        params = dict(models[index].named_parameters(remove_duplicate=False)) if named else {}
        writes += _matched(named, params, f"state['masters'][{index}]", "the model has no such parameter")
    for index, optimizer in enumerate(saved["optimizers"]):
        held = _held(engine.states[index]) if index < len(engine.states) else {}
        params = {position: param for position, (param, _) in held.items()}
        absent = "no optimizer here has a parameter at that group and position"
        writes += _matched(optimizer["masters"], params, f"state['optimizers'][{index}]['masters']", absent)
    return writes


def _matched(
    saved: Mapping[str, torch.Tensor], params: Mapping[str, torch.Tensor], where: str, absent: str
) -> list[_Write]:
    writes = []
    for name, value in saved.items():
        param, problem = params.get(name), ""
        if param is None:
            problem = absent
        elif param.shape != value.shape:
            problem = f"shape {tuple(value.shape)}, and the parameter's is {tuple(param.shape)}"
        elif type(param) not in (torch.Tensor, nn.Parameter) or param.dtype not in (torch.float32, *masters.LOWER):
            problem = f"the parameter is a {type(param).__name__} of {param.dtype}, which no master can be written to"
        if problem or param is None:
            raise CheckpointError(f"{_CALL}(state): {where}[{name!r}]: {problem}. Nothing was loaded.")
        writes.append((param, value))
    return writes


def _tell_missing(engine: Engine, writes: Sequence[_Write]) -> None:
    """Log which masters are missing from a state that has masters: their parameters are new, or were frozen."""
    written = {id(param) for param, _ in writes}
    params = [param for model in engine.models.alive().values() for param in model.parameters()]
    left = [p for p in params if masters.master_of(p) is not None and id(p) not in written and not is_dtensor(p)]
    if left and writes and engine.counts.verbosity:
        say(
            "load_state_dict: no master weights of %s%s in the state; they keep their values",
            engine.models.names_of(left)[0],
            f" and {len(left) - 1} more" if len(left) > 1 else "",
        )


@torch.no_grad()
def _write(writes: Sequence[_Write]) -> None:
    for param, value in writes:
        if masters.master_of(param) is not None:
            masters.overwrite(param, value)
        param.copy_(value)
