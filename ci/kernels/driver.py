"""A driver without a card: launches go through Triton's real JIT, its binder and specialisation, and end there."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from xamp.onepass import kernels

__all__ = ["TARGETS", "Variant", "noted"]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


_NOT_COMPILED = mock.MagicMock(function=None, packed_metadata=None)
"""In the place of a compiled kernel: a launch ends here."""


class Variant(NamedTuple):
    """The name of a kernel, and its constants of dtypes and of what is asked, as ``NAME=value`` with spaces."""

    kernel: str
    constants: str

    @classmethod
    def of(cls, kernel: str, constants: dict[str, Any]) -> Variant:
        """Return the variant of a launch."""
        values = {key: int(value) if isinstance(value, bool) else value for key, value in constants.items()}
        return cls(kernel, " ".join(f"{key}={value}" for key, value in values.items()))


class _Utils:
    """What loads a kernel onto a card."""

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return (1, 1, 32, 0, 1024)[: 5 if tuple(map(int, triton.__version__.split(".")[:2])) > (3, 3) else 4]

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32, "multiprocessor_count": 132}


class _NoCard(DriverBase):  # type: ignore[misc]  # Triton has no types
    """The driver of a card that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.utils, self.launcher_cls, self._target = _Utils(), mock.MagicMock, target
        super().__init__()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self, *_: int) -> int:
        return 0

    get_current_stream = get_current_device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        return None


@contextlib.contextmanager
def noted(target: str, wanted: Callable[[Variant], bool]) -> Iterator[dict[Variant, Any]]:
    """Let all launches in the block go through the JIT for ``target``; yield what becomes of each variant.

    That is the compiled kernel where ``wanted`` says so, and None where it was bound and specialised only.
    """
    os.environ.setdefault("TRITON_HIP_LLD_PATH", str(pathlib.Path(__file__).with_name("no_linker.sh")))
    driver.set_active(_NoCard(TARGETS[target]))
    found: dict[Variant, Any] = {}
    with contextlib.ExitStack() as stack:
        for name in kernels.__all__:
            jit = getattr(kernels, name)
            jit.device_caches.clear()
            setattr(kernels, name, _Noting(name, jit, wanted, found))
            stack.callback(setattr, kernels, name, jit)
        yield found


class _Noting:
    """A kernel whose launches are noted."""

    def __init__(self, name: str, jit: Any, wanted: Callable[[Variant], bool], found: dict[Variant, Any]) -> None:
        self._name, self._jit, self._wanted, self._found = name, jit, wanted, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            variant = Variant.of(self._name, constants)
            self._jit.device_caches[0]  # made here, for it says how to compile
            is_wanted, compile_ = self._wanted(variant), triton.compile
            self._jit.compile = compile_ if is_wanted else lambda *_, **__: _NOT_COMPILED
            kernel = self._jit[grid](*args, **constants, num_warps=num_warps)
            kinds = len(self._jit.device_caches[0][0])
            self._found.setdefault(variant, kernel if is_wanted else None)
            if kinds != len({key for key in self._found if key.kernel == self._name}):
                raise RuntimeError(f"{variant}: the JIT compiles it a second time, for it specialises on an argument")

        return launch
