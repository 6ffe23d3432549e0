"""The portable op table: its names are torch's, its sample calls run, and on CUDA it is what torch itself does.

Covers: xamp.casting.ops.table, xamp.op_dtypes.observe, xamp.op_dtypes.samples.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from gpu_kernels import GPU_KERNELS

from xamp.casting.ops import fixed_dtype
from xamp.casting.ops.parts import HERE, operator
from xamp.casting.ops.table import OWN, RULES, Rule
from xamp.op_dtypes import observe as observing
from xamp.op_dtypes.observe import attempt, expected, has_entry, is_present, observe
from xamp.op_dtypes.samples import samples

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYERS = {f"{layer}.{kind}" for layer in ("gru", "lstm", "rnn_relu", "rnn_tanh") for kind in ("data", "input")}
WRITTEN_FROM = (2, 13)
"""The torch whose registrations the table holds. An older one has fewer."""

ON_CUDA = [name for name in HERE if has_entry(name, "cuda")]

version = tuple(int(part) for part in torch.__version__.split(".")[:2])


@pytest.fixture(autouse=True)
def _autocast_is_as_before() -> Iterator[None]:
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    yield
    assert {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in before} == before


def test_the_names_are_those_that_cuda_registers_and_the_recurrent_layers() -> None:
    listed = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    registered = {name.removeprefix("aten::") for name in listed if name.startswith("aten::")} - OWN["cuda"]
    registered -= fixed_dtype.added("cuda")  # xamp's own, after a session on a card
    if version >= WRITTEN_FROM:
        assert registered | LAYERS == set(HERE)
        assert len(registered) == len(HERE) - 8
    if version == WRITTEN_FROM:
        assert len(registered) == 119
    assert len(RULES) == 128
    assert not registered & LAYERS
    assert set(ON_CUDA) == registered & set(RULES)


def test_the_table_is_sorted_frozen_and_gives_reasons() -> None:
    assert list(RULES) == sorted(RULES)
    with pytest.raises(TypeError, match="does not support item assignment"):
        RULES["mm"] = Rule("fp32", "")  # type: ignore[index]
    for rule in RULES.values():
        assert len(rule.reason) > 10
        assert not rule.reason.endswith(".")


def test_the_table_needs_no_torch() -> None:
    code = "import sys, xamp.casting.ops.table; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("overload", HERE)
def test_samples_run_in_fp32_on_the_cpu(overload: str) -> None:
    for sample in samples(overload):
        seen = attempt(sample, "cpu", None, (FP32,))
        if overload in GPU_KERNELS:
            assert seen.unobserved.startswith(f"Could not run 'aten::{overload}'")
            continue
        assert seen.error is None
        assert set(seen.dtypes) == {FP32}
        wanting = [tensor.requires_grad for tensor in sample.call("cpu", FP32).inputs]
        assert any(wanting)
        assert seen.gradients == tuple(FP32 if wants else None for wants in wanting)


@pytest.mark.parametrize("overload", HERE)
def test_samples_are_the_same_in_every_run_and_inside_the_domain(overload: str) -> None:
    for sample in samples(overload):
        first, second = sample.call("cpu", FP32), sample.call("cpu", FP32)
        assert all(torch.equal(a, b) for a, b in zip(first.inputs, second.inputs, strict=True))
        if overload not in GPU_KERNELS:
            results = operator(overload)(*first.args, **first.kwargs)
            for result in results if isinstance(results, tuple) else (results,):
                assert result.isfinite().all()


def test_floating_tensors_take_the_dtypes_that_are_given_in_turn() -> None:
    inputs = samples("bilinear")[0].call("cpu", HALF, FP32).inputs
    assert [tensor.dtype for tensor in inputs] == [HALF, FP32, HALF, FP32]
    (logits, targets, weight) = samples("nll_loss")[0].call("cpu", BF16).args
    assert (logits.dtype, targets.dtype, weight.dtype) == (BF16, torch.int64, BF16)
    assert logits.requires_grad
    assert not weight.requires_grad


@pytest.mark.parametrize("lower", [HALF, BF16], ids=str)
@pytest.mark.parametrize("overload", ON_CUDA)
def test_cuda_does_what_the_table_says(overload: str, lower: torch.dtype) -> None:
    seen = observe(overload, "cuda", lower)
    mixed = [one for one in seen if len(one.given) == 2]
    assert bool(mixed) == (RULES[overload].kind == "promote")
    for one in seen:
        assert one.agrees, one


def test_what_fake_cuda_cannot_show_is_said_to_be_so() -> None:
    if is_present("cuda"):
        pytest.skip("there is a card, which shows it")
    for one in [*observe("gru.input", "cuda", HALF), *observe("gru.data", "cuda", HALF)]:
        assert one.agrees is None
        assert ("CUDA driver" if torch.version.cuda else "not compiled with") in one.unobserved
        assert not one.dtypes


@pytest.mark.parametrize("overload", [name for name in ON_CUDA if RULES[name].kind != "banned"])
def test_fp64_is_cast_by_no_rule(overload: str) -> None:
    for sample in samples(overload):
        assert attempt(sample, "cuda", HALF, (FP64,), present=False).agrees


@pytest.mark.parametrize("lower", [HALF, BF16], ids=str)
def test_fake_tensors_show_what_the_device_does(lower: torch.dtype) -> None:
    compared = 0
    for overload in HERE:
        for real in observe(overload, "cpu", lower):
            fake = attempt(real.sample, "cpu", lower, real.given, present=False)
            assert not fake.gradients
            if real.dtypes and fake.dtypes:
                assert real.dtypes == fake.dtypes, real
                compared += 1
    assert compared > 250


def by_given(overload: str, lower: torch.dtype) -> dict[tuple[torch.dtype, ...], bool | None]:
    return {seen.given: seen.agrees for seen in observe(overload, "cpu", lower) if not seen.sample.names_dtype}


def test_where_the_cpu_differs_is_seen() -> None:
    assert by_given("softmax.int", BF16) == {(FP32,): True, (BF16,): False}
    assert by_given("grid_sampler", HALF) == {(FP32,): True, (HALF,): False, (HALF, FP32): True, (FP32, HALF): True}
    assert by_given("binary_cross_entropy", HALF) == {(FP32,): False, (HALF,): False}
    assert by_given("cudnn_convolution", HALF) == {(FP32,): None, (HALF,): None}
    mixed = next(seen for seen in observe("dot", "cpu", HALF) if seen.given == (HALF, FP32))
    assert mixed.error is not None
    assert mixed.error[0] is RuntimeError
    assert "same dtype" in mixed.error[1]
    assert mixed.wanted == FP32
    assert mixed.agrees is False


def test_gradients_arrive_in_the_dtype_of_what_was_given() -> None:
    (written,) = [seen for seen in observe("index_put", "cpu", HALF) if seen.given == (HALF,)]
    assert written.gradients == (HALF, HALF)
    for given in (FP32, BF16):
        (seen,) = [seen for seen in observe("mm", "cpu", BF16) if seen.given == (given,)]
        assert seen.dtypes == (BF16,)
        assert seen.gradients == (given, given)


def test_expected() -> None:
    lower, single, promote = Rule("lower", ""), Rule("fp32", ""), Rule("promote", "")
    for given in ((FP32,), (HALF,), (BF16,)):
        assert expected(lower, given, HALF) == HALF
        assert expected(single, given, HALF) == FP32
        assert expected(Rule("fp32_dtype", ""), given, HALF) == FP32
        assert expected(Rule("fp32_dtype", ""), given, HALF, named=BF16) == BF16
        assert expected(Rule("banned", ""), given, HALF) is None
    assert expected(promote, (HALF, FP32), HALF) == FP32
    assert expected(promote, (HALF,), HALF) == HALF
    assert {expected(rule, (FP64,), HALF) for rule in (lower, single, promote)} == {FP64}


def test_state_that_was_set_before_is_set_again() -> None:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", BF16)
    try:
        observe("binary_cross_entropy", "cuda", HALF)
        observe("mm", "cuda", HALF)
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") == BF16
        assert torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", HALF)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU",
        "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before",
        "No CUDA GPUs are available",
        "No HIP GPUs are available",
    ],
)
def test_a_missing_driver_is_no_answer_of_the_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in builds of torch for a device look for it, fake tensors or not."""

    def kernel(*_: object, **__: object) -> None:
        raise RuntimeError(f"{text}\nmore")

    monkeypatch.setattr(observing, "operator", lambda overload: kernel)
    (sample, *_) = samples("gru.input")
    absent = attempt(sample, "cuda", HALF, (FP32,), present=False)
    assert (absent.unobserved, absent.error, absent.agrees) == (text, None, None)
    there = attempt(sample, "cpu", HALF, (FP32,), present=True)
    assert (there.unobserved, there.error) == ("", (RuntimeError, text))
