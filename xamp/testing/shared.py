"""A model that ranks share under torch's wrappers, and ways to make one rank overflow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import xamp
from xamp.testing.exact import Dot, sgd
from xamp.testing.lane import Lane

__all__ = ["Shared", "local", "saturating", "spoiling", "whole", "wrap"]


class Shared:
    """A :class:`Dot` that the ranks share, and its optimizer, in a session."""

    def __init__(self, lane: Lane, level: str, wrapper: str, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.lane = lane
        self.wrapper = wrapper
        self.model: Any = Dot().to(lane.device)
        self.outer: Any = self.model if wrapper == "ddp" else wrap(lane, wrapper, self.model)
        self.optimizer = sgd(self.outer.parameters())
        told = {"init_scale": 64.0, "verbosity": 0, **options}
        xamp.initialize(self.outer, self.optimizer, level=level, **told)
        if wrapper == "ddp":
            self.outer = wrap(lane, wrapper, self.model)

    def backward(self, x: torch.Tensor, spoil: bool = False) -> None:
        """Run ``scale_loss`` and backward; ``spoil``: this rank's device overflows, under DDP before the reduction."""
        before_reduction = spoil and self.wrapper == "ddp"
        with xamp.scale_loss(self.outer(x), self.optimizer) as scaled:
            with spoiling(self.lane, self.model.first.weight) if before_reduction else contextlib.nullcontext():
                scaled.backward()
            if spoil and not before_reduction:
                self.lane.overflow_(next(local(p.grad) for p in self.outer.parameters() if p.grad is not None))

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """A context in which the wrapper does not reduce gradients."""
        if self.wrapper == "fsdp2":
            self.outer.set_requires_gradient_sync(False)
            yield
            self.outer.set_requires_gradient_sync(True)
        else:
            with self.outer.no_sync():
                yield

    def weights(self) -> list[list[float]]:
        """The tensors that the optimizer steps, unsharded, in host memory."""
        if self.wrapper == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(self.outer, writeback=False):
                return [p.detach().flatten().tolist() for p in self.outer.parameters()]
        return [whole(p).tolist() for p in xamp.master_params(self.optimizer)]

    def gradients(self) -> list[list[float]]:
        """The unscaled gradients of the stepped tensors; empty if they are sharded."""
        if self.wrapper.startswith("fsdp"):
            return []
        return [p.grad.tolist() for p in xamp.master_params(self.optimizer) if p.grad is not None]

    def told(self) -> dict[str, Any]:
        """Outcome, scale, weights and parameters after the last step."""
        outcome: Any = xamp.session(self.optimizer).last_step
        scale = xamp.loss_scale(self.optimizer)
        follows = [whole(p).tolist() for p in self.model.parameters()] if self.wrapper != "fsdp1" else []
        return {"outcome": outcome.name, "scale": scale, "weights": self.weights(), "parameters": follows}


def wrap(lane: Lane, wrapper: str, model: nn.Module) -> nn.Module:
    """``model`` under a wrapper of torch: ``"ddp"``, ``"fsdp1"``, ``"fsdp2"``; ``"none"``: the model itself."""
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=lane.device)
    if wrapper == "fsdp2":
        fully_shard(model, mesh=init_device_mesh(lane.kind, (dist.get_world_size(),)))
    return model


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def whole(tensor: Any) -> torch.Tensor:
    """The whole tensor, on every rank."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


@contextlib.contextmanager
def spoiling(lane: Lane, param: torch.Tensor) -> Iterator[None]:
    """A context in which the device overflows in the gradient of ``param``, before a wrapper sees the gradient."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        spoilt = grad.clone()
        lane.overflow_(spoilt)
        return spoilt

    handle = param.register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def saturating(lane: Lane) -> Iterator[None]:
    """Make the lane's backend act like a chip that saturates: an overflow raises a flag and gives a large number."""
    backend: Any = lane.backend
    plain, up = backend.unscale_, [False]

    def lower(_: torch.device) -> None:
        up[0] = False

    def unscale_(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        plain(grads, found_inf, inv_scale)
        if up[0]:
            found_inf.fill_(1.0)

    def overflow_(grad: torch.Tensor) -> None:
        up[0] = True
        grad.fill_(1024.0)

    can = backend.capabilities(lane.device)
    backend.clear_overflow, backend.unscale_, backend.make_overflow_ = lower, unscale_, overflow_
    backend.capabilities = lambda _=None: dataclasses.replace(can, overflow="flag")
    try:
        yield
    finally:
        del backend.clear_overflow, backend.unscale_, backend.make_overflow_, backend.capabilities
