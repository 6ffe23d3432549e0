"""torchvision: a detector, with its lists of images and of targets, and a classifier.

Covers: xamp.casting.forward, xamp.values.containers, xamp.casting.dtype_errors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from library_loop import LEVELS, Case, check, library, with_xamp
from torch import nn
from torch.nn.functional import cross_entropy

models = library("torchvision.models")
detection = library("torchvision.models.detection")
rpn = library("torchvision.models.detection.anchor_utils")


class Backbone(nn.Sequential):
    """Three convolutions, in place of a network of millions of parameters."""

    out_channels = 8

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1), nn.ReLU())


def detector() -> nn.Module:
    made: nn.Module = detection.FasterRCNN(
        Backbone(),
        rpn_anchor_generator=rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0),)),
        box_roi_pool=library("torchvision.ops").MultiScaleRoIAlign(["0"], 3, 2),
        box_head=detection.faster_rcnn.TwoMLPHead(8 * 9, 16),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(16, 3),
        min_size=64,
        max_size=64,
        rpn_pre_nms_top_n_train=40,
        rpn_post_nms_top_n_train=20,
    )
    return made


OPTIONS = {"init_scale": 64.0, "cast_model_inputs": ["targets"]}  # boxes in bf16 would be off by pixels
CAST = ("O2", "O3", "O5")
"""The levels that cast parameters: torchvision's ``nms`` takes no bf16, and on a CPU no fp16. Autocast casts for it."""


def scenes() -> dict[str, Any]:
    boxes = torch.tensor([[8.0, 8.0, 32.0, 40.0], [20.0, 24.0, 56.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(2)]
    return {"images": [torch.rand(3, 64, 64) for _ in range(2)], "targets": targets}


def total(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = sum(value.float() for value in output.values())
    return found


def backbone(model: Any) -> nn.Module:
    found: nn.Module = model.backbone
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_a_detector_trains_as_by_hand_and_resumes(level: str) -> None:
    """At levels that cast parameters its backbone does, so that boxes keep all their digits."""
    case = Case("torchvision", "Faster R-CNN", detector, scenes, total, options=OPTIONS)
    if level in CAST:
        case = dataclasses.replace(case, options={"init_scale": 64.0}, part=backbone)
    check(case, level)


@pytest.mark.parametrize("level", CAST)
def test_an_operator_that_takes_no_16_bits_is_an_error_with_its_cure(level: str) -> None:
    case = Case("torchvision", "Faster R-CNN", detector, scenes, total, options=OPTIONS)
    with pytest.raises(NotImplementedError, match=r"(?s)nms.* not implemented for .*keep_fp32=.*O1 or O4"):
        with_xamp(case, level)
    with_xamp(case, level, keep_fp32=["rpn", "roi_heads"])


CASES = [
    Case(
        "torchvision",
        "ShuffleNet",
        lambda: models.shufflenet_v2_x0_5(weights=None, num_classes=4),
        # Of 4 images of 32 x 32 the last norms see 4 numbers a channel, and at O3 the weights grow 90 times in 4 steps.
        lambda: {"x": torch.randn(8, 3, 64, 64)},
        lambda output, batch: cross_entropy(output.float(), torch.arange(8) % 4),
        options={"init_scale": 64.0},
    ),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_trains_as_by_hand_and_resumes(case: Case, level: str) -> None:
    check(case, level)
