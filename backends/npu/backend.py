"""Ascend NPUs, through torch_npu: its autocast, its kernels, and its overflow flag if the chip saturates."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from xamp.backend_kit import environment_settings, first_line, fp8_recipes, fused_forms
from xamp.backends import torch_private
from xamp.backends.native import LOWER_DTYPES, ModuleBackend
from xamp.backends.npu import chips, torch_npu_features
from xamp.contract import Setting
from xamp.errors import BackendUnavailable

__all__ = ["NpuBackend"]

_PACKAGE = "torch_npu"
_BLOCK = 32  # values that share a scale of microscaled fp8
_STATUS = 8
"""The number of elements in a float status; the first one is the flag."""


class _InBlocks(NamedTuple):
    """A matrix in microscaled fp8: its values, and the scales of two blocks in a row."""

    values: torch.Tensor
    scale: torch.Tensor

    def turned(self) -> _InBlocks:
        """The transposed matrix."""
        return _InBlocks(self.values.t(), self.scale.transpose(0, 1))


class NpuBackend(ModuleBackend):
    """Ascend NPUs, by torch.autocast("npu") and scaling on the device.

    There are two kinds of chips. On one an overflow is inf or nan. The other saturates and raises a flag, which this
    class lowers and reads (``overflow="flag"``).
    """

    fast_dtypes = ("bfloat16", "float16")
    process_group = "hccl"

    # ---------------------------------------------------------------- whether it is there

    def require_device(self) -> None:
        """See :meth:`xamp.backends.native.NativeBackend.require_device`: torch_npu, then a device that starts."""
        if _PACKAGE not in sys.modules:
            if importlib.util.find_spec(_PACKAGE) is None:
                release = torch.__version__.partition("+")[0]
                raise BackendUnavailable(
                    f"torch_npu is not installed beside torch {torch.__version__}\n"
                    f"on a machine with Ascend NPUs and CANN: pip install torch-npu=={release}"
                )
            importlib.import_module(_PACKAGE)  # the table of causes explains its errors
        if self.is_available():
            return
        try:
            self.module.init()  # is_available() swallows the reason
        except Exception as error:
            raise BackendUnavailable(f"the NPU does not start: {first_line(error)}\nrun npu-smi info") from error
        super().require_device()

    def keeps_inf(self, device: torch.device) -> bool:
        """See :meth:`xamp.backends.native.NativeBackend.keeps_inf`."""
        return not self._saturates

    # ---------------------------------------------------------------- what it can do

    @functools.cached_property
    def _saturates(self) -> bool:
        """Whether the chip saturates. The chip and INF_NAN_MODE_FORCE_DISABLE decide that when the device starts."""
        return not self._utils.is_support_inf_nan()

    @property
    def _utils(self) -> Any:
        return sys.modules[_PACKAGE].npu.utils

    def devices(self) -> Sequence[str]:
        """See :meth:`xamp.contract.Backend.devices`."""
        return [f"{name}{_emulated()}" for name in super().devices()]

    def chip(self, device: torch.device | None = None) -> chips.Chip | None:
        """The chip's row in the table; None for a chip that is newer than this xamp."""
        return chips.find(str(self.module.get_device_name(device)))

    def dtypes(self, device: torch.device | None = None) -> tuple[str, ...]:
        """See :meth:`xamp.backends.native.NativeBackend.dtypes`: torch_npu says whether the chip has bf16.

        A trial could not tell: without bf16 some operators compute in it all the same.
        """
        return tuple(name for name in LOWER_DTYPES if name != "bfloat16" or self.module.is_bf16_supported())

    def fused_optimizers_of(self, device: torch.device) -> tuple[str, ...]:
        """See :meth:`xamp.backends.native.NativeBackend.fused_optimizers_of`.

        torch_npu computes on the CPU what it has no kernel for, which is right and slow, so only its own are tried. Of
        these AdamW ignores ``found_inf``, and SGD needs momentum.
        """
        return fused_forms(device, lambda name: _has_kernel(f"_fused_{name.lower()}_"))

    def fp8_of(self, device: torch.device) -> tuple[str, ...]:
        """mxfp8 on a chip that has it, if a trial finds it right.

        torch_npu computes on the CPU what it has no kernel for, torch's own products in fp8 too: other recipes are not
        the hardware's.
        """
        chip = self.chip(device)
        return tuple(name for name in fp8_recipes(self, device) if name == "mxfp8") if chip and chip.mx else ()

    def versions(self) -> Mapping[str, str]:
        """See :meth:`xamp.contract.Backend.versions`: torch, torch_npu, CANN, the driver and the kind of chip."""
        found = {"torch": torch.__version__, "torch_npu": str(sys.modules[_PACKAGE].__version__)}
        chip = self.chip()
        family = "newer than this xamp" if chip is None else chip.family
        below = {
            "CANN": self._version_of("CANN"),
            "driver": self._version_of("DRIVER"),
            "chip": f"{self.module.get_soc_version()} ({family})",
        }
        return {**found, **{name: value + _emulated() for name, value in below.items()}}

    def _version_of(self, part: str) -> str:
        """A version that torch_npu reads from CANN; an older or partly installed CANN does not report it."""
        try:
            return str(self._utils.get_cann_version(part)) or "unknown"
        except Exception:  # this torch_npu cannot ask CANN
            return "unknown"

    # ---------------------------------------------------------------- the step

    def clear_overflow(self, device: torch.device) -> None:
        """See :meth:`xamp.contract.Backend.clear_overflow`."""
        if self._saturates:
            status = torch.zeros(_STATUS, dtype=torch.float32, device=device)
            sys.modules[_PACKAGE].npu_clear_float_status(status)

    def unscale_(self, grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """See :meth:`xamp.contract.Backend.unscale_`.

        On a chip that saturates this reads the flag and leaves it up. The operator that torch.amp calls would lower
        the flag, so that the next optimizer would not see it, and would leave the gradients scaled.
        """
        if not self._saturates:
            if grads:
                super().unscale_(grads, found_inf, inv_scale)
            return
        status = torch.zeros(_STATUS, dtype=torch.float32, device=found_inf.device)
        flag = sys.modules[_PACKAGE].npu_get_float_status(status)[0]
        torch.maximum(found_inf, flag.ne(0).to(found_inf.dtype).reshape(found_inf.shape), out=found_inf)
        # A sparse gradient, which is not for this method, is refused here: torch_npu tells no format of it.
        lists = [grad for grad in grads if self.plain(grad) is grad]
        if lists:
            torch_private.foreach_mul_(lists, inv_scale)
        for grad in grads:
            if self.plain(grad) is not grad:
                grad.mul_(inv_scale)

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Any:
        """See :meth:`xamp.contract.Backend.to_fp8`. Blocks are cast by the chip's operator, which takes 16 bits."""
        if scaling != "block":
            return super().to_fp8(matrix, kind, scaling, axis)
        rows = _in_16_bits(matrix if axis == 1 else matrix.t())
        made = _InBlocks(*sys.modules[_PACKAGE].npu_dynamic_mx_quant(rows, dst_type=self._fp8_dtype(kind)))
        return made if axis == 1 else made.turned()

    def to_fp8_both(self, matrix: torch.Tensor, kind: str, scaling: str) -> Any:
        """See :meth:`xamp.contract.Backend.to_fp8_both`. The chip's operator reads the matrix once."""
        cast = getattr(sys.modules[_PACKAGE], "npu_dynamic_mx_quant_with_dual_axis", None)
        if scaling != "block" or cast is None:
            return None
        along_1, scale_1, along_0, scale_0 = cast(_in_16_bits(matrix), dst_type=self._fp8_dtype(kind))
        return _InBlocks(along_1, scale_1), _InBlocks(along_0, scale_0)

    def _fp8_dtype(self, kind: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.fp8_formats[kind])
        return found

    def scaled_mm(self, left: Any, right: Any, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        """See :meth:`xamp.contract.Backend.scaled_mm`."""
        if not isinstance(left, _InBlocks):
            return super().scaled_mm(left, right, dtype, fast)
        npu = sys.modules[_PACKAGE]
        product: torch.Tensor = npu.npu_quant_matmul(
            *(left.values, right.values, right.scale),
            pertoken_scale=left.scale,
            output_dtype=dtype,
            scale_dtype=npu.float8_e8m0fnu,
            pertoken_scale_dtype=npu.float8_e8m0fnu,
            group_sizes=[1, 1, _BLOCK],
        )
        return product

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`xamp.contract.Backend.plain`: a private format is cast to ND."""
        return torch_npu_features.plain(tensor)

    def join_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`xamp.contract.Backend.join_gradients`: it concerns the NpuFused optimizers."""
        torch_npu_features.join_gradients(optimizer)

    def optimizer_refusal(self, optimizer: torch.optim.Optimizer, *, casts: bool) -> str:
        """See :meth:`xamp.contract.Backend.optimizer_refusal`: it concerns the NpuFused optimizers."""
        return torch_npu_features.optimizer_refusal(optimizer, casts=casts)

    def make_overflow_(self, grad: torch.Tensor) -> None:
        """See :meth:`xamp.contract.Backend.make_overflow_`: a sum that is too large for fp16."""
        large = torch.full_like(grad, 40000.0, dtype=torch.float16)
        grad.copy_(large + large)

    # ---------------------------------------------------------------- what changes its arithmetic

    def precision_settings(self, device: torch.device) -> Sequence[Setting]:
        """See :meth:`xamp.contract.Backend.precision_settings`: fp32 in fewer digits, saturation, the environment."""
        return [*self._fp32_settings(device), *self._overflow_settings(), *environment_settings(_VARIABLES)]

    def _fp32_settings(self, device: torch.device) -> Iterator[Setting]:
        chip = self.chip(device)
        mode = _option("ACL_PRECISION_MODE") or ("allow_fp32_to_fp16" if chip and chip.mixed_fp32 else "")
        if mode == "allow_fp32_to_fp16":
            yield Setting(
                "ACL_PRECISION_MODE",
                mode,
                "float32 convolutions and matrix products are computed in float16, at every level, O0 too",
                'torch.npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})',
                narrows_fp32=True,
                exact=self._keep_dtype,
            )
            return
        yield from self._hf32_settings()
        kind = getattr(getattr(self.module, "matmul", None), "cube_math_type", None)
        if kind is not None and kind.name in _NARROW_PRODUCTS:
            yield Setting(
                "torch.npu.matmul.cube_math_type",
                kind.name,
                "float32 matrix products are computed in fewer digits, at every level, O0 too",
                "torch.npu.matmul.cube_math_type = type(torch.npu.matmul.cube_math_type).KEEP_DTYPE",
                narrows_fp32=True,
                exact=functools.partial(self._switch, "matmul", "cube_math_type", type(kind).KEEP_DTYPE),
            )

    def _hf32_settings(self) -> Iterator[Setting]:
        for name, what in (("conv", "convolutions"), ("matmul", "matrix products")):
            if getattr(getattr(self.module, name, None), "allow_hf32", False) is True:
                yield Setting(
                    f"torch.npu.{name}.allow_hf32",
                    "True",
                    f"float32 {what} are computed in HF32 (11 bits of mantissa instead of 23), at every level, O0 too",
                    f"torch.npu.{name}.allow_hf32 = False",
                    expected=name == "conv",  # torch_npu's default
                    narrows_fp32=True,
                    exact=functools.partial(self._switch, name, "allow_hf32", False),
                )

    def _keep_dtype(self) -> Callable[[], object]:
        self.module.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})
        # Set the option by name, even if it was the chip's default before: torch_npu cannot unset an option.
        return lambda: self.module.set_option({"ACL_PRECISION_MODE": "allow_fp32_to_fp16"})

    def _switch(self, holder: str, name: str, value: object) -> Callable[[], object]:
        """Set ``torch.npu.<holder>.<name>``; return a function that restores it."""
        found = getattr(self.module, holder)
        before = getattr(found, name)
        setattr(found, name, value)
        return functools.partial(setattr, found, name, before)

    def _overflow_settings(self) -> Iterator[Setting]:
        chip = self.chip()
        if self._saturates and chip is not None and not chip.saturates:
            yield Setting(
                "INF_NAN_MODE_FORCE_DISABLE (environment)",
                os.environ.get("INF_NAN_MODE_FORCE_DISABLE", ""),
                "float16 overflows saturate and raise a flag, where this chip would show inf and nan",
                "unset INF_NAN_MODE_FORCE_DISABLE and INF_NAN_MODE_ENABLE",
            )


def _in_16_bits(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.dtype in (torch.float16, torch.bfloat16) else matrix.to(torch.bfloat16)


def _emulated() -> str:
    return " (emulated)" if os.environ.get(chips.EMULATED) else ""


def _option(name: str) -> str:
    """The value of an option of torch_npu; empty if it is not set."""
    value = sys.modules[_PACKAGE]._C._npu_getOption(name)
    return bytes(value or b"").decode()


_NARROW_PRODUCTS = ("ALLOW_FP32_DOWN_PRECISION", "USE_FP16", "USE_HF32")
_VARIABLES = {
    "HCCL_DETERMINISTIC": ("false", "collectives add up in a fixed order: results repeat, some are slower", True),
}


def _has_kernel(operator: str) -> bool:
    """Whether torch_npu has a kernel of its own for an operator of torch."""
    return torch_private.has_kernel_for_key(f"aten::{operator}", "PrivateUse1")
