"""How Ascend NPUs fail, as data: the message of torch_npu, CANN or the driver, its cause, and the cure.

This is apart from the backend because it must be importable where importing torch fails: torch loads torch_npu.
"""

from __future__ import annotations

from xamp.contract import Cause, Failure
from xamp.policy import levels_where, listed

__all__ = ["CAUSES"]

_SOURCE = "source the set_env.sh of the CANN installation in the shell that starts this (often "
_SET_ENV = _SOURCE + "/usr/local/Ascend/ascend-toolkit/set_env.sh)"
_CANN = "hccl|ascendcl|acl_op_compiler|ge_runner|graph|acl_tdt_channel|opapi|nnopbase|runtime"
_MATCH = "install the torch_npu whose version is torch's: pip install torch-npu==<the version of torch>"
_UPDATE = "update CANN, kernels included, to the version that torch_npu's release notes name"
_IN_FLOAT16 = levels_where(lambda row: row.dtype == "float16" and not row.steps_lower)
_OLD_CANN = r"CANN is older than this torch_npu: it has no \1"


def _two_accelerators(failure: Failure) -> tuple[str, str] | None:
    if "Two accelerators cannot be used at the same time" not in failure.text:
        return None
    return (
        "this is a build of torch for another accelerator, and torch_npu works with a CPU build only",
        "install the CPU build of the same version beside torch_npu, in an environment of its own; to use the other "
        "accelerator instead: export TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    )


CAUSES = (
    _two_accelerators,
    Cause(
        r"(libascend_hal\.so)[.\d]*: cannot open shared object file",
        r"the Ascend driver is missing: \1 is not found",
        "install driver and firmware; in a container mount /usr/local/Ascend/driver and pass the /dev/davinci* devices",
    ),
    Cause(
        rf"(lib(?:{_CANN})\.so)[.\d]*: cannot open shared object file",
        r"CANN is not installed, or its environment is not set: \1 is not found",
        _SET_ENV,
    ),
    Cause(
        r"(libatb\.so)[.\d]*: cannot open shared object file",
        r"NNAL is not installed, or its environment is not set: \1 is not found",
        "install the NNAL package of the same CANN and source its set_env.sh",
    ),
    Cause(
        r"(ASCEND_(?:HOME|OPP|RUNTIME|COMPILER)_PATH)\s*:?\s*(\S+) does not exist",
        r"\1 points to \2, which is not there",
        _SET_ENV,
    ),
    Cause(
        r"(ASCEND_(?:HOME|OPP|RUNTIME|COMPILER)_PATH) environment variable is not set",
        r"the environment of CANN is set by half: \1 is missing",
        _SET_ENV,
    ),
    # libtorch_npu's symbols from CANN have such names; its symbols from torch are mangled C++ names.
    Cause(r"undefined symbol: ((?:acl|rt|Msprof|Hccl)\w+)", _OLD_CANN, _UPDATE),
    Cause(
        r"libtorch_npu\.so: undefined symbol: (\S+)",
        r"torch_npu was built for another version of torch (undefined symbol \1)",
        _MATCH,
    ),
    Cause(
        r"_C\.[\w.-]*so: undefined symbol: (\S+)(?=[\s\S]*torch_npu)",
        r"torch_npu was built for another version of torch (undefined symbol \1)",
        _MATCH,
    ),
    Cause(
        r"No module named 'torch_npu\._C'|module 'torch_npu' has no attribute '_autoload'",
        "a folder named torch_npu is in the way, such as its source tree",
        "start from another folder, or reinstall torch_npu",
    ),
    Cause(
        r"Unsupported soc version:? ?(\w*)",
        r"this torch_npu does not know the chip \1",
        "install a newer torch_npu, with the torch and the CANN that it wants",
    ),
    Cause(
        "error code is 507008|Failed to obtain the SOC version",
        "CANN cannot tell which chip this is: driver and CANN do not fit together, or the card is in use or broken",
        "run npu-smi info; update driver and firmware to those that this CANN asks for",
    ),
    Cause(
        "error code is 507899|internal error occurs in the Driver module",
        "the Ascend driver fails",
        "run npu-smi info: where it fails too, reinstall the driver or restart the machine; a container needs the "
        "/dev/davinci* devices",
    ),
    Cause(
        "error code is 107001|Invalid device ID|No NPUs are available",
        "there is no Ascend device",
        "check that npu-smi info lists one",
        masked=True,
    ),
    Cause(r"(aclnn\w+) or aclnn\w+ not in libopapi\.so", _OLD_CANN, _UPDATE),
    Cause(r"Failed to find function (\w+)", _OLD_CANN, _UPDATE),
    Cause(
        r"EZ1001[\s\S]*DT_BFLOAT16|not implemented for DT_BFLOAT16",
        "this chip does not compute in bfloat16",
        f"use {listed(_IN_FLOAT16)}",
    ),
    Cause(
        "Cannot re-initialize NPU in forked subprocess",
        "a process that was forked after the NPU was in use cannot use it",
        'start processes with multiprocessing.set_start_method("spawn")',
    ),
    Cause(
        r"NPU out of memory",
        "the NPU's memory is in use, by other processes or by this one",
        "see npu-smi info for who uses it, or choose another device by ASCEND_RT_VISIBLE_DEVICES",
    ),
    # General causes, for errors that no row above explains.
    Cause(
        r"OPS function error: (\w+), error code is (\d+)",
        r"CANN cannot run the operator \1 (error code \2)",
        "install the kernels package for this chip, of the same version as CANN: without it no operator runs",
    ),
    Cause(
        r"current working operator name is (\w+)",
        r"the operator \1 failed, and torch_npu says why elsewhere",
        "start it again with ASCEND_LAUNCH_BLOCKING=1: the error then says why",
    ),
    Cause(
        r"NPU function error: .*?error code is (\d+)",
        r"CANN fails (error code \1)",
        "run npu-smi info; check that driver, CANN and torch_npu are of versions that belong together",
    ),
)
