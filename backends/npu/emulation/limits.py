"""What a card refuses though a CPU takes it, each with its source. The emulation refuses it too.

Some rows hold under ``xamp emulate --strict`` only. They refuse what no source shows a card to take, so they may refuse
what some card takes. docs/ascend.md lists what is left, where the emulation is kinder than a card.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from xamp.backends.npu.emulation import arithmetic
from xamp.backends.npu.emulation.documented import DOCUMENTED
from xamp.backends.npu.emulation.products import PRODUCTS

__all__ = ["LIMITS", "MAX_DIMENSIONS", "STRICT", "Limit", "guarded", "refuse_dimensions"]

STRICT = os.environ.get("XAMP_EMULATED_STRICT") == "1"
MAX_DIMENSIONS = 8


@dataclasses.dataclass(frozen=True)
class Limit:
    """One such row.

    Attributes:
        what: what a card refuses, or does otherwise.
        source: what shows it.
        strict: whether it holds under ``--strict`` only.
    """

    what: str
    source: str
    strict: bool = False


_LISTS = "Ascend/pytorch, docs/zh/api/native_api/pytorch_2-11-0"
LIMITS = (
    Limit(
        "matrix products and convolutions of float64, complex and most integer tensors",
        f"{_LISTS}: torch.mm, bmm, addmm, baddbmm, addbmm, mv, addmv, nn.functional.conv1d to conv3d",
    ),
    Limit("operators on tensors of more than eight dimensions", "sgl-project/sglang#14159: aclnnInplaceCopy"),
    Limit(
        "a collective on a tensor in a private format that does not begin at its storage's begin",
        "torch_npu, ProcessGroupHCCL.cpp: check_npu_tensors_same_device",
    ),
    Limit("an entry of hccl_config of another type than HCCL takes", "torch_npu 2.13.0, messages in libtorch_npu.so"),
    Limit("reductions of bits between cards", "torch_npu, ProcessGroupHCCL.cpp: getHcclReduceOp"),
    Limit("attention as one operator on chips before Atlas A2", "op-plugin, torch_npu-npu_fusion_attention.md"),
    Limit("more memory than the chip has", "the chips' data sheets; chips.py has the numbers"),
    Limit(
        "a dtype that neither the list of an operator nor CANN's page of its kernel names",
        f"{_LISTS}; CANN: aclnnReduceSum, aclnnMax",
        strict=True,
    ),
    Limit(
        "float64, complex and int16 in operators that no list names",
        f"{_LISTS}: what is left out there is shown by nothing",
        strict=True,
    ),
    Limit(
        "an index out of range: the card tells of it when the host waits for it, as a fault of the vector core",
        "Ascend/pytorch#66: error code 507035 from AclrtSynchronizeStreamWithTimeout",
        strict=True,
    ),
)

_NAMES = {
    torch.bfloat16: "DT_BFLOAT16",
    torch.float16: "DT_FLOAT16",
    torch.float32: "DT_FLOAT",
    torch.float64: "DT_DOUBLE",
    torch.complex64: "DT_COMPLEX64",
    torch.complex128: "DT_COMPLEX128",
    torch.bool: "DT_BOOL",
}
# What an operator without a list may be given.
_USUAL = frozenset(
    (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
)
# These make, fill, copy or describe tensors; every dtype that torch_npu can store is right for them.
_ANY_DTYPE = frozenset(
    (
        *("copy", "clone", "empty", "empty_like", "zeros_like", "ones_like", "fill", "zero", "full_like", "equal"),
        *("_local_scalar_dense", "_to_copy", "_copy_from", "_copy_from_and_resize", "item", "is_nonzero", "contiguous"),
        *("set", "resize", "resize_as", "normal", "uniform", "random", "eq", "ne", "isfinite", "isnan", "isinf"),
    )
)


def guarded(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` of operator ``name``, which refuses dtypes that the card's kernel does not take."""
    if not name.startswith("aten::"):
        return kernel
    base = _base(name)
    if base in _ANY_DTYPE:
        return kernel
    product = name.partition(".")[0] in PRODUCTS and not name.endswith((".dtype", ".dtype_out"))
    if not STRICT and not product:
        return kernel
    allowed = DOCUMENTED.get("convolution" if base.startswith(("convolution", "_convolution")) else base)
    allowed = _USUAL if allowed is None else allowed

    @functools.wraps(kernel)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first = _first_tensor(args)
        if first is not None and first.dtype not in allowed and first.device.type != "cpu":
            raise RuntimeError(_refusal(name, first.dtype, allowed))
        return kernel(*args, **kwargs)

    return checked


def _base(name: str) -> str:
    base = name.partition("::")[2].partition(".")[0]
    return base if base.startswith("__") else base.rstrip("_")


def _first_tensor(values: Any) -> torch.Tensor | None:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return value[0]
    return None


def _refusal(name: str, dtype: torch.dtype, allowed: frozenset[torch.dtype]) -> str:
    listed = ",".join(sorted(_named(each) for each in allowed))
    return (
        f"{name}: error code is 161002, AclNN_Parameter_Error(EZ1001): Tensor self not implemented for {_named(dtype)},"
        f" should be in dtype support list [{listed}]. (emulated {arithmetic.CHIP.name})"
    )


def _named(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or f"DT_{str(dtype).removeprefix('torch.').upper()}"


def refuse_dimensions(name: str) -> None:
    """Raise what a card raises for a tensor of nine or more dimensions."""
    raise RuntimeError(
        f"{name}: error code is 161002, AclNN_Parameter_Error(EZ1001): The self tensor cannot be larger than"
        f" {MAX_DIMENSIONS} dimensions. (emulated {arithmetic.CHIP.name})"
    )
