"""What a launch on a card goes through first: the binder that the JIT makes of a signature. An interpreter has none.

Covers: xamp.onepass.kernels, xamp.onepass.sums.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit

from xamp.onepass import kernels

KERNELS = sorted(name for name, value in vars(kernels).items() if hasattr(value, "fn") and hasattr(value, "arg_names"))


def test_all_kernels_are_looked_at() -> None:
    assert {"by_row", "clip_factor", "factors", "step", "sums", "total"} < set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_the_binder_of_a_launch_takes_the_signature(name: str) -> None:
    """It makes ``def dynamic_func(<parameters>, **options)``, whose names may not meet."""
    kernel: Any = jit.JITFunction(getattr(kernels, name).fn)
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    bound, specialised, options = bind(*range(len(kernel.params)), num_warps=8)
    assert list(bound) == kernel.arg_names
    assert len(specialised) == len(kernel.params)
    assert options == {"num_warps": 8}
