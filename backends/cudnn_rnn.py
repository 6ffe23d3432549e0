"""Recurrent layers in cuDNN: where it has them in bf16, and the one block of memory in which it wants their weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from xamp.backends import torch_private
from xamp.contract import RecurrentLayer, Setting

__all__ = ["MODES", "has_bf16", "join_", "settings"]

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""The layers, with cuDNN's numbers for them (``cudnnRNNMode_t``)."""

_SINCE_CUDNN, _SINCE_TORCH, _SINCE_CARD = (9, 13), (2, 10), (8, 0)
"""cuDNN has the layers in bf16 since 9.13, and torch calls them in the releases and on the cards that follow."""
_SLOW = "LSTM, GRU and RNN in bfloat16 run outside of {library}, by several kernels for each time step: that is slow"
_CURE = "keep_fp32=(torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN) runs them in float32"


def join_(weights: Sequence[torch.Tensor], layer: RecurrentLayer) -> None:
    """Move weights into one block of memory, in cuDNN's layout, if cuDNN runs the layer in their dtype.

    Without this, cuDNN copies them into such a block at each call, and torch warns of it. What
    ``torch.nn.RNNBase.flatten_parameters`` does is the same, but leaves bf16 out.

    Args:
        weights: see :meth:`xamp.contract.Backend.join_weights_`.
        layer: see there.
    """
    first = weights[0]
    if not torch_private.get_cudnn_enabled() or not torch_private.use_cudnn_rnn_flatten_weight():
        return
    if first.dtype is torch.bfloat16 and not has_bf16(first.device):
        return
    in_each = (4 if layer.bias else 2) + bool(layer.proj_size)
    sizes = layer.input_size, MODES[layer.kind], layer.hidden_size, layer.proj_size, layer.num_layers
    with torch.cuda.device_of(first):
        torch_private.cudnn_rnn_flatten_weight(list(weights), in_each, *sizes, False, layer.bidirectional)


def has_bf16(device: torch.device) -> bool:
    """Whether cuDNN runs recurrent layers in bf16 on a card: torch decides it by its build and the card."""
    index: int | None = device.index
    return _card_has_bf16(torch.cuda.current_device() if index is None else index)


@functools.cache  # at O4 each forward of a layer asks
def _card_has_bf16(card: int) -> bool:
    if torch.version.hip is not None:  # MIOpen has them in fp16 and fp32
        return False
    properties = torch.cuda.get_device_properties(card)
    return _is_new_enough(_torch_version(), torch_private.cudnn_built_with(), (properties.major, properties.minor))


def settings(device: torch.device) -> Iterator[Setting]:
    """What ``doctor`` shows where recurrent layers do not run in cuDNN or MIOpen in bf16."""
    cudnn: Any = torch.backends.cudnn  # has no types
    if not cudnn.is_available() or has_bf16(device):
        return
    hip = torch.version.hip is not None
    cure = _CURE if hip else f"{_CURE}; or a torch that was built with cuDNN {_spelt(_SINCE_CUDNN)}"
    effect = _SLOW.format(library="MIOpen" if hip else "cuDNN")
    yield Setting("torch.backends.cudnn.version()", str(cudnn.version()), effect, cure, expected=True)


def _is_new_enough(torch_version: tuple[int, ...], cudnn: tuple[int, ...], card: tuple[int, int]) -> bool:
    return torch_version >= _SINCE_TORCH and cudnn >= _SINCE_CUDNN and card >= _SINCE_CARD


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def _spelt(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
