"""Nothing is silent: what the emulation does not serve raises its own name.

Covers: backends.npu.emulation.kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

# Kernels of torch_npu's own that stay: they make, view, describe or record memory, or set a limit, and compute nothing.
ON_MEMORY = (
    "_pin_memory _reshape_alias as_strided as_strided_ empty.memory_format empty_like empty_strided is_pinned is_set_to"
    " new_empty_strided record_stream resize_ resize_as_ set_ set_.source_Storage set_.source_Storage_storage_offset"
    " set_.source_Tensor squeeze squeeze.dim unfold unsqueeze view view_as_complex view_as_real"
)
STAY = {f"aten::{name}" for name in ON_MEMORY.split()}
STAY |= {"npu::_npu_format_cast.input_dtype", "npu::get_npu_format", "npu::get_storage_size", "npu::set_op_timeout_ms"}


def is_operator(name: str) -> bool:
    """Whether it can be called: some kernels are registered for names that no operator has."""
    base, _, overload = name.partition(".")
    try:
        torch._C._dispatch_find_schema_or_throw(base, overload)
    except RuntimeError:
        return False
    return True


def kernels(key: str) -> dict[str, str]:
    """By operator, what torch's dispatcher says of its kernel for ``key``."""
    found = {}
    for name in filter(is_operator, torch._C._dispatch_get_registrations_for_dispatch_key(key)):
        lines = [line for line in torch._C._dispatch_dump(name).splitlines() if line.startswith((f"{key}:", f"{key} "))]
        if lines:
            found[name] = lines[0]
    return found


def test_every_kernel_of_torch_npu_is_served_or_raises_or_computes_nothing() -> None:
    registered = kernels("PrivateUse1")
    assert len(registered) > 1500
    assert {name for name, line in registered.items() if "emulation" not in line} == STAY


UNSERVED: dict[str, Callable[[], object]] = {
    "npu::npu_giou": lambda: torch.ops.npu.npu_giou(torch.ones(4, 2, device="npu"), torch.ones(4, 2, device="npu")),
    "npu::npu_iou": lambda: torch.ops.npu.npu_iou(torch.ones(2, 4, device="npu"), torch.ones(2, 4, device="npu")),
    # It draws random numbers, for its dropout.
    "npu::_npu_dropout": lambda: torch.ops.npu._npu_dropout(torch.ones(4, device="npu"), 0.5),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_an_operator_that_is_not_served_raises_its_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"(?s){name}.*emulated|emulated.*{name}"):
        UNSERVED[name]()


def test_an_operator_of_the_users_runs_by_its_kernel_for_the_cpu() -> None:
    library = torch.library.Library("xamp_mine", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    made = torch.ops.xamp_mine.twice(torch.ones(3, device="npu"))
    assert made.device.type == "npu"
    assert made.tolist() == [2.0, 2.0, 2.0]
