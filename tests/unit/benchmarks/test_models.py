"""The benchmark's models are the published ones, and its ways to train do the same steps.

Covers: benchmarks.models, benchmarks.nets, benchmarks.ways, benchmarks.bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))  # benchmarks/ is not installed

from benchmarks import bandwidth, models, ways  # noqa: E402
from benchmarks.nets import NETS  # noqa: E402
from benchmarks.ways import WAYS, Task  # noqa: E402

CPU = torch.device("cpu")
PUBLISHED = {"ResNet-50": 25_557_032, "GPT, 124M": 124_439_808, "BERT-base": 109_514_298}
"""Parameters of torchvision's resnet50, and of transformers' GPT2LMHeadModel and BertForMaskedLM."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_models_have_the_published_parameters(name: str) -> None:
    with torch.device("meta"):
        model = NETS[name].make()
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


def test_flops_are_those_by_hand() -> None:
    """A forward multiplies each row by each weight; a backward twice, but for the inputs, which need no gradient."""
    weights = [64 * 64] * 4 + [64 * 10]
    by_hand = 2 * 16 * (3 * sum(weights) - weights[0])
    assert models.flops_of(NETS["MLP"], (16, 64)) == by_hand


@pytest.mark.parametrize("dtype", ways.DTYPES)
@pytest.mark.parametrize("name", ["MLP", "small convolutions", "small GPT"])
def test_all_ways_do_the_same_steps(name: str, dtype: str) -> None:
    """The same losses as by hand, step by step: ways that do other work could not be compared by time."""
    net = NETS[name]
    size = net.sizes(CPU)[-1]
    found = {}
    for other, make in {"xamp": ways.ours, **makers(dtype)}.items():
        step = make(Task.of(net, size, CPU, dtype))
        found[other] = [float(step().detach()) for _ in range(4)]
    assert "torch.amp" in found
    for other, losses in found.items():
        assert losses == found["torch.amp"], other


def makers(dtype: str) -> dict[str, Callable[[Task], ways.Step]]:
    return {other: way.theirs for other, way in WAYS.items() if not way.why_not(CPU, dtype)}


def test_a_library_that_is_not_there_is_named() -> None:
    way = ways.Way(ways.by_hand, module="no_such_library")
    assert way.why_not(CPU, "fp16") == "is not installed"


def test_a_trial_gives_pairs_and_rates() -> None:
    figures = list(models.Trial("MLP", NETS["MLP"], CPU, "bf16", 3).figures(None))
    found = {figure.case: figure for figure in figures}
    pair = found["MLP (16 x 64), bf16: over torch.amp"]
    assert pair.spread is not None
    assert pair.spread[0] <= pair.value <= pair.spread[1]
    assert found["MLP (16 x 64), bf16: peak memory"].value * 2**20 > 4 * 4 * 17_000  # weights, gradients, two moments
    assert 0 < found["MLP (16 x 64), bf16: model FLOP utilisation"].value < 1


def test_inputs_are_as_large_as_the_device_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    net = NETS["ResNet-50"]
    smallest = models.flops_of(net, net.cpu[-1])
    for rate, size in ((1e15, net.cpu[0]), (1.01 * smallest, net.cpu[-1]), (1.0, net.cpu[-1])):
        monkeypatch.setattr(models, "multiplication_rate", lambda *_, rate=rate: rate)
        assert models.size_for(net, CPU, torch.bfloat16) == size


def test_a_slow_model_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "LIMIT_S", 0.0)
    (figure,) = models.Trial("MLP", NETS["MLP"], CPU, "bf16", 3).figures(None)
    assert "left out" in figure.case


def test_the_share_of_the_copy_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes over time over rate, on a clock of our own: 2**16 weights, 28 bytes each, in 1 ms, at 1 GB/s."""
    monkeypatch.setattr(bandwidth, "copy_rate", lambda _: 1e9)
    monkeypatch.setattr(bandwidth, "COUNT", 1)
    monkeypatch.setattr(bandwidth, "WIDTH", {"cpu": 256})
    monkeypatch.setattr(bandwidth, "phase_times", lambda *_: {"backward": 77.0, "unscale+update": 400.0, "step": 600.0})
    found = {figure.case: figure.value for figure in bandwidth.run(CPU, 3)}
    assert found["Adam fused, O1"] == pytest.approx(2**16 * 28 / 1e-3 / 1e9)
    assert found["Adam fused, O2"] == pytest.approx(2**16 * 28 / 1e-3 / 1e9)
    assert found["SGD fused, O2"] == pytest.approx(2**16 * 12 / 1e-3 / 1e9)
    assert found["SGD fused, torch.amp"] == pytest.approx(2**16 * 12 / 1e-3 / 1e9)
