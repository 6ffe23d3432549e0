"""Which linear layers run in fp8, what ``initialize`` says of them, and what it refuses.

Covers: xamp.sessions.fp8_layers, xamp.casting.fp8_regions.
"""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.casting import fp8_linear, fp8_regions
from xamp.contract import Capabilities
from xamp.errors import PolicyError, StateError, UnsupportedPolicy
from xamp.registry import fp8_widths
from xamp.values import recipes

LEVELS = ["O0", "O1", "O2", "O3", "O5", "auto"]


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.up, self.down, self.odd = nn.Linear(64, 128), Conv1D(128, 64), nn.Linear(64, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        made: torch.Tensor = x + self.down(self.up(x)) + self.odd(x).sum(-1, keepdim=True)
        return made


class Model(nn.Module):
    """An embedding, blocks, a layer that shares the embedding's weight, and a last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(96, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tied, self.last = nn.Linear(64, 96, bias=False), nn.Linear(96, 32)
        self.tied.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.embedding(x)
        for block in self.blocks:
            made = block(made)
        return self.last(self.tied(made))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _small_layers_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_widths, "GAINS_FROM", dict.fromkeys(recipes.RECIPES, 60))


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes (outputs, inputs) of the weights with which a product ran in fp8."""
    found: list[tuple[int, ...]] = []

    def noting(input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        found.append(tuple(weight.shape))
        return original(input, weight, *rest)

    original = fp8_linear.linear
    monkeypatch.setattr(fp8_regions, "linear", noting)
    return found


def start(model: Any, *args: Any, **options: Any) -> Any:
    return xamp.initialize(model, *args, **{"level": "fp8", "verbosity": 0, **options})


def tokens() -> torch.Tensor:
    return torch.arange(64).reshape(4, 16)


def why(model: nn.Module) -> dict[str, str]:
    return {layer.name: "in" if layer.in_fp8 else layer.why for layer in xamp.session(model).fp8}


ODD = "its dimensions are no multiples of 16"
BLOCK = {"attention": "in", "up": "in", "down": "in", "odd": ODD}
IN_BLOCKS = [(192, 64), (64, 64), (128, 64), (64, 128)]


def whole(**others: str) -> dict[str, str]:
    rows = {f"blocks.{index}.{name}": said for index in range(2) for name, said in BLOCK.items()}
    return {**rows, "tied": "its weight is an embedding's", "last": "it is the last one", **others}


def test_small_layers_stay_out(monkeypatch: pytest.MonkeyPatch, weights: list[Any]) -> None:
    monkeypatch.setattr(fp8_widths, "GAINS_FROM", dict.fromkeys(recipes.RECIPES, 96))
    model = start(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 80), nn.Linear(80, 128), nn.Linear(128, 128)))
    assert why(model) == {"0": "in", "1": "too small to gain: below 96 x 96", "2": "in", "3": "it is the last one"}
    model(torch.randn(4, 96))
    assert weights == [(96, 96), (128, 80)]


TAKEN = whole(tied="in", last="in")
KEPT = "keep_bf16 names it"
CHOICES: dict[str, tuple[dict[str, Any], dict[str, str], list[tuple[int, int]]]] = {
    "by default what gains": ({}, whole(), IN_BLOCKS * 2),
    "all that can be multiplied": ({"keep_bf16": ()}, TAKEN, [*IN_BLOCKS * 2, (96, 64), (32, 96)]),
    "but a class": (
        {"keep_bf16": [nn.MultiheadAttention]},
        {**TAKEN, **{f"blocks.{index}.attention": KEPT for index in range(2)}},
        [*[(128, 64), (64, 128)] * 2, (96, 64), (32, 96)],
    ),
    "but what an attention calls by its weight": (
        {"keep_bf16": ["*.0.attention.out_proj"]},
        {**TAKEN, "blocks.0.attention": "keep_bf16 names its out_proj"},
        [*IN_BLOCKS[2:], *IN_BLOCKS, (96, 64), (32, 96)],
    ),
    "but a name": (
        {"keep_bf16": "blocks.0"},
        {**TAKEN, **{f"blocks.0.{name}": KEPT for name in BLOCK}},
        [*IN_BLOCKS, (96, 64), (32, 96)],
    ),
    "but patterns": (
        {"keep_bf16": ["blocks.*.up", "last"]},
        {**TAKEN, **dict.fromkeys(("blocks.0.up", "blocks.1.up", "last"), KEPT)},
        [*[(192, 64), (64, 64), (64, 128)] * 2, (96, 64)],
    ),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_which_layers_are_taken(choice: str, weights: list[Any]) -> None:
    options, said, ran = CHOICES[choice]
    model = start(Model(), **options)
    assert why(model) == said
    model(tokens())
    assert weights == ran


def test_what_stays_in_bf16_runs_as_at_o4() -> None:
    kept = start(Model(), keep_bf16=["blocks", "tied", "last"])(tokens())
    assert torch.equal(kept, start(Model(), level="O4")(tokens()))


def test_the_model_itself_may_stay_in_bf16(weights: list[Any]) -> None:
    model = start(nn.Linear(64, 64))
    assert why(model) == {"": "it is the last one"}
    model(torch.randn(4, 64))
    assert weights == []
    alone = start(nn.Linear(64, 64), keep_bf16=())
    alone(torch.randn(4, 64))
    assert weights == [(64, 64)]


def test_what_stays_in_fp32_is_not_in_fp8(weights: list[Any]) -> None:
    model = start(Model(), keep_fp32=["blocks.0"], keep_bf16=["blocks.0.up", "blocks.1.up"])
    said = why(model)
    assert {said[f"blocks.0.{name}"] for name in BLOCK} == {"keep_fp32 names it"}
    assert said["blocks.1.up"] == "keep_bf16 names it"
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    model(tokens())
    assert seen == [torch.float32]
    assert weights == [(192, 64), (64, 64), (64, 128), (96, 64), (32, 96)]


def test_several_models() -> None:
    first, second = start([nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))])
    found = {"": "in", "models[1].0": "in", "models[1].1": "it is the last one"}
    assert why(first) == why(second) == found


def test_layers_of_another_library_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Float8Linear(nn.Linear):
        pass

    monkeypatch.setattr(Float8Linear, "__module__", "torchao.float8.float8_linear")
    assert why(start(Float8Linear(64, 64), keep_bf16=())) == {"": "torchao runs it"}


def test_what_a_layer_says() -> None:
    model = start(nn.Linear(64, 128), fp8="mxfp8", keep_bf16=())
    (layer,) = xamp.session(model).fp8
    assert layer == ("", (128, 64), True, "a scale for each 32 values, by the OCP's MX format")
    assert xamp.session(start(nn.Linear(64, 64), level="O4")).fp8 == ()


def test_a_pattern_that_matches_nothing_is_refused_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(PolicyError, match=r"initialize\(keep_bf16=...\): 'heads' matches no module.*such as '0'"):
        start(model, keep_bf16=["heads"])
    assert type(model) is nn.Sequential
    with pytest.raises(StateError):
        xamp.session(model)


# --- what is said


def lines(caplog: pytest.LogCaptureFixture, model: Any, **options: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "xamp"):
        start(model, verbosity=1, **options)
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_the_log_says_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    said = lines(caplog, Model())
    assert "level O4, dtype bf16, op policy portable, linear layers in fp8 (tensorwise), loss scale static 1" in said[0]
    assert said[1] == (
        "INFO 6 of 10 linear layers run in fp8, tensorwise: blocks.0.attention, blocks.1.attention, blocks.0.up, "
        f"blocks.1.up, blocks.0.down, blocks.1.down; not in fp8: blocks.0.odd, blocks.1.odd ({ODD}), tied (its weight "
        "is an embedding's), last (it is the last one)"
    )
    assert said[2:] == ["INFO fp8 on cpu is a rehearsal: the same values, and slower than bf16"]


def test_names_that_differ_in_numbers_are_told_as_one(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(12)), nn.Linear(64, 64))
    said = lines(caplog, model, keep_bf16=())[1]
    assert said == "INFO 13 of 13 linear layers run in fp8, tensorwise: *.* (12), 12"


def test_no_layer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    said = lines(caplog, nn.Sequential(nn.Linear(10, 10), nn.ReLU()))[1]
    assert said.startswith(f"WARNING 0 of 1 linear layers run in fp8, tensorwise: none; not in fp8: 0 ({ODD}). So")
    assert said.endswith("keep_bf16=() takes every layer that can be multiplied")
    assert lines(caplog, nn.Linear(10, 10), level="O4") == lines(caplog, nn.Linear(10, 10), level="O4")[:1]


def test_hardware_wants_the_compiler(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = xamp.session(start(nn.Linear(64, 64))).backend
    monkeypatch.setattr(type(backend), "capabilities", lambda *_: Capabilities(fp8=("rowwise", "tensorwise")))
    model = nn.Linear(64, 64)
    said = lines(caplog, model, keep_bf16=())
    assert "linear layers in fp8 (rowwise)" in said[0]
    assert said[2:] == ["INFO fp8 on cpu is faster with torch.compile only: casts that run one by one take longer"]
    assert xamp.session(model).policy.fp8 == "rowwise"


def test_a_compiled_model_is_not_told_to_compile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = xamp.session(start(nn.Linear(64, 64))).backend
    monkeypatch.setattr(type(backend), "capabilities", lambda *_: Capabilities(fp8=("tensorwise",)))
    model = nn.Linear(64, 64)
    model.compile(backend="eager")
    for compiled in (torch.compile(nn.Linear(64, 64), backend="eager"), model):
        assert len(lines(caplog, compiled, keep_bf16=())) == 2


# --- what stays as it is


def test_parameters_and_states_are_those_of_o4() -> None:
    model, alike = Model(), Model()
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alike))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start(model, optimizer, keep_bf16=())
    start(alike, other, level="O4")
    assert isinstance(model, Model)
    assert isinstance(model.last, nn.Linear)
    assert model.tied.weight is model.embedding.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert xamp.session(model).policy.level == "O4"
    assert not xamp.session(model).policy.scales
    states: list[Any] = [xamp.state_dict(each) for each in (model, alike)]
    assert {key for key in states[0] if states[0][key] != states[1].get(key)} <= {"fp8"}
    assert type(pickle.loads(pickle.dumps(model))) is Model


def test_steps_go_on_from_o4_and_back_bit_for_bit() -> None:
    """A checkpoint of one level is one of the other."""
    model = Model()
    start(model, torch.optim.SGD(model.parameters(), lr=0.1), keep_bf16=())
    model(tokens()).square().mean().backward()
    state = model.state_dict()
    plain = start(Model(), level="O4")
    plain.load_state_dict(state)
    assert all(map(torch.equal, plain.state_dict().values(), state.values()))
    back = start(Model(), keep_bf16=())
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back(tokens()), model(tokens()))


def test_closing_ends_it(weights: list[Any]) -> None:
    model = start(Model(), keep_bf16=())
    xamp.session(model).close()
    assert type(model) is Model
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert weights == []


def test_code_outside_of_forward_runs_by_the_policy(weights: list[Any]) -> None:
    model = start(Model(), keep_bf16=())
    with xamp.session(model).autocast():
        model.embedding.weight.mm(torch.randn(64, 8))
        nn.functional.linear(torch.randn(4, 64), model.tied.weight)
    assert weights == [(96, 64)]


# --- what is refused


@pytest.mark.parametrize("level", LEVELS)
def test_other_levels_have_no_fp8(level: str) -> None:
    model = nn.Linear(64, 64)
    with pytest.raises(PolicyError, match=rf"initialize\(level='{level}', fp8='rowwise'\).*which is level 'O4'"):
        start(model, level=level, fp8="rowwise")
    assert type(model) is nn.Linear


def test_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = xamp.session(start(nn.Linear(64, 64))).backend
    monkeypatch.setattr(type(backend), "capabilities", lambda *_: Capabilities())
    model = nn.Linear(64, 64)
    with pytest.raises(UnsupportedPolicy, match=r"fp8='auto'\): backend 'cpu' cannot run it on cpu.*there: none"):
        start(model)
    assert type(model) is nn.Linear


def test_apex_has_no_fp8() -> None:
    with pytest.raises(PolicyError, match=r"fp8='auto', op_policy='apex'\).*know no fp8"):
        start(nn.Linear(64, 64), backend="apex")


def test_a_recipe_that_differs_is_another_policy() -> None:
    model = start(nn.Linear(64, 64), keep_bf16=())
    with pytest.raises(StateError, match="asked for as"):
        start(model, torch.optim.SGD(model.parameters(), lr=0.1), fp8="rowwise", keep_bf16=())


def test_the_names_of_layers_that_are_not_finite() -> None:
    from xamp.debug import find_nonfinite

    model = start(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), keep_bf16=())
    with torch.no_grad():
        model[1].weight[3, 3] = float("inf")
    with find_nonfinite(model) as found:
        model(torch.randn(4, 64))
    assert "1" in str(found)


def test_fsdp_gathers_as_at_o4() -> None:
    assert xamp.fsdp_policy("fp8") == xamp.fsdp_policy("O4")
