"""A dtype in which a device does not compute takes its levels away, and nothing else; everybody who asks learns why.

Covers: xamp.registry.trials, xamp.registry.device_in_use, xamp.doctor.advice, xamp.doctor.declared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from mutants import registered
from refusing import Refusing

import xamp
from xamp.backends.cpu import CpuBackend
from xamp.contract import Backend, Capabilities
from xamp.doctor.advice import advise
from xamp.doctor.declared import find_gaps, find_mismatches
from xamp.errors import BackendUnavailable, UnsupportedPolicy
from xamp.registry import device_in_use
from xamp.registry.registry import REGISTRY

REASON = 'computing in bfloat16 fails: NotImplementedError: "aten::mm" not implemented for torch.bfloat16'
CPU = torch.device("cpu")


class NoBf16(CpuBackend):
    """Has no matrix product in bfloat16."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        with Refusing("mm", torch.bfloat16):
            return super()._defect(device, dtype)


class NoUnscaling(CpuBackend):
    """Has no kernel that unscales bfloat16, as on NVIDIA's cards."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        with Refusing("_amp_foreach_non_finite_check_and_unscale_", torch.bfloat16):
            return super()._defect(device, dtype)


class NoFp32(CpuBackend):
    """Has no matrix product in float32."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        with Refusing("mm", torch.float32):
            return super()._defect(device, dtype)


class Wordy(CpuBackend):
    """Says at length that it has no product in bfloat16, as torch does of an operator that a device lacks."""

    says = "Could not run 'aten::mm' with arguments from the 'X' backend. This could be because...\nCPU: registered at"

    def _defect(self, device: torch.device, dtype: str) -> str:
        if dtype != "bfloat16":
            return super()._defect(device, dtype)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "ones", self.refuse)
            return super()._defect(device, dtype)

    def refuse(self, *_: object, **__: object) -> None:
        raise NotImplementedError(self.says)


class Broken(CpuBackend):
    """Computes nothing."""

    def probe(self) -> None:
        with Refusing("mm", torch.float32, torch.float16, torch.bfloat16):
            super().probe()


class NoZero(CpuBackend):
    """Cannot fill float32 with zeros, without which no trial of any dtype ends well."""

    def _defect(self, device: torch.device, dtype: str) -> str:
        with Refusing("zero_", torch.float32):
            return super()._defect(device, dtype)


@pytest.fixture
def gone() -> Iterator[Backend]:
    with registered(f"{__name__}:NoBf16")():
        yield REGISTRY.resolve("mutant", "cpu")


def test_the_device_stays_and_the_levels_go(gone: Backend) -> None:
    can = gone.capabilities(CPU)
    assert can.dtypes == ("float16",)
    assert can.levels == ("O0", "O1", "O2", "O3")
    assert can.fast_dtypes == ()
    assert can.lacking == (("bfloat16", REASON),)
    assert find_mismatches(gone, CPU) == []


@pytest.mark.parametrize("level", ["O4", "O5"])
def test_who_asks_for_such_a_level_learns_why(gone: Backend, level: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedPolicy) as raised:
        xamp.initialize(model, optimizer, level=level, backend="mutant")
    assert str(raised.value) == (
        f"initialize(level='{level}'): backend 'mutant' cannot run it on cpu. Levels there: O0, O1, O2, O3. "
        f"bfloat16 is not there because {REASON}."
    )
    assert model.weight.dtype is torch.float32
    xamp.initialize(model, optimizer, level="O2", backend="mutant", verbosity=0)


def test_the_reason_is_the_first_sentence_of_what_torch_says() -> None:
    with registered(f"{__name__}:Wordy")():
        can = REGISTRY.resolve("mutant", "cpu").capabilities(CPU)
    said = (
        "computing in bfloat16 fails: NotImplementedError: Could not run 'aten::mm' with arguments from the 'X' backend"
    )
    assert can.lacking == (("bfloat16", said),)
    assert can.why_not("bfloat16") == f" bfloat16 is not there because {said}."


def test_a_reason_that_is_a_sentence_ends_once() -> None:
    can = Capabilities(lacking=(("bfloat16", "the chip has none."),))
    assert can.why_not("bfloat16") == " bfloat16 is not there because the chip has none."


def test_a_region_in_it_says_why(gone: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XAMP_BACKEND", "mutant")
    with pytest.raises(UnsupportedPolicy, match="not there because computing in bfloat16 fails"):
        xamp.autocast(dtype=torch.bfloat16).__enter__()


def test_the_automatic_choice_says_what_it_is_and_why(gone: Backend, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 1)
    with caplog.at_level(logging.INFO, logger="xamp"):
        xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="mutant")
    assert caplog.messages[0] == (
        "level='auto' is O0 on cpu: no dtype below float32 is native to this device: lower ones run, but save little "
        f"time. bfloat16 is not there because {REASON}."
    )


def test_doctor_says_which_levels_are_gone_and_why(gone: Backend) -> None:
    (finding,) = find_gaps(gone, CPU)
    assert finding.severity == "warning"
    assert finding.text == f"bfloat16 is not declared, and so neither are O4 and O5: {REASON}"


def test_an_operator_that_is_done_without_takes_nothing_away() -> None:
    with registered(f"{__name__}:NoUnscaling")():
        backend = REGISTRY.resolve("mutant", "cpu")
        assert backend.capabilities(CPU).levels == ("O0", "O1", "O2", "O3", "O4", "O5")
        (finding,) = find_gaps(backend, CPU)
        assert finding.severity == "note"
        assert finding.text.startswith("torch._amp_foreach_non_finite_check_and_unscale_ does not run in bfloat16: ")


@pytest.mark.parametrize(("cls", "operator"), [("NoFp32", "mm"), ("NoZero", "zero_")])
def test_without_float32_the_device_stays_and_no_level_is_left(cls: str, operator: str) -> None:
    with registered(f"{__name__}:{cls}")():
        backend = REGISTRY.resolve("mutant", "cpu")
        can = backend.capabilities(CPU)
        assert (can.levels, can.dtypes) == ((), ())
        assert find_mismatches(backend, CPU) == []
        assert advise(backend, CPU) is None
        finding = find_gaps(backend, CPU)[0]
        assert finding.text.startswith("float32 is not declared, and so neither are O0, O1, O2, O3, O4 and O5: ")
        model = torch.nn.Linear(2, 1)
        for level in ("auto", "O0", "O2", "O4"):
            with pytest.raises(
                UnsupportedPolicy, match=f"Levels there: none. float32 is not there because .*aten::{operator}"
            ):
                xamp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level=level, backend="mutant")


def test_a_device_that_is_there_and_broken_is_not_passed_over_in_silence(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(device_in_use.DEVICE_VARIABLE)
    monkeypatch.setattr(device_in_use, "_told", set())
    rest = device_in_use.device()  # the best of what else is there
    with registered(f"{__name__}:Broken", priority=1000)():
        with pytest.raises(BackendUnavailable, match="cpu is there, but computing in float32 fails"):
            REGISTRY.resolve("mutant", "cpu")
        for _ in range(2):
            assert device_in_use.device() == rest
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "'mutant' cannot be used: cpu is there, but computing in float32 fails" in record.message
    assert record.message.endswith(f"So the device in use is {rest.type}. XAMP_DEVICE={rest.type} says so.")
