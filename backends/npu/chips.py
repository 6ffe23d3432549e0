"""What there is to know of each Ascend chip without asking one. Imports no torch."""

from __future__ import annotations

import dataclasses

__all__ = ["CHIPS", "DEFAULT", "EMULATED", "Chip", "find"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """One system on a chip, as CANN names it.

    Attributes:
        name: what ``aclrtGetSocName`` says, and ``torch.npu.get_device_name()``.
        family: the products it is in.
        number: ``torch.npu.get_soc_version()``.
        bf16: whether it computes in bfloat16.
        saturates: whether a float16 overflow becomes the largest number and raises a flag, so that no inf or nan shows.
            Newer chips can be told to; this is what they do by themselves.
        mixed_fp32: whether matrix products of float32 run in float16 unless told otherwise.
    """

    name: str
    family: str
    number: int
    bf16: bool
    saturates: bool
    mixed_fp32: bool


def _family(family: str, numbers: dict[str, int], *, bf16: bool, saturates: bool) -> dict[str, Chip]:
    return {
        name: Chip(name, family, number, bf16=bf16, saturates=saturates, mixed_fp32=number < _FIRST_A2)
        for name, number in numbers.items()
    }


_FIRST_A2 = 220

# Ascend910B without a figure after it is an old chip that saturates; Ascend910B1 and on are the next generation.
_ATLAS_TRAINING = {
    "Ascend910PremiumA": 100,
    "Ascend910ProA": 101,
    "Ascend910A": 102,
    "Ascend910ProB": 103,
    "Ascend910B": 104,
}
_ATLAS_INFERENCE = {
    "Ascend310P1": 200,
    "Ascend310P2": 201,
    "Ascend310P3": 202,
    "Ascend310P4": 203,
    "Ascend310P5": 204,
    "Ascend310P7": 205,
}
_A2 = {
    "Ascend910B1": 220,
    "Ascend910B2": 221,
    "Ascend910B2C": 222,
    "Ascend910B3": 223,
    "Ascend910B4": 224,
    "Ascend910B4-1": 225,
}
_A2_INFERENCE = {"Ascend310B1": 240, "Ascend310B2": 241, "Ascend310B3": 242, "Ascend310B4": 243}
_A3 = {
    "Ascend910_9391": 250,
    "Ascend910_9392": 251,
    "Ascend910_9381": 252,
    "Ascend910_9382": 253,
    "Ascend910_9372": 254,
    "Ascend910_9362": 255,
    "Ascend910_9363": 256,
}

DEFAULT = "Ascend910B2"

EMULATED = "XAMP_EMULATED_SOC"
"""The environment variable that names the chip of an emulated card; not set where the card is real."""

CHIPS: dict[str, Chip] = {
    **_family("Atlas training series", _ATLAS_TRAINING, bf16=False, saturates=True),
    **_family("Atlas inference series", _ATLAS_INFERENCE, bf16=False, saturates=True),
    **_family("Atlas A2", _A2, bf16=True, saturates=False),
    **_family("Atlas 200I/500 A2 inference", _A2_INFERENCE, bf16=True, saturates=True),
    **_family("Atlas A3", _A3, bf16=True, saturates=False),
    **_family("Ascend 950", {"Ascend950DT": 260}, bf16=True, saturates=False),
}


def find(name: str) -> Chip | None:
    """The chip of that name, or None where it is not known.

    Args:
        name: as CANN spells it, upper or lower case, with or without ``Ascend``; what follows a blank, such as
            "(emulated)", is passed over.
    """
    wanted = name.partition(" ")[0].lower().removeprefix("ascend")
    return next((chip for chip in CHIPS.values() if chip.name.lower().removeprefix("ascend") == wanted), None)
