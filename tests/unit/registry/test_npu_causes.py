"""Why an Ascend NPU cannot be used: each text that torch_npu, CANN and the driver have for it, and the cure.

That these are the texts is shown in tests/emulated/test_failures.py, where each failure is brought about; but for
CANN's EZ1001, the missing room for static TLS on aarch64 and memory that is used up, which need such a machine.

Covers: backends.npu.causes, backends.npu.chips.
"""

from __future__ import annotations

import pytest

from xamp.backends.npu import chips
from xamp.contract import Failure
from xamp.registry.causes import TorchFailure, explain, explain_torch
from xamp.registry.registry import BUILT_INS

SPEC = next(spec for spec in BUILT_INS if spec.name == "npu")
AUTOLOAD = (
    "RuntimeError: Failed to load the backend extension: torch_npu. You can disable extension auto-loading with "
    "TORCH_DEVICE_BACKEND_AUTOLOAD=0.\nImportError: {}"
)
MISSING = "{}: cannot open shared object file: No such file or directory"

TEXTS = {
    "NPU's memory": (
        "RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)",
        "the NPU's memory is in use",
        "npu-smi info",
    ),
    "no NPUs": ("RuntimeError: No NPUs are available", "there is no Ascend device", "npu-smi info"),
    "old CANN, at load": (
        AUTOLOAD.format("/site/torch_npu/lib/libtorch_npu.so: undefined symbol: aclrtMemset"),
        "CANN is older than this torch_npu: it has no aclrtMemset",
        "update CANN",
    ),
    "no kernels": (
        "RuntimeError: operator():OpParamMaker.cpp:348 OPS function error: OnesLike, error code is 500002",
        "CANN cannot run the operator OnesLike (error code 500002)",
        "kernels package",
    ),
    "queued": (
        "RuntimeError: The Inner error is reported as above. The process exits for this inner error, and the current "
        "working operator name is OnesLike.",
        "the operator OnesLike failed",
        "ASCEND_LAUNCH_BLOCKING=1",
    ),
    "anything else": (
        "RuntimeError: f:x.cpp:142 NPU function error: AclrtGetSysParamOpt(a::B, &c), error code is 500000",
        "CANN fails (error code 500000)",
        "versions that belong together",
    ),
    "CANN missing": (AUTOLOAD.format(MISSING.format("libhccl.so")), "CANN is not installed", "set_env.sh"),
    "CANN missing, 2": (AUTOLOAD.format(MISSING.format("libascendcl.so")), "libascendcl.so is not found", "set_env.sh"),
    "driver missing": (
        AUTOLOAD.format(MISSING.format("libascend_hal.so")),
        "the Ascend driver is missing",
        "container",
    ),
    "NNAL missing": (MISSING.format("libatb.so"), "NNAL is not installed", "NNAL package"),
    "home wrong": (
        "Exception: ASCEND_HOME_PATH : /x does not exist. Please run 'source set_env.sh' in the CANN "
        "installation path.",
        "ASCEND_HOME_PATH points to /x, which is not there",
        "set_env.sh",
    ),
    "opp not set": (
        "Exception: ASCEND_OPP_PATH environment variable is not set. Please check whether the opp package is "
        "installed.",
        "set by half: ASCEND_OPP_PATH is missing",
        "set_env.sh",
    ),
    "no device": (
        "RuntimeError: Initialize:torch_npu/csrc/core/npu/sys_ctrl/npu_sys_ctrl.cpp:237 NPU function error: "
        "c10_npu::SetDevice(device_id_), error code is 107001\n[Error]: Invalid device ID.",
        "there is no Ascend device",
        "npu-smi info",
    ),
    "driver error": (
        "RuntimeError: aclrtGetDeviceCount(&device_count), error code is 507899\nAn internal error occurs in "
        "the Driver "
        "module.",
        "the Ascend driver fails",
        "npu-smi info",
    ),
    "soc": ("RuntimeError: aclInit, error code is 507008\nFailed to obtain the SOC version.", "which chip", "firmware"),
    "other torch": (
        AUTOLOAD.format("/site/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZNK3c1010TensorImpl4sizeEl"),
        "torch_npu was built for another version of torch",
        "pip install torch-npu==",
    ),
    "old CANN": (
        "RuntimeError: aclnnFoo or aclnnFooGetWorkspaceSize not in libopapi.so, or libopapi.so not found.",
        "CANN is older than this torch_npu",
        "update CANN",
    ),
    "old CANN, 2": (
        "RuntimeError: Failed to find function aclrtFoo",
        "CANN is older than this torch_npu",
        "update CANN",
    ),
    "bf16": (
        "RuntimeError: call aclnnCast failed, detail:EZ1001: [PID: 1] tensor not implemented for DT_BFLOAT16, "
        "should be "
        "in dtype support list [DT_FLOAT,DT_FLOAT16]",
        "does not compute in bfloat16",
        "use O1 or O2",
    ),
    "CUDA build": (
        "RuntimeError: Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can "
        "install the cpu "
        "version of PyTorch to use your npu device, or use the cuda device with 'export "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0'.",
        "a build of torch for another accelerator",
        "install the CPU build",
    ),
    "source tree": (
        AUTOLOAD.format("No module named 'torch_npu._C'"),
        "a folder named torch_npu is in the way",
        "folder",
    ),
    "unknown chip": ("RuntimeError: Unsupported soc version: Ascend999", "does not know the chip Ascend999", "newer"),
    "fork": ("RuntimeError: Cannot re-initialize NPU in forked subprocess. To use NPU", "forked", "spawn"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_cause_is_known_with_its_cure(text: str) -> None:
    said, cause, cure = TEXTS[text]
    found = explain(SPEC, Failure("exception", said, "torch" if "Failed to load" in said else "probe", {}))
    assert found is not None
    assert cause in found.cause
    assert cure in found.cure


def test_a_mask_is_the_likelier_cause_of_no_device() -> None:
    said = TEXTS["no device"][0]
    found = explain(SPEC, Failure("exception", said, "probe", {"ASCEND_RT_VISIBLE_DEVICES": "9"}))
    assert found is not None
    assert found.cause == "no device is visible under ASCEND_RT_VISIBLE_DEVICES='9'"


def test_no_room_for_static_tls_is_torch_s_to_explain() -> None:
    text = AUTOLOAD.format("/usr/lib/libgomp.so.1: cannot allocate memory in static TLS block")
    found = explain_torch(TorchFailure("torch cannot be imported", "", text=text), BUILT_INS)
    assert found.reason == (
        "torch cannot be imported: /usr/lib/libgomp.so.1 was loaded too late to find room in static TLS"
    )
    assert found.hint.endswith("LD_PRELOAD=/usr/lib/libgomp.so.1")


def test_what_is_another_s_is_left_to_others() -> None:
    assert explain(SPEC, Failure("exception", MISSING.format("libcudnn.so.9"), "torch", {})) is None
    assert explain(SPEC, Failure("exception", "OSError: disk full", "probe", {})) is None


@pytest.mark.parametrize(
    ("name", "number", "bf16", "saturates"),
    [
        ("Ascend910A", 102, False, True),
        ("Ascend910B", 104, False, True),  # the naming trap: old
        ("Ascend910B1", 220, True, False),
        ("Ascend910B2", 221, True, False),
        ("Ascend310P3", 202, False, True),
        ("Ascend910_9391", 250, True, False),
    ],
)
def test_chips(name: str, number: int, bf16: bool, saturates: bool) -> None:
    for spelling in (name, name.lower(), f"{name} (emulated)", name.removeprefix("Ascend")):
        chip = chips.find(spelling)
        assert chip is not None
        assert (chip.name, chip.number, chip.bf16, chip.saturates) == (name, number, bf16, saturates)
    assert chips.find("Ascend999") is None
