"""What the clauses of tier ``fp8`` must notice."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Mutant, patched, registered

from xamp.backends.cpu import CpuBackend
from xamp.casting import fp8_regions
from xamp.torch_compat import scaled
from xamp.torch_compat.scaled import Scaled


class InvertsAScale(CpuBackend):
    """Multiplies with a scale by which it should divide."""

    def scaled_mm(self, left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        if left.scaling != "block":
            left = left._replace(scale=1 / left.scale)
        return super().scaled_mm(left, right, dtype, fast)


class WrongFormat(CpuBackend):
    """Casts all to the format with fewer digits."""

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        return scaled.quantise(matrix, torch.float8_e5m2, scaling, axis)


class CoarseWeights(CpuBackend):
    """Casts right operands, the weights, to e5m2."""

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        return super().to_fp8(matrix, "e5m2" if axis == 0 else kind, scaling, axis)


class WrongAxis(CpuBackend):
    """Takes the largest value of the other dimension for each row, as far as there are enough."""

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        if scaling != "row":
            return super().to_fp8(matrix, kind, scaling, axis)
        other = super().to_fp8(matrix, kind, scaling, 1 - axis).scale.flatten()
        count = matrix.shape[1 - axis]
        scale = other.repeat(-(-count // len(other)))[:count].unsqueeze(axis)
        values = (matrix.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Scaled(values, scale, scaling, axis)


class StaleWeight(CpuBackend):
    """Casts each matrix of a shape once, and takes that again."""

    known: dict[Any, Scaled] = {}

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        key = (matrix.shape, kind, scaling, axis)
        if axis == 1 or key not in self.known:
            self.known[key] = super().to_fp8(matrix, kind, scaling, axis)
        return self.known[key]


class NoSmallest(CpuBackend):
    """Lets the scale of zeros be infinite."""

    def to_fp8(self, matrix: torch.Tensor, kind: str, scaling: str, axis: int) -> Scaled:
        made = super().to_fp8(matrix, kind, scaling, axis)
        if scaling == "block" or bool(matrix.any()):
            return made
        return made._replace(scale=made.scale / 0.0, values=(made.values.float() * torch.inf).to(made.values.dtype))


class SmallGradients(CpuBackend):
    """Loses the gradients."""

    def scaled_mm(self, left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        made = super().scaled_mm(left, right, dtype, fast)
        return made if fast else made * 0.25


def _mutant(name: str, clause: str, kind: type) -> Mutant:
    return Mutant(name, f"fp8.{clause}", registered(f"{__name__}:{kind.__name__}"), "mutant")


MUTANTS = [
    Mutant("nothing runs in fp8", "fp8.products_run_in_fp8", patched(fp8_regions, "_fits", lambda *_: False)),
    _mutant("a scale is inverted", "products_near_fp64", InvertsAScale),
    _mutant("the wrong format", "products_near_fp64", WrongFormat),
    _mutant("e5m2 for weights", "products_near_fp64", CoarseWeights),
    _mutant("the largest value of the wrong axis", "products_near_fp64", WrongAxis),
    _mutant("a stale weight", "weights_are_cast_anew", StaleWeight),
    _mutant("the scale of zeros is infinite", "no_largest_value", NoSmallest),
    _mutant("gradients are too small", "learns_as_in_bf16", SmallGradients),
]
