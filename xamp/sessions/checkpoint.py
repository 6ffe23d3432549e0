"""Saves and loads what a session adds to a model and an optimizer: loss scales and exact fp32 masters.

Data flow of a load: :func:`xamp.sessions.formats.read` checks the state on its own. :func:`_plan` finds the parameter
of each saved tensor and refuses what does not fit. Nothing is written before that. A master is written together with
its parameter, so the states of model, optimizer and session can be loaded in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from xamp.errors import CheckpointError, PolicyError, StateError
from xamp.ground.log import say
from xamp.ground.shown import shown
from xamp.ground.undo import Undo
from xamp.scaling import masters
from xamp.scaling.ranks import is_dtensor
from xamp.sessions import formats
from xamp.sessions.formats import Saved, SavedScale

if TYPE_CHECKING:
    from xamp.scaling.engine import Engine
    from xamp.scaling.step import OptimizerState

__all__ = ["load", "save"]

_CALL = "load_state_dict"


def save(engine: Engine, kind: str = "xamp") -> Any:
    """Return the state of ``engine`` in one of :data:`xamp.sessions.formats.FORMATS`. Waits for the device."""
    if kind not in formats.FORMATS:
        choices = ", ".join(map(repr, formats.FORMATS))
        raise PolicyError(f"state_dict(format={shown(kind)}): no such format. Choices: {choices}.")
    engine.prepare_checkpoint()
    scales = [_scale_of(scaler) for scaler in engine.scalers]
    if kind != "xamp":
        states = [formats.write_foreign(scale, kind) for scale in scales]
        return {} if not states else states[0] if len(states) == 1 else states  # {} is a disabled GradScaler's
    stats = engine.stats()
    named, others = _masters_of(engine)
    return formats.write(
        Saved(
            scales,
            named,
            others,
            [state.outcomes.overflow_run() for state in engine.states],
            (stats.applied, stats.skipped),
            engine.policy.level,
            str(engine.policy.dtype).removeprefix("torch."),
        )
    )


def load(engine: Engine, saved_state: object) -> None:
    """Load ``saved_state``, in any format that xamp reads, into ``engine``: all of it or nothing.

    While it is loaded, what it replaces is kept in host memory: 6 bytes for each parameter that has a master.

    Raises:
        CheckpointError: the state does not fit; the message names the key.
        StateError: a ``scale_loss`` is open.
    """
    if not engine.enabled:
        return
    if any(state.is_open() for state in engine.states):
        raise StateError(f"{_CALL}: inside `with xamp.scale_loss(...)`. Load after the block.")
    engine.prepare_checkpoint()
    saved = formats.read(f"{_CALL}(state)", saved_state)
    moving = _moving_scales(engine, saved)
    _tell_kept_scale(engine, saved)
    writes = _plan(engine, saved)
    _tell_missing(engine, writes)
    stats = engine.stats()  # now, because resume() drops the steps that are not counted yet
    undo = Undo()
    try:
        undo.steps.append(_keep_tensors(writes))
        undo.steps.append(_keep_numbers(engine))
        _write(writes)
        for scaler, scale in zip(engine.scalers, moving, strict=False):
            # torch's kernel grows the scale where the tracker equals the interval; a larger one would never grow it.
            tracker = min(scale.growth_tracker, scaler.rules.growth_interval - 1)
            scaler.set(scaler.rules.within(scale.scale), tracker)
        same = not engine.states or len(saved.overflow_runs) == len(engine.states)
        engine.counts.runs = dict(enumerate(saved.overflow_runs)) if same else {}
        for optimizer in engine.states:
            optimizer.resume(engine.counts.runs.get(optimizer.index, 0))
        engine.counts.applied, engine.counts.skipped = saved.steps or (stats.applied, stats.skipped)
    except BaseException:
        undo.unwind()
        raise


def _keep_tensors(writes: Sequence[_Write]) -> Callable[[], None]:
    """Copy what :func:`_write` will overwrite into host memory; return a function that writes it back."""
    targets = [t for param, _ in writes for t in (param, masters.master_of(param)) if t is not None]
    kept = [(target, _copy(target)) for target in targets]
    agreeing = [param for param, _ in writes if masters.agrees(param)]

    def write_back() -> None:
        with torch.no_grad():
            for target, value in kept:
                target.copy_(value)  # of one dtype, so nothing is allocated on the device
        masters.agree(agreeing)

    return write_back


def _keep_numbers(engine: Engine) -> Callable[[], None]:
    """Copy the scales and all that the host knows of them and of the steps; return a function that puts it back."""
    scalers = [(scaler, float(scaler.scale), int(scaler.growth_tracker)) for scaler in engine.scalers]
    counts = engine.counts.applied, engine.counts.skipped
    runs, states = engine.counts.runs, [(state, state.kept()) for state in engine.states]

    def put_back() -> None:
        for scaler, scale, tracker in scalers:
            scaler.set(scale, tracker)
        engine.counts.runs = runs
        for state, kept in states:
            state.put_back(kept)
        engine.counts.applied, engine.counts.skipped = counts

    return put_back


# ---------------------------------------------------------------- loss scales


def _scale_of(scaler: Any) -> SavedScale:
    rules = scaler.rules
    return SavedScale(
        float(scaler.scale),
        int(scaler.growth_tracker),
        rules.dynamic,
        (rules.growth_factor, rules.backoff_factor, rules.growth_interval),
    )


def _moving_scales(engine: Engine, saved: Saved) -> Sequence[SavedScale]:
    """Return the scales to load: none unless they are dynamic both here and in ``saved``; others stay as they are."""
    if not engine.policy.dynamic or any(scale.dynamic is False for scale in saved.scales):
        return ()
    if saved.scales and len(saved.scales) != len(engine.scalers):
        raise CheckpointError(
            f"{_CALL}(state): it holds {len(saved.scales)} loss scales, and initialize was called with "
            f"num_losses={len(engine.scalers)}: the scale of loss_id={min(len(saved.scales), len(engine.scalers))} has "
            "no counterpart. Call initialize with the num_losses of the run that saved it. Nothing was loaded."
        )
    return saved.scales


# ---------------------------------------------------------------- masters


def _masters_of(engine: Engine) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Copy all masters into host memory: by model and name, or by optimizer and position if no model has them."""
    seen: set[int] = set()
    named: list[dict[str, torch.Tensor]] = [{} for _ in range(engine.num_models)]
    for index, model in engine.models().items():
        pairs = ((n, p, masters.master_of(p)) for n, p in model.named_parameters())
        # A DTensor is no plain CPU tensor. Its master is in model.state_dict(), which every way of saving shards reads.
        found = {name: masters.exact(p) for name, p, m in pairs if m is not None and not is_dtensor(m)}
        named[index] = {name: _copy(master) for name, master in found.items() if id(master) not in seen}
        seen.update(id(master) for master in found.values())
    others = []
    for state in engine.states:
        alone = {key: m for key, (p, m) in _held(state).items() if m is not p and not is_dtensor(m)}
        others.append({key: _copy(master) for key, master in alone.items() if id(master) not in seen})
    return named, others


def _copy(master: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(master, device="cpu", requires_grad=False).copy_(master.detach())


def _held(state: OptimizerState) -> dict[str, tuple[Any, torch.Tensor]]:
    """Return what an optimizer steps, by ``"group.position"``: the parameter, and its master if it has one."""
    param_of: dict[int, Any] = {id(m): p for p, m in state.gradients.pairs}
    groups = state.optimizer.param_groups if state.is_alive else ()
    found = {f"{g}.{k}": p for g, group in enumerate(groups) for k, p in enumerate(group["params"])}
    return {key: (param_of.get(id(p), p), p) for key, p in found.items()}


_Write = tuple[torch.Tensor, torch.Tensor]
"""(the parameter, its exact value)."""


def _plan(engine: Engine, saved: Saved) -> list[_Write]:
    """Return what to write where, or raise a CheckpointError. Writes nothing."""
    models = engine.models()
    writes = []
    for index, named in enumerate(saved.masters):
        if named and index not in models:
            raise CheckpointError(
                f"{_CALL}(state): state['masters'][{index}] belongs to a further model, and initialize was "
                f"given {len(models)} that still exist. Give it the models of the run that saved this. Nothing was "
                "loaded."
            )
        params = dict(models[index].named_parameters(remove_duplicate=False)) if named else {}
        writes += _matched(named, params, f"state['masters'][{index}]", "the model has no such parameter")
    for index, others in enumerate(saved.others):
        if not others:
            continue
        held = _held(engine.states[index]) if index < len(engine.states) else {}
        key = f"state['optimizers'][{index}]['masters']"
        params = {key: param for key, (param, _) in held.items()}
        writes += _matched(others, params, key, "no optimizer here has a parameter at that group and position")
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
        elif type(param) not in (nn.Parameter, torch.Tensor) or param.dtype not in (torch.float32, *masters.LOWER):
            problem = f"the parameter is a {type(param).__name__} of {param.dtype}, which no master can be written to"
        if problem or param is None:
            raise CheckpointError(f"{_CALL}(state): {where}[{name!r}]: {problem}. Nothing was loaded.")
        writes.append((param, value))
    return writes


def _tell_kept_scale(engine: Engine, saved: Saved) -> None:
    """Warn where the state has a static loss scale and this session a dynamic one: the scale is not loaded."""
    static = [scale.scale for scale in saved.scales if scale.dynamic is False]
    if not static or not engine.policy.dynamic:
        return
    here = ", ".join(str(float(scaler.scale)) for scaler in engine.scalers)
    say(
        "load_state_dict: the state's loss scale of %s is static and was not loaded; this session's is dynamic and "
        "stays %s. To go on with the static one: initialize(loss_scale=%s)",
        static[0],
        here,
        static[0],
        level=logging.WARNING,
    )


def _tell_missing(engine: Engine, writes: Sequence[_Write]) -> None:
    """Log which masters are missing from a state that has masters: their parameters are new, or were frozen."""
    written = {id(param) for param, _ in writes}
    params = [param for model in engine.models().values() for param in model.parameters()]
    left = [p for p in params if masters.master_of(p) is not None and id(p) not in written and not is_dtensor(p)]
    if left and writes and engine.counts.verbosity:
        say(
            "load_state_dict: no master weights of %s%s in the state; they keep their values",
            engine.names_of(left)[0],
            f" and {len(left) - 1} more" if len(left) > 1 else "",
        )


@torch.no_grad()
def _write(writes: Sequence[_Write]) -> None:
    for param, value in writes:
        if masters.master_of(param) is not None:
            masters.overwrite(param, value)
        param.copy_(value)
