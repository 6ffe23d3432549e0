"""The backends that ship: what they declare, and how they explain what is missing.

Covers: backends.cpu, backends.cuda, backends.native, xamp.registry.trials.
"""

from __future__ import annotations

import contextlib
import operator
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from xamp.backends import cpu, cuda, cudnn_rnn, native, processor
from xamp.backends.cuda import CudaBackend
from xamp.contract import Backend, BackendSpec, Failure
from xamp.errors import BackendUnavailable
from xamp.registry.causes import explain
from xamp.registry.registry import BUILT_INS, REGISTRY, Registry

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")


def backend_of(name: str) -> Backend:
    return REGISTRY.resolve(name, name)


def test_importing_the_folder_as_a_package_of_its_own_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import backends"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ImportError: this package is xamp.backends: write `import xamp.backends`" in done.stderr


# --- what every built-in that works here promises


@pytest.mark.parametrize("name", [spec.name for spec in BUILT_INS])
def test_what_a_usable_backend_declares_is_true(name: str) -> None:
    try:
        backend = backend_of(name)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    device = torch.device(backend.device_type)
    declared = backend.capabilities(device)
    assert [native.defect_of(device, dtype) for dtype in declared.dtypes] == [""] * len(declared.dtypes)
    assert set(declared.fast_dtypes) <= set(declared.dtypes)
    assert "O0" in declared.levels
    assert all(hasattr(torch.optim, optimizer) for optimizer in declared.fused_optimizers)
    assert backend.devices()


@pytest.mark.parametrize(
    ("dtypes", "levels"),
    [
        ((), ("O0",)),
        (("float16",), ("O0", "O1", "O2", "O3")),
        (("bfloat16",), ("O0", "O4", "O5")),
        (("float16", "bfloat16"), ("O0", "O1", "O2", "O3", "O4", "O5")),
    ],
)
def test_levels_follow_from_dtypes(dtypes: tuple[str, ...], levels: tuple[str, ...]) -> None:
    assert native.levels_for(dtypes) == levels


def test_the_cpu_runs_every_level_and_is_never_fast_in_fp16() -> None:
    declared = backend_of("cpu").capabilities(CPU)
    assert declared.levels == ("O0", "O1", "O2", "O3", "O4", "O5")
    assert declared.process_group == "gloo"
    assert declared.fast_dtypes in ((), ("bfloat16",))


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_cpu_s_fused_optimizers_skip_on_found_inf(optimizer: str) -> None:
    assert optimizer in backend_of("cpu").capabilities(CPU).fused_optimizers
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    fused: Any = getattr(torch.optim, optimizer)([weight], lr=0.1, fused=True)
    fused.grad_scale, fused.found_inf = None, torch.ones(())
    fused.step()
    assert weight.tolist() == [1.0] * 4
    fused.found_inf = torch.zeros(())
    fused.step()
    assert all(value < 1.0 for value in weight.tolist())


# --- the trial


class Saturating(torch.Tensor):
    """A tensor as a chip computes it that saturates: an inf becomes the largest number."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return result.clamp(-65504, 65504) if func is torch.Tensor.mul else result


def test_the_trial_finds_a_device_that_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: full(*args, **kwargs).as_subclass(Saturating))
    monkeypatch.setattr(torch, "DisableTorchFunction", contextlib.nullcontext)  # the class stands for the device
    assert "an inf in float16 does not stay one: the device saturates" in native.defect_of(CPU, "float16")


@pytest.mark.parametrize(
    ("raised", "factor", "defect"),
    [
        (0.0, 0.5, "the operator that unscales gradients overlooks inf in bfloat16"),
        (1.0, 0.5, "the operator that unscales gradients sees an overflow where there is none in bfloat16"),
        (0.0, 1.0, "the operator that unscales gradients multiplies wrongly in bfloat16"),
    ],
)
def test_the_trial_asks_the_backend_s_own_method(raised: float, factor: float, defect: str) -> None:
    def unscale_(grads: Any, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        found_inf.fill_(raised)
        for grad in grads:
            grad.mul_(factor)

    assert native.defect_of(CPU, "bfloat16", unscale_=unscale_) == defect


def test_the_trial_finds_a_wrong_product(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: ones(*args, **kwargs) * 2)
    assert native.defect_of(CPU, "float16") == "a product of two float16 matrices is wrong"


def test_the_trial_reports_an_error_in_one_line() -> None:
    defect = native.defect_of(torch.device("meta"), "float16")
    assert defect.startswith("computing in float16 fails: ")
    assert "\n" not in defect


def test_the_trial_draws_no_random_numbers() -> None:
    state = torch.random.get_rng_state()
    assert native.defect_of(CPU, "float16") == ""
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_defect_becomes_the_probe_s_cause_and_the_hint_its_cure() -> None:
    spec = BackendSpec("broken", ("meta",), "xamp.backends.native:NativeBackend", install_hint="get another one")
    with pytest.raises(
        BackendUnavailable, match=r"^meta is there, but computing in float32 fails: .*\nget another one$"
    ):
        native.NativeBackend(spec).probe()


# --- devices that torch has a module for; the module is a stand-in, since the machine may have none


class Module:
    def __init__(self, current: int, count: int) -> None:
        self.current_device, self.device_count = lambda: current, lambda: count


class StandIn(native.ModuleBackend):
    stand_in: Any = None

    @property
    def module(self) -> Any:
        return self.stand_in


@pytest.mark.parametrize(
    ("current", "count", "local_rank", "probed"),
    [
        (0, 4, None, 0),
        (0, 4, "2", 2),
        (1, 4, "2", 1),  # the script has chosen already
        (0, 1, "2", 0),  # every rank sees only its own
        (0, 4, "two", 0),
    ],
)
def test_the_probe_keeps_off_the_cards_of_other_ranks(
    monkeypatch: pytest.MonkeyPatch, current: int, count: int, local_rank: str | None, probed: int
) -> None:
    if local_rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    backend = StandIn(BackendSpec("x", ("xpu",), "a:B"))
    backend.stand_in = Module(current, count)
    assert backend.probed_device() == torch.device("xpu", probed)


def test_a_device_that_a_mask_hides_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = StandIn(BackendSpec("x", ("xpu",), "a:B", masks=("ACME_MASK",)))
    hidden.stand_in = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.delenv("ACME_MASK", raising=False)
    with pytest.raises(BackendUnavailable, match=r"finds no xpu device\ninstall a build"):
        hidden.require_device()
    monkeypatch.setenv("ACME_MASK", "9")
    with pytest.raises(BackendUnavailable, match=r"^no device is visible under ACME_MASK='9'\nunset ACME_MASK"):
        hidden.require_device()


@pytest.mark.parametrize("name", ["cuda", "xpu", "mps"])
def test_an_accelerator_that_is_missing_says_so_with_a_cure(name: str) -> None:
    (row,) = [row for row in REGISTRY.reports() if row.name == name and row.source == "xamp"]
    if row.usable:
        pytest.skip(f"this machine has {name}")
    assert row.reason
    assert any(word in row.hint for word in ("install", "check", "unset"))


# --- CPU features


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nFeatures\t: fp asimd i8mm bf16 dgh\n", True),
        ("Features\t: fp asimd ebf16x\n", False),
        ("flags\t\t: fpu bf16\n", False),
        ("", False),
    ],
)
def test_bf16_of_an_arm_processor_is_read_from_its_features(text: str, expected: bool) -> None:
    assert processor.arm_lists_bf16(text) is expected


def test_fast_bf16_follows_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for native_bf16, fast in ((True, ("bfloat16",)), (False, ())):
        monkeypatch.setattr(cpu, "has_native_bf16", lambda answer=native_bf16: answer)
        backend = cpu.CpuBackend(BackendSpec("cpu", ("cpu",), "a:B"))
        assert backend.capabilities(CPU).fast_dtypes == fast


def test_x86_without_bf16_instructions_is_not_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_cpuinfo", lambda: "flags : avx2 avx512f\nmodel name : Old One \n")
    monkeypatch.setattr(sys, "platform", "linux")
    answers = {"_is_avx512_bf16_supported": False, "_is_amx_tile_supported": False}
    for name in answers:
        monkeypatch.setattr(torch.cpu, name, lambda name=name: answers[name], raising=False)
    assert processor.has_native_bf16.__wrapped__() is False
    assert processor.processor_name.__wrapped__() == "Old One"
    answers["_is_amx_tile_supported"] = True
    assert processor.has_native_bf16.__wrapped__() is True


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", "warning"),
        ("DNNL_DEFAULT_FPMATH_MODE", "any", "warning"),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", "note"),
        ("ATEN_CPU_CAPABILITY", "default", "note"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", None),
        ("ONEDNN_MAX_CPU_ISA", "DEFAULT", None),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "", None),
    ],
)
def test_variables_that_change_the_cpu_s_arithmetic_are_settings(
    name: str, value: str, severity: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in cpu._VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    settings = backend_of("cpu").precision_settings(CPU)
    assert [(each.name, each.value, each.severity, each.undo) for each in settings] == (
        [(f"{name} (environment)", value, severity, f"unset {name}")] if severity else []
    )


# --- GPUs: the texts are torch's own

CUDA = next(spec for spec in BUILT_INS if spec.name == "cuda")


@pytest.mark.parametrize(
    ("message", "environment", "cause", "cure"),
    [
        (
            "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
            {},
            "there is no NVIDIA driver",
            "install the driver",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
            {"CUDA_VISIBLE_DEVICES": "0"},
            "the NVIDIA driver is too old for this build of torch: it supports CUDA up to 11.4",
            "update the driver",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12100). Please update your GPU driver",
            {},
            "the NVIDIA driver is too old for this build of torch: it supports CUDA up to 12.10",
            "update the driver",
        ),
        ("No CUDA GPUs are available", {}, "the driver finds no GPU", "check that the machine has one"),
        (
            "No CUDA GPUs are available",
            {"CUDA_VISIBLE_DEVICES": ""},
            "no device is visible under CUDA_VISIBLE_DEVICES=''",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            "No HIP GPUs are available",
            {"HIP_VISIBLE_DEVICES": "-1"},
            "no device is visible under HIP_VISIBLE_DEVICES='-1'",
            "unset HIP_VISIBLE_DEVICES",
        ),
        (
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use 'spawn'",
            {},
            "a process that was forked",
            'set_start_method("spawn")',
        ),
        (
            "CUDA driver initialization failed, you might not have a CUDA gpu.",
            {},
            "the GPU driver does not start",
            "run nvidia-smi",
        ),
        (
            "Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non",
            {},
            "the CUDA libraries in front of the driver's",
            "update the driver of the host",
        ),
        (
            "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            {},
            "the driver's parts do not fit together",
            "nvidia-fabricmanager",
        ),
        (
            "cuda:0 is there, but computing in float32 fails: X: CUDA error: no kernel image is available",
            {},
            "this build of torch has no kernels for this GPU",
            "torch.cuda.get_arch_list()",
        ),
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
            {},
            "the GPU's memory is in use",
            "nvidia-smi",
        ),
    ],
)
def test_a_gpu_that_does_not_start_gives_cause_and_cure(
    message: str, environment: dict[str, str], cause: str, cure: str
) -> None:
    found = explain(CUDA, Failure("exception", f"RuntimeError: {message}", "probe", environment))
    assert found is not None
    assert found.cause.startswith(cause)
    assert cure in found.cure
    assert not any("\n" in text for text in found)


@pytest.mark.parametrize(
    ("message", "shown"), [("Error 999: unknown\nmore", "Error 999: unknown"), ("", "no reason given")]
)
def test_a_gpu_that_fails_otherwise_says_what_torch_said(
    message: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> NoReturn:
        raise RuntimeError(message)

    fails.__module__ = "torch.cuda"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", fails)
    (row,) = Registry([CUDA], group=None).reports()
    assert row.reason == f"torch.cuda.init() failed: {shown}"
    assert "collect_env" in row.hint
    assert row.detail == ""


def replaced(names: Sequence[str], owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite functions of torch.cuda in place by those of ``owner``."""
    for name in names:

        def function(*arguments: object) -> bool:
            return True

        function.__module__ = owner
        monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.parametrize(
    ("names", "owner", "cause", "cure"),
    [
        (
            ("init", "set_device", "is_available"),
            "torch_acme.acme.utils",
            "torch.cuda is not torch's own: torch_acme.acme.utils has replaced its functions",
            "take out what patches torch.cuda",
        ),
        (
            ("is_available",),
            "functools",
            "torch.cuda is not torch's own: this torch is built without CUDA and ROCm, yet torch.cuda.is_available()",
            "take out what patches torch.cuda",
        ),
    ],
)
def test_a_torch_cuda_that_stands_for_another_device_is_refused(
    names: Sequence[str], owner: str, cause: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    replaced(names, owner, monkeypatch)
    (row,) = Registry([CUDA], group=None).reports()
    assert row.reason.startswith(cause)
    assert cure in row.hint
    assert row.usable is False


def test_transfer_to_npu_is_known_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu.contrib.transfer_to_npu", types.ModuleType("transfer_to_npu"))
    (row,) = Registry([CUDA], group=None).reports()
    assert row.reason == (
        "torch.cuda is not torch's own: torch_npu.contrib.transfer_to_npu is active, and what it calls cuda is an NPU"
    )
    assert "unset TORCH_TRANSFER_TO_NPU" in row.hint


def test_a_torch_cuda_of_torch_s_own_is_not_suspected() -> None:
    assert cuda.stand_in() == ""


# --- GPUs: settings that change the arithmetic


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=8, minor=0))
    monkeypatch.setattr(cudnn_rnn, "has_bf16", lambda device: True)  # test_cudnn_rnn.py asks for these
    for name in (*cuda._VARIABLES, *cuda._HIP_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return CudaBackend(CUDA)


def shown(backend: CudaBackend) -> dict[str, str]:
    return {each.name: each.severity for each in backend.precision_settings(torch.device("cuda"))}


DEFAULTS = {
    "torch.backends.cudnn.allow_tf32": "note",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": "note",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": "note",
}


def test_torch_s_defaults_are_notes(ampere: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(ampere) == DEFAULTS
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=7, minor=0))
    assert "torch.backends.cudnn.allow_tf32" not in shown(ampere)  # no TF32 before 8.0


@pytest.mark.parametrize(
    ("switch", "severity"),
    [
        ("cuda.matmul.allow_tf32", "warning"),
        ("cuda.matmul.allow_fp16_accumulation", "warning"),
        ("cudnn.benchmark", "note"),
        ("cudnn.deterministic", "note"),
    ],
)
def test_switches_that_are_on_are_shown(
    ampere: CudaBackend, switch: str, severity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, name = switch.rpartition(".")
    holder = operator.attrgetter(owner)(torch.backends)
    try:
        before = getattr(holder, name)
    except AttributeError:
        pytest.skip("this torch has no such switch")
    setattr(holder, name, True)
    try:
        assert shown(ampere) == {**DEFAULTS, f"torch.backends.{switch}": severity}
    finally:
        setattr(holder, name, before)


def test_what_is_switched_off_is_not_shown(ampere: CudaBackend) -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        assert set(DEFAULTS) - set(shown(ampere)) == {
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
        }
    finally:
        matmul.allow_fp16_reduced_precision_reduction = True


def test_variables_that_change_a_gpu_s_arithmetic_are_shown(
    ampere: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert shown(ampere) == {
        **DEFAULTS,
        "NVIDIA_TF32_OVERRIDE (environment)": "warning",
        "CUBLAS_WORKSPACE_CONFIG (environment)": "note",
    }
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # off, whatever the switches say
    assert "torch.backends.cudnn.allow_tf32" not in shown(ampere)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setenv("HIPBLASLT_ALLOW_TF32", "1")
    assert "HIPBLASLT_ALLOW_TF32 (environment)" in shown(ampere)
    assert "CUBLAS_WORKSPACE_CONFIG (environment)" not in shown(ampere)


def test_an_older_torch_without_a_switch_has_nothing_to_report() -> None:
    assert cuda._switched_on("backends.cuda.matmul.no_such_switch") is False


@pytest.mark.parametrize(
    ("bf16", "levels", "fast"),
    [
        (True, ("O0", "O1", "O2", "O3", "O4", "O5"), ("bfloat16", "float16")),
        (False, ("O0", "O1", "O2", "O3"), ("float16",)),
    ],
)
def test_a_gpu_that_only_emulates_bf16_declares_no_bf16_level(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, levels: tuple[str, ...], fast: tuple[str, ...]
) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or bf16)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(major=8 if bf16 else 7, minor=0)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(native, "defect_of", lambda *_: "")  # each dtype that is asked for computes
    declared = cuda.CudaBackend(BackendSpec("cuda", ("cuda",), "a:B")).capabilities(torch.device("cuda", 0))
    assert (declared.levels, declared.fast_dtypes) == (levels, fast)
    assert ("bfloat16" in declared.dtypes) is bf16
    assert declared.why_not("bfloat16") == (
        "" if bf16 else " bfloat16 is not there because this card only emulates it."
    )


@pytest.mark.parametrize(
    ("capability", "fast"),
    [
        ((9, 0), ["bfloat16", "float16"]),
        ((8, 0), ["bfloat16", "float16"]),
        ((7, 5), ["float16"]),
        ((7, 0), ["float16"]),
        ((6, 1), []),
        ((6, 0), ["float16"]),
        ((5, 0), []),
    ],
)
def test_what_an_nvidia_gpu_is_fast_in(capability: tuple[int, int], fast: Sequence[str]) -> None:
    assert list(cuda.fast_on_nvidia(capability)) == fast


@pytest.mark.parametrize(
    ("architecture", "fast"),
    [
        ("gfx942:sramecc+:xnack-", ["bfloat16", "float16"]),
        ("gfx90a", ["bfloat16", "float16"]),
        ("gfx1100", ["bfloat16", "float16"]),
        ("gfx906", ["float16"]),
        ("gfx1030", ["float16"]),
        ("gfx803", []),
    ],
)
def test_what_an_amd_gpu_is_fast_in(architecture: str, fast: Sequence[str]) -> None:
    assert list(cuda.fast_on_amd(architecture)) == fast


# --- fp8


@pytest.mark.parametrize(
    ("card", "hip", "asked"),
    [
        ({"major": 8, "minor": 0}, None, False),
        ({"major": 8, "minor": 9}, None, True),
        ({"major": 9, "minor": 0}, None, True),
        ({"major": 9, "minor": 0, "gcnArchName": "gfx90a:sramecc+"}, "6.4", False),
        ({"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "6.4", True),
        ({"major": 9, "minor": 5, "gcnArchName": "gfx950"}, "7.0", True),
    ],
    ids=["A100", "Ada", "H100", "MI200", "MI300", "MI350"],
)
def test_recipes_of_fp8_are_tried_on_gpus_that_have_any(
    card: dict[str, Any], hip: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: types.SimpleNamespace(**card))
    monkeypatch.setattr(cuda, "fp8_recipes", lambda backend, device: (backend.name, device))
    gpu = CudaBackend(BackendSpec("gpu", ("cuda",), "a:B"))
    assert gpu.fp8_of(CPU) == (("gpu", CPU) if asked else ())
    own = "gfx94" in card.get("gcnArchName", "")
    assert gpu.fp8_formats["e4m3"] == ("float8_e4m3fnuz" if own else "float8_e4m3fn")
    assert gpu.fp8_formats["e5m2"] == ("float8_e5m2fnuz" if own else "float8_e5m2")


def test_what_a_record_tries_is_tried_once_and_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    class Tried(native.NativeBackend):
        def fp8_of(self, device: torch.device) -> tuple[str, ...]:
            asked.append(device)
            return ("rowwise",)

    can = Tried(BackendSpec("tried", ("cpu",), "a:B")).capabilities()
    assert asked == []
    assert "fp8='(not tried)'" in repr(can)
    assert (can.fp8, can.fp8) == (("rowwise",), ("rowwise",))
    assert asked == [CPU]
    assert native.NativeBackend(BackendSpec("none", ("cpu",), "a:B")).capabilities().fp8 == ()


def test_a_cpu_rehearses_all_recipes_and_runs_none() -> None:
    can = backend_of("cpu").capabilities()
    assert (can.fp8, can.fp8_rehearsed) == ((), ("tensorwise", "rowwise", "rowwise_gw_hp", "mxfp8"))
