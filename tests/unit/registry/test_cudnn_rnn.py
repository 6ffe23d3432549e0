"""What the CUDA backend knows of recurrent layers in cuDNN: where it has them in bf16, and how it wants the weights.

Covers: backends.cudnn_rnn, backends.cuda.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from xamp.backends import cudnn_rnn, torch_private
from xamp.backends.cuda import CudaBackend
from xamp.casting.ops.layers import join_weights
from xamp.contract import BackendSpec, Setting

CUDA = BackendSpec("cuda", ("cuda",), "xamp.backends.cuda:CudaBackend")
CARD = torch.device("cuda")
NEWEST: tuple[Any, ...] = ((2, 10), (9, 13, 0), (8, 0), None)
"""The oldest torch, cuDNN and card with the layers in bf16; and no HIP."""
OLDER = {
    "torch 2.9": ((2, 9), *NEWEST[1:]),
    "cuDNN 9.12": (NEWEST[0], (9, 12, 2), *NEWEST[2:]),
    "no cuDNN": (NEWEST[0], (), *NEWEST[2:]),
    "a card before Ampere": (*NEWEST[:2], (7, 5), None),
    "HIP": (*NEWEST[:3], "6.3"),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(torch_version: Any, cudnn: Any, card: Any, hip: Any) -> None:
        cudnn_rnn._card_has_bf16.cache_clear()
        properties = types.SimpleNamespace(major=card[0], minor=card[1])
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch, "__version__", ".".join(map(str, (*torch_version, "0+cu130"))))
        built_with = None if not cudnn else types.SimpleNamespace(getCompileVersion=lambda: cudnn)
        monkeypatch.setattr(torch._C, "_cudnn", built_with, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: bool(cudnn))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)

    yield make
    cudnn_rnn._card_has_bf16.cache_clear()


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments with which torch's operator is called; on a CPU, where it has no kernel, here it has one."""
    called: list[Any] = []

    def flatten(weights: list[torch.Tensor], *rest: Any) -> torch.Tensor:
        called.append(([weight.shape for weight in weights], *rest))
        block = torch.zeros(sum(weight.numel() for weight in weights), dtype=weights[0].dtype)
        for weight, place in zip(weights, block.split([weight.numel() for weight in weights]), strict=True):
            weight.set_(place.view(weight.shape).copy_(weight))
        return block

    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn_flatten_weight", flatten, "CPU")
    monkeypatch.setattr(torch_private, "use_cudnn_rnn_flatten_weight", lambda: True)
    yield called
    library._destroy()


LAYERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lstm": (nn.LSTM(8, 4, 2, bidirectional=True), (4, 8, 2, 4, 0, 2, False, True)),
    "projected": (nn.LSTM(8, 4, proj_size=3), (5, 8, 2, 4, 3, 1, False, False)),
    "gru": (nn.GRU(8, 4, bias=False, batch_first=True), (2, 8, 3, 4, 0, 1, False, False)),
    "tanh": (nn.RNN(8, 4), (4, 8, 1, 4, 0, 1, False, False)),
    "relu": (nn.RNN(8, 4, nonlinearity="relu"), (4, 8, 0, 4, 0, 1, False, False)),
}
"""Of each layer the weights in a group, the size of the input, cuDNN's number, the sizes of state and projection, the
number of layers, whether the batch is first (not of interest here), and whether both ways."""


@pytest.mark.parametrize("name", LAYERS)
def test_weights_are_flattened_as_cudnn_numbers_them(name: str, flattened: list[Any], machine: Any) -> None:
    machine(*NEWEST)
    layer, rest = LAYERS[name]
    model = copy.deepcopy(layer).bfloat16()
    before = [weight.clone() for weight in model._flat_weights]
    join_weights(model, CudaBackend(CUDA).join_weights_)
    assert flattened == [([weight.shape for weight in before], *rest)]
    assert len({weight.untyped_storage().data_ptr() for weight in model._flat_weights}) == 1
    assert all(map(torch.equal, model._flat_weights, before))
    assert all(weight.requires_grad and weight.is_leaf for weight in model._flat_weights)


@pytest.mark.parametrize("older", OLDER)
def test_without_the_layers_in_bf16_nothing_is_flattened_and_a_note_says_so(
    older: str, flattened: list[Any], machine: Any
) -> None:
    machine(*OLDER[older])
    join_weights(nn.LSTM(8, 4).bfloat16(), CudaBackend(CUDA).join_weights_)
    assert flattened == []
    join_weights(nn.LSTM(8, 4).half(), CudaBackend(CUDA).join_weights_)
    assert len(flattened) == 1
    found = notes()
    if older == "no cuDNN":
        assert found == []  # then no dtype runs there
        return
    (note,) = found
    assert (note.value, note.severity) == ("91200", "note")
    library = "MIOpen" if older == "HIP" else "cuDNN"
    assert note.effect.startswith(f"LSTM, GRU and RNN in bfloat16 run outside of {library}")
    assert note.undo.startswith("keep_fp32=(torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)")
    assert ("cuDNN 9.13" in note.undo) is (older != "HIP")
    assert not note.narrows_fp32


def test_with_them_there_is_no_note(machine: Any) -> None:
    machine(*NEWEST)
    assert notes() == []


def test_with_cudnn_switched_off_nothing_is_flattened(flattened: list[Any], machine: Any) -> None:
    machine(*NEWEST)
    with torch.backends.cudnn.flags(enabled=False):
        join_weights(nn.LSTM(8, 4).half(), CudaBackend(CUDA).join_weights_)
    assert flattened == []


def test_a_card_is_asked_once(flattened: list[Any], machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(*NEWEST)
    asked: list[int] = []
    cards = {0: types.SimpleNamespace(major=8, minor=0), 1: types.SimpleNamespace(major=7, minor=5)}

    def properties(card: int) -> types.SimpleNamespace:
        asked.append(card)
        return cards[card]

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for _ in range(3):
        join_weights(nn.LSTM(8, 4).bfloat16(), CudaBackend(CUDA).join_weights_)
    assert (len(flattened), asked) == (3, [0])
    assert [cudnn_rnn.has_bf16(torch.device("cuda", index)) for index in (1, 0, 1)] == [False, True, False]
    assert asked == [0, 1]


def notes() -> list[Setting]:
    return [row for row in CudaBackend(CUDA).precision_settings(CARD) if row.name == "torch.backends.cudnn.version()"]


def test_the_backend_names_all_layers() -> None:
    names = {f"{kind}.{form}" for kind in cudnn_rnn.MODES for form in ("data", "input")}
    assert {overload for overload, rule in CudaBackend.op_rules.items() if rule == "float16"} == names
    assert len(names) == 8
