"""The engine, broken in the ways in which checkpoints break: something forgotten, rounded, half done or not plain."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Mutant, patched

from xamp import GradScaler
from xamp.scaling import masters
from xamp.sessions import checkpoint, formats

write_foreign, read, torchs_state = formats.write_foreign, formats.read, formats._torch
matched, load, scale_of = checkpoint._matched, checkpoint.load, checkpoint._saved
load_masters, load_scaler = masters.load_masters, GradScaler.load_state_dict


def writes_no_tracker(scaler: Any) -> Any:
    return {**scale_of(scaler), "growth_tracker": 0}


def writes_static_factors(saved: Any, rules: Any, kind: str) -> Any:
    static: Any = {**saved, "dynamic": False}
    return write_foreign(static, rules, kind)


def lowered(master: torch.Tensor) -> torch.Tensor:
    """What is left of a master that is saved from its parameter."""
    return master.detach().half().float().cpu()


def shared(master: torch.Tensor) -> torch.Tensor:
    """Not copied where it is in host memory already."""
    return master.detach().cpu()


def scale_on_device(scaler: Any) -> Any:
    return {**scale_of(scaler), "scale": scaler.scale.clone()}


def saves_parameters(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """In fp32, but no more than they hold."""
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is not None and prefix + name in state and tensor.is_floating_point():
            state[prefix + name] = state[prefix + name].float()


def loads_no_masters(*_: Any) -> None:
    """torch then writes the parameters."""


def loads_rounded_masters(module: Any, state: Any, prefix: str, *rest: Any) -> None:
    """Made anew from the parameters, as Apex does."""
    load_masters(module, {k: v.half().float() for k, v in state.items()}, prefix, *rest)


def writes_as_it_goes(saved: Any, params: Any, where: str, absent: str) -> Any:
    """Leaves what comes before the first that does not fit."""
    writes: list[Any] = []
    for name, value in saved.items():
        writes += matched({name: value}, params, where, absent)
        checkpoint._write(writes[-1:])
    return writes


def takes_no_scale(engine: Any, saved: Any) -> Any:
    return ()


def takes_static_scales(engine: Any, saved: Any) -> Any:
    return saved["scalers"]


def takes_any_number(value: Any, key: str) -> float:
    return float(value)


def loads_where_disabled(engine: Any, state: Any) -> None:
    before, engine.enabled = engine.enabled, True
    try:
        load(engine, state)
    finally:
        engine.enabled = before


def reads_no_runs(call: str, state: object) -> Any:
    saved: Any = read(call, state)
    return {**saved, "optimizers": [{**each, "overflow_run": 0} for each in saved["optimizers"]]}


def reads_apex_as_it_comes(state: Any) -> Any:
    scales = ((each["loss_scale"], each["unskipped"]) for each in state.values())
    return [{"dynamic": None, "scale": scale, "growth_tracker": tracker} for scale, tracker in scales]


def wants_dynamic(value: Any, key: str) -> Any:
    if "dynamic" not in value:
        raise formats._Misfit("the key 'dynamic' is missing", key)
    return torchs_state(value, key)


def forgets_the_tracker(self: Any, state: Any) -> None:
    load_scaler(self, {**state, "_growth_tracker": 0})


MUTANTS = [
    Mutant(
        "forgets the growth tracker",
        "checkpoint.resume_is_bit_identical",
        patched(checkpoint, "_saved", writes_no_tracker),
    ),
    Mutant("saves lowered masters", "checkpoint.resume_is_bit_identical", patched(checkpoint, "_copy", lowered)),
    Mutant(
        "the model's state brings rounded masters",
        "checkpoint.load_order_is_free",
        patched(masters, "load_masters", loads_rounded_masters),
    ),
    Mutant(
        "leaves the scale on the device",
        "checkpoint.state_is_plain",
        patched(checkpoint, "_saved", scale_on_device),
    ),
    Mutant("hands out the masters themselves", "checkpoint.state_is_plain", patched(checkpoint, "_copy", shared)),
    Mutant(
        "starts the scale anew on another device",
        "checkpoint.state_moves_between_devices",
        patched(checkpoint, "_moving_scales", takes_no_scale),
    ),
    Mutant(
        "wants torch_npu's key of every state",
        "checkpoint.recorded_states_load",
        patched(formats, "_torch", wants_dynamic),
        error="xamp.errors.CheckpointError: load_state_dict(state): the key 'dynamic' is missing",
    ),
    Mutant(
        "gives losses each other's scales",
        "checkpoint.recorded_states_load",
        patched(formats, "_apex", reads_apex_as_it_comes),
    ),
    Mutant(
        "writes factors of 1 for torch",
        "checkpoint.grad_scaler_of_torch_goes_on",
        patched(formats, "write_foreign", writes_static_factors),
    ),
    Mutant("loses masters", "checkpoint.model_state_is_exact", patched(masters, "save_masters", saves_parameters)),
    Mutant(
        "writes parameters and no masters",
        "checkpoint.model_state_writes_the_masters",
        patched(masters, "load_masters", loads_no_masters),
    ),
    Mutant(
        "takes a static scale for a dynamic one",
        "checkpoint.other_level",
        patched(checkpoint, "_moving_scales", takes_static_scales),
    ),
    Mutant(
        "leaves half of it loaded",
        "checkpoint.bad_state_changes_nothing",
        patched(checkpoint, "_matched", writes_as_it_goes),
    ),
    Mutant(
        "loads a scale of nan",
        "checkpoint.bad_state_changes_nothing",
        patched(formats, "_scale", takes_any_number),
    ),
    Mutant(
        "forgets overflows in a row",
        "checkpoint.overflows_in_a_row_are_remembered",
        patched(formats, "read", reads_no_runs),
    ),
    Mutant(
        "loads where it is disabled",
        "checkpoint.disabled_does_nothing",
        patched(checkpoint, "load", loads_where_disabled),
    ),
    Mutant(
        "GradScaler forgets its growth tracker",
        "checkpoint.grad_scaler_state",
        patched(GradScaler, "load_state_dict", forgets_the_tracker),
    ),
]
