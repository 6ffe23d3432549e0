"""Handlers for process groups and what wraps models in them: names of torch.distributed and torch.nn.parallel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed

import xamp
from xamp import accel
from xamp.run.devices import Target
from xamp.run.site import Site, like

__all__ = ["accept_sync_batch_norm", "init_group", "new_group", "sync_batch_norm", "wrap_ddp"]

_FOREIGN = ("nccl", "hccl")
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def _backend(site: Site, named: Any) -> Any:
    """The backend in place of ``named``, such as ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``."""
    if not isinstance(named, str):
        return named
    parts = dict.fromkeys(_part(site.target, part.strip()) for part in named.lower().split(","))
    mapped = ",".join(parts)
    if mapped == named.lower():
        return named
    site.note(f"{site.label}({named!r})")
    return mapped


def _part(target: Target, part: str) -> str:
    kind, colon, backend = part.rpartition(":")
    own = xamp.distributed_backend()
    backend = own if backend in _FOREIGN and backend != own else backend
    return f"{target.map_type(kind)}{colon}{backend}"


def init_group(site: Site) -> Any:
    """``init_process_group``: the backend, a world size of no devices, and ``tcp://`` under torchrun."""
    original, target = site.original, site.target

    def init_process_group(
        backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, *args: Any, **rest: Any
    ) -> Any:
        device = rest.get("device_id")
        if device is not None and (target.is_host or target.is_foreign(device)):
            site.note(f"{site.label}(device_id=...)", port="device_id=xamp.device()")
            rest["device_id"] = None if target.is_host else target.map(device)
        if world_size == 0:
            world_size = int(os.environ.get("WORLD_SIZE", accel.device_count()))
            site.note(
                f"{site.label}(world_size=0)", kind="launch", port=f"{world_size}: device_count() counts CUDA devices"
            )
        backend = _backend(site, backend)
        with _own_store(site, init_method):
            return original(backend, init_method, timeout, world_size, *args, **rest)

    return like(original, init_process_group)


@contextlib.contextmanager
def _own_store(site: Site, init_method: Any) -> Iterator[None]:
    """Let rank 0 open the store of a ``tcp://`` address, which under torchrun every rank waits for otherwise."""
    inherited = os.environ.get(_AGENT_STORE)
    address = urlparse(init_method) if isinstance(init_method, str) else None
    if address is None or address.scheme != "tcp" or inherited != "True" or _is_agents(address):
        yield
        return
    site.note(f"{site.label}(init_method='tcp://...') under torchrun", kind="launch", port="init_method='env://'")
    os.environ[_AGENT_STORE] = "False"
    try:
        yield
    finally:
        os.environ[_AGENT_STORE] = inherited


def _is_agents(address: Any) -> bool:
    given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return (address.hostname, str(address.port)) == given


def new_group(site: Site) -> Any:
    """``new_group`` with a backend."""
    original = site.original

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(ranks, timeout, _backend(site, backend), *args, **kwargs)

    return like(original, new_group)


def wrap_ddp(site: Site) -> Any:
    """``DistributedDataParallel.__init__``: a model on a CPU takes no ``device_ids``."""
    original, target = site.original, site.target

    def __init__(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        on_host = all(parameter.device.type == "cpu" for parameter in module.parameters())
        if on_host and (device_ids or output_device is not None):
            site.note("DistributedDataParallel(device_ids=...)", kind="launch")
            device_ids = output_device = None
        elif not on_host:
            device_ids = [_mapped(target, device) for device in device_ids] if device_ids else device_ids
            output_device = None if output_device is None else _mapped(target, output_device)
        original(self, module, device_ids, output_device, *args, **kwargs)

    return like(original, __init__)


def accept_sync_batch_norm(site: Site) -> Any:
    """DDP's check that a model with SyncBatchNorm is on a GPU: on a CPU :func:`sync_batch_norm` serves."""
    original = site.original

    def _passing_sync_batchnorm_handle(self: Any, module: Any) -> None:
        if self.device_type != "cpu":
            original(self, module)

    return like(original, _passing_sync_batchnorm_handle)


def _mapped(target: Target, device: Any) -> Any:
    return target.map(device) if target.is_foreign(device) else device


def sync_batch_norm(site: Site) -> Any:
    """``SyncBatchNorm.forward`` on a CPU, where torch has it only for one process."""
    original = site.original

    def forward(self: Any, input: Any) -> Any:
        distributed = torch.distributed
        together = self.training and distributed.is_available() and distributed.is_initialized()
        if input.device.type != "cpu" or not together:
            return original(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        site.note("SyncBatchNorm on a CPU", kind="launch")
        return _normalized(self, input)

    return like(original, forward)


def _normalized(module: Any, input: torch.Tensor) -> torch.Tensor:
    """``input`` [N, C, ...] normalized by mean and variance over all ranks, in fp32; the result has its dtype."""
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    rest = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    ones = wide.new_full((1,), input.numel() / input.size(1))
    summed = _sum(torch.cat([wide.sum(rest), ones]), module.process_group)
    count = summed[-1].detach()
    mean = summed[:-1] / count
    centred = wide - mean.view(shape)
    variance = _sum(centred.square().sum(rest), module.process_group) / count
    if module.track_running_stats and module.running_mean is not None:
        _track(module, mean.detach(), (variance * count / (count - 1).clamp(min=1)).detach())
    result = centred * torch.rsqrt(variance + module.eps).view(shape)
    if module.weight is not None:
        result = result * module.weight.view(shape)
    if module.bias is not None:
        result = result + module.bias.view(shape)
    return result.to(input.dtype)


@torch.no_grad()
def _track(module: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    module.num_batches_tracked.add_(1)
    momentum = module.momentum
    weight = 1.0 / float(module.num_batches_tracked) if momentum is None else momentum
    for running, value in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - weight).add_(value.to(running.dtype), alpha=weight)


class _Sum(torch.autograd.Function):
    """A sum over the ranks; the gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        value = value.clone()
        torch.distributed.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous().clone()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _sum(value: torch.Tensor, group: Any) -> torch.Tensor:
    result: torch.Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return result
