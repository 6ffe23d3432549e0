"""Lets torchvision import beside a torch for CPUs.

The wheels of the package index have operators that were built for CUDA. Beside another torch these do not load, and
then torchvision ends in an error when it is imported, as does all that imports it. So the operators that it misses are
defined here, and the one that detectors call is computed in Python, for the dtypes that torchvision's own has on a CPU:
fp32 and fp64, to which autocast casts. Where torchvision's own load, nothing is done.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib

import torch

__all__ = ["prepare"]

_defined: list[torch.library.Library] = []  # a Library takes back what it defined when it goes


def prepare() -> None:
    """Define what is missing. Called before anything imports torchvision."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _defined:
        return
    try:
        torch.ops.load_library(str(pathlib.Path(spec.origin).parent / "_C.so"))
    except OSError:
        made = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            made.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        made.impl("nms", nms, "CompositeExplicitAutograd")
        made.impl("nms", _nms_under_autocast, "AutocastCPU")
        _defined.append(made)
        boxes = importlib.import_module("torchvision.ops.boxes")
        boxes._assert_has_ops = lambda: None  # type: ignore[attr-defined]


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Keep boxes from the highest score down, each that overlaps no kept one by more than ``iou_threshold``."""
    if dets.dtype not in (torch.float32, torch.float64):
        name = {torch.float16: "Half", torch.bfloat16: "BFloat16"}.get(dets.dtype, str(dets.dtype))
        raise NotImplementedError(f"\"nms_kernel\" not implemented for '{name}'")
    x0, y0, x1, y1 = dets.detach().float().unbind(1)
    area = (x1 - x0) * (y1 - y0)
    left = scores.detach().argsort(descending=True, stable=True)
    kept = []
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        width = torch.minimum(x1[best], x1[left]) - torch.maximum(x0[best], x0[left])
        height = torch.minimum(y1[best], y1[left]) - torch.maximum(y0[best], y0[left])
        both = width.clamp(min=0) * height.clamp(min=0)
        left = left[both / (area[best] + area[left] - both) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.long)


def _nms_under_autocast(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return nms(dets.float(), scores.float(), iou_threshold)
