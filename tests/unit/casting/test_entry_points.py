"""Where a tensor of another dtype meets cast parameters, the error says which cure helps; and the cure does.

Covers: xamp.casting.entry_points, xamp.casting.dtype_errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp.casting.entry_points import entry_points
from xamp.policy import levels_where

CAST = levels_where(lambda row: row.casts_parameters)


class Data:
    """As PyG's: an object with tensors in it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.decoder = nn.Linear(3, 4)
        self.own = False

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(x)
        return found

    @torch.no_grad()
    def generate(self, x: torch.Tensor, *, strict: bool = False) -> torch.Tensor:
        return self.decoder(self.encode(x)) if not strict else self.encode(x[:, :1])

    def score(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self(x).sum()
        return found

    def describe(self) -> str:
        return "a coder"

    def forward(self, x: Any) -> torch.Tensor:
        x = x.x if isinstance(x, Data) else x
        if self.own:
            x = x + torch.ones(4, device=x.device)
        found: torch.Tensor = self.decoder(self.encode(x))
        return found


def coder(lane: Lane, level: str, **arguments: Any) -> Coder:
    model = Coder().to(lane.device)
    xamp.initialize(model, level=level, verbosity=0, **arguments)
    return model


def batch(lane: Lane) -> torch.Tensor:
    return torch.ones(2, 4, device=lane.device)


def message(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_entry_points_are_methods_that_use_parts_directly() -> None:
    assert entry_points(Coder(), ("forward",)) == ("encode", "generate")
    assert entry_points(Coder(), ("forward", "encode", "generate")) == ()
    assert entry_points(nn.Sequential(nn.Linear(2, 2)), ("forward",)) == ()
    assert entry_points(nn.TransformerEncoderLayer(4, 2), ("forward",)) == ()


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("name", ["encode", "generate"])
def test_a_method_besides_forward_is_named(name: str, level: str, lane: Lane) -> None:
    said = message(getattr(coder(lane, level), name), batch(lane))
    assert f"Coder.{name}() does not run under the policy" in said
    assert f"methods=('forward', '{name}')" in said
    assert said.count("xamp:") == 1
    cured = coder(lane, level, methods=("forward", name))
    assert getattr(cured, name)(batch(lane)).dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
def test_other_errors_and_other_methods_stay_as_they_are(level: str, lane: Lane) -> None:
    model = coder(lane, level)
    assert "xamp" not in message(model.generate, batch(lane).to(model.encoder.weight.dtype), strict=True)
    assert "xamp" not in message(model, batch(lane)[:, :1])
    assert model.score(batch(lane)).dtype is torch.float32
    assert model.describe() == "a coder"
    assert model.generate.__name__ == "generate"


@pytest.mark.parametrize("level", CAST)
def test_an_error_inside_forward_is_not_laid_on_the_method_it_calls(level: str, lane: Lane) -> None:
    model = coder(lane, level)
    model.own = True
    said = message(model, batch(lane))
    assert "a tensor of another one, which the model makes itself" in said
    assert "keep_fp32=" in said
    assert "methods=" not in said


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_module_that_came_later_is_named(hidden: bool, level: str, lane: Lane) -> None:
    model = Coder().to(lane.device)
    if hidden:
        model.forward = model.forward  # type: ignore[method-assign]
    xamp.initialize(model, level=level, verbosity=0)
    model.decoder = nn.Linear(3, 4).to(lane.device)
    said = message(model, batch(lane))
    assert "decoder.weight is torch.float32, and came after xamp.initialize" in said
    xamp.session(model).close()
    xamp.initialize(model, level=level, verbosity=0)
    assert model(batch(lane)).dtype is torch.float32


class Rooted(nn.Module):
    """Holds a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(2, 4))
        self.last = nn.Linear(4, 2)

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = self.last(self.points)
        return found


@pytest.mark.parametrize("level", CAST)
def test_a_parameter_of_the_model_itself_that_came_later_is_named(level: str, lane: Lane) -> None:
    model = Rooted().to(lane.device)
    xamp.initialize(model, level=level, verbosity=0)
    model.points = nn.Parameter(torch.ones(3, 4, device=lane.device))
    assert "points is torch.float32, and came after xamp.initialize" in message(model)
    xamp.session(model).close()
    xamp.initialize(model, level=level, verbosity=0)
    assert model().dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["", "decoder"])
def test_a_cast_after_initialize_is_named(part: str, dtype: torch.dtype, level: str, lane: Lane) -> None:
    if dtype is torch.float64 and lane.device.type in ("mps", "npu"):
        pytest.skip(f"{lane} has no float64")
    model = coder(lane, level)
    model.get_submodule(part).to(dtype)
    name = f"{part or 'encoder'}.weight"
    said = message(model, batch(lane))
    assert said.count("xamp:") == 1
    assert f"{name} is {dtype}, cast after xamp.initialize. Call xamp.session(model).close()" in said
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    xamp.session(model).close()
    assert model(batch(lane)).dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
def test_a_cast_after_initialize_is_no_cause_of_other_errors(level: str, lane: Lane) -> None:
    model = coder(lane, level).float()
    assert "xamp" not in message(model.encode, batch(lane)[:, :1])
    assert "xamp" not in message(model.encode, batch(lane).long())


@pytest.mark.parametrize("level", CAST)
def test_an_operator_that_the_lower_dtype_lacks_is_told_from_a_mismatch(level: str, lane: Lane) -> None:
    class Lacking(Coder):
        def forward(self, x: Any) -> torch.Tensor:
            raise NotImplementedError(f'"orgqr_cpu" not implemented for {kinds[self.encoder.weight.dtype]!r}')

    kinds = {torch.float16: "Half", torch.bfloat16: "BFloat16"}
    model = Lacking().to(lane.device)
    xamp.initialize(model, level=level, verbosity=0)
    said = message(model, batch(lane))
    assert "an operator does not exist in that dtype" in said
    assert "by keep_fp32=" in said
    assert "does not run under the policy" not in said


@pytest.mark.parametrize("level", CAST)
def test_kept_modules_are_not_taken_for_later_ones(level: str, lane: Lane) -> None:
    model = coder(lane, level, keep_fp32=["decoder"])
    model.own = True
    assert "came after" not in message(model, batch(lane))


@pytest.mark.parametrize("level", CAST)
def test_an_argument_that_is_not_looked_into_is_named(level: str, lane: Lane) -> None:
    model = coder(lane, level)
    said = message(model, Data(batch(lane)))
    assert "or gets in an object that xamp does not look into" in said
    assert f"Cast that tensor to {model.encoder.weight.dtype}" in said
    assert model(Data(batch(lane).to(model.encoder.weight.dtype))).dtype is torch.float32


@pytest.mark.parametrize("level", CAST)
def test_methods_compile_whole(level: str, lane: Lane) -> None:
    model = coder(lane, level)
    compiled = torch.compile(model.encode, backend="eager", fullgraph=True)
    x = batch(lane).to(model.encoder.weight.dtype)
    assert torch.equal(compiled(x), model.encode(x))


class Own(Coder):
    """Overrides what nn.Module has, and names its parts in it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.encoder.parameters():
            param.grad = None

    def train(self, mode: bool = True) -> Own:
        self.encoder.train(mode)
        super().train(mode)
        return self


@pytest.mark.parametrize("level", levels_where(lambda row: row.master_weights))
def test_overrides_of_torchs_methods_are_no_entry_points(level: str, lane: Lane) -> None:
    """``zero_grad`` of a managed model clears masters, whatever the user's own clears."""
    model = Own().to(lane.device)
    assert entry_points(model, ("forward",)) == ("encode", "generate")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    xamp.initialize(model, optimizer, level=level, verbosity=0, loss_scale=1.0)
    norms = []
    for _ in range(3):
        model.zero_grad()
        with xamp.scale_loss(model(batch(lane)).sum(), optimizer) as scaled:
            scaled.backward()
        grads = [p.grad for p in xamp.master_params(optimizer)]
        norms.append(sum(float(g.norm()) for g in grads if g is not None))
        optimizer.step()
    assert norms == [norms[0]] * 3
