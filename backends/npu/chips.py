"""A table of Ascend chips and their properties. It imports no torch."""

from __future__ import annotations

import dataclasses

__all__ = ["CHIPS", "DEFAULT", "EMULATED", "Chip", "find"]


@dataclasses.dataclass(frozen=True)
class Chip:
    """One system on a chip, as CANN names it.

    Attributes:
        name: the result of ``aclrtGetSocName`` and of ``torch.npu.get_device_name()``.
        family: the product series that contains the chip.
        number: the result of ``torch.npu.get_soc_version()``.
        bf16: whether the chip computes in bfloat16.
        saturates: whether by default a float16 overflow becomes the largest number and raises a flag, so that no inf
            or nan shows. Newer chips can be switched to that.
        mixed_fp32: whether float32 matrix products run in float16 by default.
        mx: whether the chip multiplies in microscaled fp8.
        memory: GiB of the smallest card with this chip, by its data sheet; 0 if no data sheet was seen.
    """

    name: str
    family: str
    number: int
    bf16: bool
    saturates: bool
    mixed_fp32: bool
    mx: bool = False
    memory: int = 0


def _family(family: str, numbers: dict[str, int], *, bf16: bool, saturates: bool) -> dict[str, Chip]:
    return {
        name: Chip(
            name,
            family,
            number,
            bf16=bf16,
            saturates=saturates,
            mixed_fp32=number < _FIRST_A2,
            mx=number >= _FIRST_950,
            memory=_MEMORY.get(name, 0),
        )
        for name, number in numbers.items()
    }


_FIRST_A2, _FIRST_950 = 220, 260
# Atlas 300T and 800 (9000): 32; Atlas 300I Pro: 24; Atlas 200T A2 Box16, Atlas 800T A2, 900 A2: 64; 910B4: 32. Atlas A3
# has 64 for each of a card's two dies, which are two devices.
_MEMORY = {
    **dict.fromkeys(("Ascend910PremiumA", "Ascend910ProA", "Ascend910A", "Ascend910ProB", "Ascend910B"), 32),
    "Ascend310P3": 24,
    **dict.fromkeys(("Ascend910B1", "Ascend910B2", "Ascend910B2C", "Ascend910B3", "Ascend910B4-1"), 64),
    "Ascend910B4": 32,
    **dict.fromkeys(("Ascend910_9391", "Ascend910_9392", "Ascend910_9381", "Ascend910_9382"), 64),
    **dict.fromkeys(("Ascend910_9372", "Ascend910_9362", "Ascend910_9363"), 64),
}

# Ascend910B without a digit after it is an old chip that saturates; Ascend910B1 and later are the next generation.
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
"""The environment variable that names the chip of an emulated card; not set if the card is real."""

CHIPS: dict[str, Chip] = {
    **_family("Atlas training series", _ATLAS_TRAINING, bf16=False, saturates=True),
    **_family("Atlas inference series", _ATLAS_INFERENCE, bf16=False, saturates=True),
    **_family("Atlas A2", _A2, bf16=True, saturates=False),
    **_family("Atlas 200I/500 A2 inference", _A2_INFERENCE, bf16=True, saturates=True),
    **_family("Atlas A3", _A3, bf16=True, saturates=False),
    **_family("Ascend 950", {"Ascend950DT": 260}, bf16=True, saturates=False),
}


def find(name: str) -> Chip | None:
    """The chip with that name, or None if it is not in the table.

    Args:
        name: as CANN spells it, in upper or lower case, with or without ``Ascend``. Text after a blank, such as
            "(emulated)", is ignored.
    """
    wanted = name.partition(" ")[0].lower().removeprefix("ascend")
    return next((chip for chip in CHIPS.values() if chip.name.lower().removeprefix("ascend") == wanted), None)
