"""``cast_model_inputs``: which arguments of forward are cast, and which keep every digit.

Covers: xamp.sessions.lowering, xamp.values.arguments.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp.errors import PolicyError
from xamp.policy import levels_where

CAST = levels_where(lambda row: row.casts_parameters)
FINE = 4097.0  # neither fp16 nor bf16 has it


@dataclasses.dataclass
class Target:
    boxes: torch.Tensor


class Boxes:
    """An object that xamp does not look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {}

    def forward(self, image: torch.Tensor, boxes: Any = None, *more: Any, scale: Any = None) -> torch.Tensor:
        self.seen = {"image": image, "boxes": boxes, "more": more, "scale": scale}
        found: torch.Tensor = self.body(image.to(self.body.weight.dtype))
        return found


def detector(lane: Lane, level: str, **arguments: Any) -> Detector:
    model = Detector().to(lane.device)
    xamp.initialize(model, level=level, verbosity=0, **arguments)
    return model


def fine(lane: Lane) -> torch.Tensor:
    return torch.full((3, 4), FINE, device=lane.device)


@pytest.mark.parametrize("level", CAST)
def test_true_casts_all_false_none(level: str, lane: Lane) -> None:
    value = fine(lane)
    for given in (True, "True"):
        model = detector(lane, level, cast_model_inputs=given)
        model(value, [value], value, scale={"a": value})
        seen = model.seen
        all_seen = (seen["image"], seen["boxes"][0], seen["more"][0], seen["scale"]["a"])
        assert {each.dtype for each in all_seen} == {model.body.weight.dtype}
        assert all(each.float().ne(FINE).all() for each in all_seen)
    model = detector(lane, level, cast_model_inputs=False)
    model(value, [value], value, scale={"a": value})
    assert model.seen["image"] is value
    assert model.seen["boxes"][0] is value
    assert model.seen["scale"]["a"] is value


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_names_are_exempt(level: str, by_keyword: bool, lane: Lane) -> None:
    value = fine(lane)
    model = detector(lane, level, cast_model_inputs=("boxes", "scale"))
    if by_keyword:
        model(value, boxes=[{"b": value}], scale=value)
    else:
        model(value, [{"b": value}], value, scale=value)
        assert model.seen["more"][0].dtype is model.body.weight.dtype
    assert model.seen["image"].dtype is model.body.weight.dtype
    assert model.seen["boxes"][0]["b"] is value
    assert model.seen["scale"] is value


@pytest.mark.parametrize("level", CAST)
def test_a_starred_argument_is_exempt(level: str, lane: Lane) -> None:
    value = fine(lane)
    model = detector(lane, level, cast_model_inputs="more")
    model(value, value, value, value)
    assert model.seen["boxes"].dtype is model.body.weight.dtype
    assert model.seen["more"][0] is value
    assert model.seen["more"][1] is value


@pytest.mark.parametrize("level", CAST)
def test_types_are_exempt_wherever_they_are_nested(level: str, lane: Lane) -> None:
    value = fine(lane)
    model = detector(lane, level, cast_model_inputs=[Target])
    target = Target(value)
    model(value, [{"target": target}, value], scale=(target, value))
    assert model.seen["boxes"][0]["target"] is target
    assert model.seen["boxes"][1].dtype is model.body.weight.dtype
    assert model.seen["scale"][0] is target
    assert model.seen["scale"][1].dtype is model.body.weight.dtype


@pytest.mark.parametrize("level", CAST)
def test_it_holds_for_copies_and_instance_methods_and_compiled_models(level: str, lane: Lane) -> None:
    value = fine(lane)
    plain = Detector().to(lane.device)
    plain.forward = plain.forward  # type: ignore[method-assign]
    xamp.initialize(plain, level=level, cast_model_inputs=("boxes",), verbosity=0)
    plain(value, value)
    assert plain.seen["image"].dtype is plain.body.weight.dtype
    assert plain.seen["boxes"] is value
    model = copy.deepcopy(detector(lane, level, cast_model_inputs=("boxes",)))
    model(value, value)
    assert model.seen["boxes"] is value
    model = detector(lane, level, cast_model_inputs=("boxes",))
    torch.compile(model, backend="eager")(value, value)
    assert model.seen["image"].dtype is model.body.weight.dtype
    assert model.seen["boxes"].dtype is torch.float32


def test_objects_are_not_looked_into(lane: Lane) -> None:
    (level, *_) = CAST
    value = Boxes(fine(lane))
    model = detector(lane, level)
    model(value.tensor, value)
    assert model.seen["boxes"] is value
    assert model.seen["boxes"].tensor.dtype is torch.float32


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("targets",), r"no method under the policy has an argument 'targets'.*image, boxes, more, scale"),
        (3, "must be a list or tuple"),
        (("a.b",), "neither the name of an argument of forward nor a type"),
        ([3], "neither the name of an argument of forward nor a type"),
    ],
)
def test_what_cannot_be_right_is_refused(given: Any, message: str, lane: Lane) -> None:
    model = Detector().to(lane.device)
    with pytest.raises(PolicyError, match=message):
        xamp.initialize(model, level=CAST[0], cast_model_inputs=given, verbosity=0)
    assert type(model) is Detector
    assert model.body.weight.dtype is torch.float32


@pytest.mark.parametrize("level", levels_where(lambda row: not row.casts_parameters))
def test_the_same_arguments_do_at_every_level(level: str, lane: Lane) -> None:
    """One command line for all levels: where nothing is cast, nothing is exempt."""
    value = fine(lane)
    model = detector(lane, level, cast_model_inputs=("boxes",))
    model(value, value)
    assert model.seen["boxes"] is value


class Open(Detector):
    def forward(self, image: torch.Tensor, *more: Any, **extras: Any) -> Any:
        self.seen = {"image": image, "more": more, "extras": extras}
        return self.body(image)


@pytest.mark.parametrize("level", CAST)
def test_the_name_of_the_open_keywords_exempts_them_all(level: str, lane: Lane) -> None:
    value = fine(lane)
    model = Open().to(lane.device)
    xamp.initialize(model, level=level, cast_model_inputs=("extras",), verbosity=0)
    model(value, value, value, boxes=value, other=[value])
    assert model.seen["extras"]["boxes"] is value
    assert model.seen["extras"]["other"][0] is value
    assert {each.dtype for each in (model.seen["image"], *model.seen["more"])} == {model.body.weight.dtype}
    model(image=value, boxes=value)
    assert model.seen["image"].dtype is model.body.weight.dtype
    assert model.seen["extras"]["boxes"] is value
