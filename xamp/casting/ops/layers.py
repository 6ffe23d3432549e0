"""Recurrent layers: casts the arguments of a call, and lets the backend put weights where the device wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from xamp.casting.ops.parts import CastArguments, cast_all, device_test
from xamp.contract import Backend, RecurrentLayer
from xamp.torch_compat.torch_private.autocast import get_autocast_dtype

__all__ = ["Join", "join_weights", "layer_caster", "serve"]

Join = Callable[[Sequence[torch.Tensor], RecurrentLayer], None]
""":meth:`xamp.contract.Backend.join_weights_`."""

_joins: dict[str, Join] = {}  # by device type, where the backend has one


def serve(device_type: str, backend: Backend) -> None:
    """Let ``backend`` join the weights that are cast on ``device_type`` from now on."""
    if type(backend).join_weights_ is not Backend.join_weights_:
        _joins[device_type] = backend.join_weights_


def join_weights(module: nn.RNNBase, join: Join) -> None:
    """Let a backend join the weights of a module that were cast. Tied weights, and parts of weights, stay apart."""
    weights: list[Any] = module._flat_weights
    addresses = {weight.data_ptr() for weight in weights if type(weight) is nn.Parameter}
    if len(addresses) == len(module._flat_weights_names):
        sizes = module.input_size, module.hidden_size, module.proj_size, module.num_layers
        with torch.no_grad():
            join(weights, RecurrentLayer(module.mode.lower(), *sizes, module.bias, module.bidirectional))


def layer_caster(overload: str, device_type: str) -> CastArguments:
    """Return the function that lowers the arguments of ``overload``, a recurrent layer, to the region's dtype."""
    on_device = device_test(device_type)
    kind, _, variant = overload.partition(".")
    place = 3 if variant == "data" else 2  # of the weights, after the input, the lengths of packed sequences, the state

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        made, kwargs = cast_all(args, kwargs, get_autocast_dtype(device_type), on_device)
        join = _joins.get(device_type)
        if join is not None and _are_new(made[place], args[place]):
            with torch.no_grad():
                join(made[place], _layer(kind, made, place))
        return made, kwargs

    return cast


def _are_new(made: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether all weights are ordinary tensors that the cast made: no others may move to another storage."""
    return all(type(m) is torch.Tensor and m is not g for m, g in zip(made, given, strict=True))


def _layer(kind: str, args: Sequence[Any], place: int) -> RecurrentLayer:
    """Return what a call says of its layer. After the weights it has ``bias``, the number of layers, ... both ways."""
    states = args[place - 1] if kind == "lstm" else [args[place - 1]]
    hidden = states[-1].size(2)
    projected = states[0].size(2)
    bias, num_layers, _, _, bidirectional = args[place + 1 : place + 6]
    return RecurrentLayer(
        *(kind, args[0].size(-1), hidden, 0 if projected == hidden else projected), num_layers, bias, bidirectional
    )
