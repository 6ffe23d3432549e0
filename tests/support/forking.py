"""Whether processes may be forked from this one. Once a device was asked for anything here, they cannot use it.

torch asks in many places where no device is meant: an optimizer's step, and the import of inductor, ask whether CUDA is
there. A server that processes are forked from starts with :data:`SETTINGS` in its environment, by which CUDA's question
starts nothing; and where a device was started all the same, it starts processes anew in place of forks.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch

SETTINGS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def may_fork() -> bool:
    """Whether a process that is forked from here can use every device that there is."""
    return not any(_ends_by_fork(device) and device.is_available() for device in _devices())


def _ends_by_fork(device: ModuleType) -> bool:
    """Whether a forked process may not use the device. One is forked, and asked."""
    pid = os.fork()
    if not pid:
        os._exit(bool(device._is_in_bad_fork()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _devices() -> list[ModuleType]:
    """The modules of torch that are a device's: torch itself asks each this before it seeds it."""
    modules = [found for found in vars(torch).values() if isinstance(found, ModuleType)]
    return [module for module in modules if "_is_in_bad_fork" in vars(module)]
