"""Broken backends for the clauses of tier ``operators``: entries that cast too much, or too little."""

from __future__ import annotations

import torch
from half_layers import HalfLayers, half_layers
from mutants import Breaks, Mutant, also, patched, registered
from op_entries import anew

from xamp.backends.cpu import CpuBackend
from xamp.casting import active, ops
from xamp.casting.ops import fixed_dtype, portable
from xamp.casting.ops.table import LAYERS
from xamp.casting.region import Region
from xamp.casting.region_mark import mark_of
from xamp.contract import Backend


class KeepsSoftmax(CpuBackend):
    """Says that the device's own softmax does as the table says, which it does not."""

    op_rules = {**CpuBackend.op_rules, "softmax.int": "same"}


class KeepsRecurrent(CpuBackend):
    """The same of recurrent layers."""

    op_rules = {
        **CpuBackend.op_rules,
        **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), "same"),
    }


class KeepsHalf(HalfLayers):
    """Says the same of layers that its autocast casts to fp16 whatever the dtype of the region."""

    op_rules = {**CpuBackend.op_rules, **dict.fromkeys(sorted(LAYERS), "same")}


def _backend(cls: type) -> Breaks:
    return also(registered(f"{__name__}:{cls.__name__}"), anew)


def _patched_entries(target: object, name: str, new: object) -> Breaks:
    return also(patched(target, name, new), anew)


_EVERY_FLOAT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ALWAYS_PORTABLE = property(lambda self: mark_of(self.device_type, self.autocast_dtype, True))


def _install_portable(_: ops.OpPolicy, device_type: str, backend: Backend) -> None:
    portable.install(device_type, backend.op_rules)


MUTANTS = [
    Mutant("leaves softmax in the lower dtype", "operators.result_dtype", _backend(KeepsSoftmax), "mutant"),
    Mutant("leaves recurrent layers as they are", "operators.recurrent_layer", _backend(KeepsRecurrent), "mutant"),
    Mutant(
        "recurrent layers in fp16 under bf16",
        "operators.recurrent_layer",
        also(registered(f"{__name__}:KeepsHalf"), half_layers),
        "mutant",
    ),
    Mutant("casts float64", "operators.never_cast", _patched_entries(portable, "SINGLE", _EVERY_FLOAT)),
    Mutant(
        "the portable table under native",
        "operators.native_policy",
        also(patched(Region, "mark", _ALWAYS_PORTABLE), patched(fixed_dtype.OwnList, "install", _install_portable)),
    ),
    Mutant(
        "acts in foreign regions",
        "operators.foreign_code_is_untouched",
        _patched_entries(active, "read_portable", lambda: True),
    ),
]
