"""``abacus_ccl``: torch.distributed for tensors of the abacus, by gloo on their memory."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist

from xamp_abacus.kernels import operator, run
from xamp_abacus.memory import device_type

__all__ = ["install"]

_libraries: list[torch.library.Library] = []


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _collective(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Hand a collective to gloo; a group of ``abacus_ccl`` knows it for tensors of the abacus only."""
    return run(op, *map(_for_cpu, args), **{name: _for_cpu(value) for name, value in kwargs.items()})


def _for_cpu(value: Any) -> Any:
    if not (isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith(".ProcessGroup")):
        return value
    group: Any = dist.ProcessGroup.unbox(value)
    make: Any = dist.ProcessGroup  # its annotations name another constructor
    same, gloo = make(group.rank(), group.size()), group._get_backend(torch.device(device_type()))
    same._register_backend(torch.device("cpu"), make.BackendType.GLOO, gloo)
    return same.boxed()


def install() -> None:
    """Register the backend, and what torch's collectives do on the device."""
    if not dist.is_available():
        return
    dist.Backend.register_backend("abacus_ccl", _create, devices=[device_type()])
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    names = torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # torch's own are replaced on purpose
        for name in (name[6:] for name in names if name.startswith("c10d::")):
            kernel = functools.partial(_collective, operator("c10d", name))
            library.impl(name, kernel, "PrivateUse1", allow_override=True)
