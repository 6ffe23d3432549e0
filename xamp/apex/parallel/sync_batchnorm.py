"""``apex.parallel.SyncBatchNorm``: batch norm over the batches of all ranks, on any device, a CPU too.

torch's own SyncBatchNorm refuses CPU tensors. Here the sums are torch's plain operators, in fp32 (fp64 for fp64); where
torch has kernels for the device, and the call is one that they serve, they do the work.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xamp.torch_compat.torch_private.modules import BatchNorm, SyncBatchNormFunction

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch norm whose statistics are those of the batches of all ranks together, forward and backward.

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: of the running statistics; None: their plain average.
        affine: whether there are weights.
        track_running_stats: whether there are running statistics, which ``eval()`` then uses.
        process_group: the ranks that share statistics; None: all.
        channel_last: the channels are the last dimension of the inputs.
        fuse_relu: apply a ReLU to the result.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _specify_process_group(self, process_group: Any) -> None:
        self.process_group = process_group

    def _specify_channel_last(self, channel_last: bool) -> None:
        self.channel_last = channel_last

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised ``input``, plus ``z`` where it is given, through a ReLU where ``fuse_relu`` says so.

        Raises:
            ValueError: there is one value for each channel on all ranks together, and it is training.
        """
        self._check_input_dim(input)
        x = input.movedim(-1, 1) if self.channel_last and input.dim() > 2 else input
        batch = self.training or not self.track_running_stats or self.running_mean is None
        if batch:
            normed = self._over_all_ranks(x)
        else:
            normed = _own(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        if x is not input:
            normed = normed.movedim(1, -1)
        if z is not None:
            normed = normed + z
        return F.relu(normed) if self.fuse_relu else normed

    def _over_all_ranks(self, x: torch.Tensor) -> torch.Tensor:
        factor = 0.0
        tracks = self.training and self.track_running_stats
        if tracks and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        mean, var = (self.running_mean, self.running_var) if tracks else (None, None)
        group = self.process_group
        ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        if ranks == 1:
            if x.numel() == x.size(1):
                raise ValueError(f"Expected more than 1 value per channel when training, got input size{x.size()}")
            return _own(x, mean, var, self.weight, self.bias, True, factor, self.eps)
        group = dist.group.WORLD if group is None else group
        kind: Any = SyncBatchNormFunction if _has_kernels(x.device.type) else _Function
        normed: torch.Tensor = kind.apply(x, self.weight, self.bias, mean, var, self.eps, factor, group, ranks)
        return normed


@functools.cache
def _has_kernels(device_type: str) -> bool:
    """Return whether torch has the kernels of its own SyncBatchNorm for a type of device. Tried once."""
    try:
        torch.batch_norm_stats(torch.ones(2, 2, device=device_type), 1e-5)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _own(
    x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, training: bool, factor: float, eps: float
) -> torch.Tensor:
    """Return the batch norm of this rank alone, in the dtype of ``x``; in fp32 where the weights are of another."""
    others = [t.dtype for t in (mean, weight) if t is not None]
    wide = x if all(dtype == x.dtype for dtype in others) else _wide(x)
    return F.batch_norm(wide, mean, var, weight, bias, training, factor, eps).to(x.dtype)


def _channels(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of one number for each channel in a shape that broadcasts with ``like``."""
    return tensor.reshape(1, -1, *([1] * (like.dim() - 2)))


class _Function(torch.autograd.Function):
    """Batch norm over the batches of several ranks, which may differ in size; a rank may have an empty batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        factor: float,
        group: Any,
        ranks: int,
    ) -> torch.Tensor:
        wide = _wide(x)
        mean, var, count = _joined(wide, group, ranks)
        total = int(count)
        if total == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size{x.size()}")
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean), factor)
            running_var.lerp_((var * (total / (total - 1))).to(running_var), factor)
        scale = torch.rsqrt(var + eps)
        normed = (wide - _channels(mean, x)) * _channels(scale, x)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.group, ctx.total = group, total
        if weight is not None:
            normed = normed * _channels(weight.to(wide.dtype), x)
        if bias is not None:
            normed = normed + _channels(bias.to(wide.dtype), x)
        result: torch.Tensor = normed.to(x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        grad = _wide(grads[0])
        dims = [d for d in range(x.dim()) if d != 1]
        normed = (x.to(grad.dtype) - _channels(mean, x)) * _channels(scale, x)
        own_bias, own_weight = grad.sum(dims), (grad * normed).sum(dims)
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([own_bias, own_weight])
            dist.all_reduce(sums, group=ctx.group)
            shifts = sums / ctx.total
            of_input = grad - _channels(shifts[0], x) - normed * _channels(shifts[1], x)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            of_input = (of_input * _channels(factor, x)).to(x.dtype)
        of_weight = own_weight.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = own_bias.to(weight.dtype) if weight is not None and ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None, None, None, None, None


def _joined(x: torch.Tensor, group: Any, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, biased variance and count of values for each channel, over the batches of all ranks."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = x.numel() // x.size(1)
    mean = x.mean(dims) if count else x.new_zeros(x.size(1))
    var = x.var(dims, correction=0) if count else x.new_zeros(x.size(1))
    own = torch.cat([mean, var, x.new_full((1,), count)])
    each = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(each, own, group=group)
    stacked = torch.stack(each)
    size = x.size(1)
    means, variances, counts = stacked[:, :size], stacked[:, size : 2 * size], stacked[:, 2 * size :]
    total = counts.sum()
    joined = (means * counts).sum(0) / total
    spread = variances + (means - joined).square()
    return joined, (spread * counts).sum(0) / total, total
