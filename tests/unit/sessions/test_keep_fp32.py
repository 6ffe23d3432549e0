"""``keep_fp32`` and ``keep_batchnorm_fp32``: what stays fp32, and what goes in and out of it.

Covers: xamp.sessions.lowering, xamp.sessions.set_up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from lanes import Lane, lower
from managed_models import INSIDE, LEVELS, Net, Recorder, batch, net, start
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from xamp.errors import PolicyError

FP32 = torch.float32
CAST = ("O2", "O3", "O5")
LOWER = ("O1", "O2", "O3", "O4", "O5")


class Special(nn.Linear):
    """A class to keep in fp32, with a buffer."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("offset", torch.full((8,), 1.0 + 2.0**-12))

    offset: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.went_in = x.dtype
        self.autocast = torch.is_autocast_enabled(x.device.type)
        self.ran_in = (made := super().forward(x)).dtype
        return made + self.offset


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Recorder(nn.Linear(4, 8))
        self.blocks = nn.ModuleDict({"kept": Special()})
        self.last = Recorder(nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.blocks["kept"](self.first(x)))
        return made


WAYS: list[Iterable[type | str]] = [(Special,), ["blocks.kept"], ("*.kept",), ["blocks.*"], ["blocks"], "blocks.kept"]


@pytest.mark.parametrize("ways", WAYS, ids=["class", "name", "glob", "glob of all in", "parent", "bare string"])
@pytest.mark.parametrize("level", LOWER)
def test_a_kept_module_runs_in_fp32_between_lower_ones(level: str, ways: Iterable[type | str], lane: Lane) -> None:
    model = start(Model().to(lane.device), level, lane, keep_fp32=ways)
    assert model(batch(lane)).dtype == FP32
    kept = model.blocks["kept"]
    assert (kept.went_in, kept.autocast, kept.ran_in) == (FP32, False, FP32)
    assert (kept.weight.dtype, kept.offset.dtype) == (FP32, FP32)
    assert float(kept.offset[0]) == 1.0 + 2.0**-12
    assert model.first.out_of == [INSIDE[level]]
    assert model.last.out_of == [INSIDE[level]]
    if level in CAST:
        assert model.last.into == [INSIDE[level]], "back to the lower dtype on the way out"
    assert model.last.autocast == [level in ("O1", "O4")]
    twin = copy.deepcopy(model)
    twin.blocks["kept"].ran_in = None
    assert twin(batch(lane)).dtype == FP32
    assert twin.blocks["kept"].ran_in == FP32


@pytest.mark.parametrize("level", LEVELS)
def test_a_name_that_matches_nothing_is_refused(level: str, lane: Lane) -> None:
    model = Model().to(lane.device)
    with pytest.raises(PolicyError, match=r"keep_fp32=.*: 'blocs', 'x\.\*' matches no module.*such as 'first'"):
        start(model, level, lane, keep_fp32=["blocs", "first", "x.*"])
    assert type(model) is Model
    assert model.first.module.weight.dtype == FP32


@pytest.mark.parametrize("level", LOWER)
def test_a_model_kept_as_a_whole_runs_in_fp32(level: str, lane: Lane) -> None:
    model = start(Model().to(lane.device), level, lane, keep_fp32=[Model])
    assert model(batch(lane)).dtype == FP32
    assert model.first.out_of == model.last.out_of == [FP32]
    assert {p.dtype for p in model.parameters()} == {FP32}
    other = start(Model().to(lane.device), level, lane, keep_fp32=[Model], cast_model_outputs=lower(lane))
    assert other(batch(lane)).dtype == lower(lane)
    generates = start(net(lane), level, lane, keep_fp32=[Net], methods=["generate"])
    assert generates.generate(batch(lane).half()).dtype == torch.float64, "of an fp32 input, or it would have failed"


@pytest.mark.parametrize(
    ("level", "option", "dtype"),
    [
        ("O2", None, FP32),
        ("O2", "True", FP32),
        ("O2", False, torch.float16),
        ("O3", None, torch.float16),
        ("O3", True, FP32),
        ("O5", None, FP32),
        ("O5", False, torch.bfloat16),
    ],
)
def test_batch_norm_is_kept_as_the_level_or_the_option_says(
    level: str, option: bool | str | None, dtype: torch.dtype, lane: Lane
) -> None:
    model = start(net(lane), level, lane, keep_batchnorm_fp32=option)
    assert model(batch(lane))[0].dtype == FP32
    assert model.norm.weight.dtype == dtype
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.dtype == dtype
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert model.inner.weight.dtype == INSIDE[level]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_every_batch_norm_takes_lower_inputs_and_gives_the_same_dtype(
    level: str, kind: type[_BatchNorm], lane: Lane
) -> None:
    shape = {nn.BatchNorm1d: (4, 2), nn.BatchNorm2d: (4, 2, 3, 3), nn.BatchNorm3d: (4, 2, 3, 3, 3)}[kind]
    recorder = Recorder(kind(2))
    model = start(nn.Sequential(recorder).to(lane.device), level, lane)
    out = model(torch.randn(shape, device=lane.device))
    assert out.dtype == FP32
    assert (recorder.into, recorder.out_of) == ([INSIDE[level]], [INSIDE[level]])
    out.square().mean().backward()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_batch_norm_can_be_kept_at_the_autocast_levels(level: str, lane: Lane) -> None:
    model = start(net(lane), level, lane, keep_fp32=[_BatchNorm])
    model.norm.register_forward_hook(lambda _, args, out: seen.append(out.dtype))
    seen: list[torch.dtype] = []
    model(batch(lane))
    assert seen == [FP32]
