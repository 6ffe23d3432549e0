"""Modules of ``torch_npu.contrib.module``, written with torch's own operators: the same interface, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from xamp import accel
from xamp.registry.device_in_use import device

__all__ = [
    "OPERATORS",
    "BiLSTM",
    "ChannelShuffle",
    "DropoutWithByteMask",
    "FastBatchNorm1d",
    "FastBatchNorm2d",
    "FastBatchNorm3d",
    "FastSyncBatchNorm",
    "Focus",
    "LabelSmoothingCrossEntropy",
    "Mish",
    "NpuCachedDropout",
    "NpuDropPath",
    "NpuFairseqDropout",
    "NpuPreGenDropout",
    "Prefetcher",
    "SiLU",
    "Swish",
]

OPERATORS = (
    *("npu_dtype_cast", "npu_format_cast", "npu_one_hot", "npu_softmax_cross_entropy_with_logits", "npu_transpose"),
)
"""Operators of the card that scripts call in their losses; older scripts find them in torch itself."""

Mish, SiLU, Swish = nn.Mish, nn.SiLU, nn.SiLU
FastBatchNorm1d, FastBatchNorm2d, FastBatchNorm3d = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
FastSyncBatchNorm = nn.SyncBatchNorm


def npu_one_hot(
    input: torch.Tensor,
    num_classes: int = -1,  # noqa: ARG001
    depth: int = 1,
    on_value: float = 1.0,
    off_value: float = 0.0,
) -> torch.Tensor:
    """Rows of ``off_value`` with one ``on_value``: indices [N] -> fp32 [N, depth]."""
    made = torch.full((*input.shape, depth), float(off_value), device=input.device)
    return made.scatter_(-1, input.long().unsqueeze(-1), float(on_value))


def npu_softmax_cross_entropy_with_logits(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of logits [N, C] and probabilities [N, C], for each row: [N], in the dtype of the logits."""
    return -(functional.log_softmax(features.float(), -1) * labels.float()).sum(-1).to(features.dtype)


def npu_format_cast(input: torch.Tensor, *_: Any) -> torch.Tensor:
    """The tensor itself: formats of memory are the card's."""
    return input


def npu_dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype."""
    return input.to(dtype)


def npu_transpose(input: torch.Tensor, perm: Any, require_contiguous: bool = True) -> torch.Tensor:
    """The tensor with its dimensions in another order."""
    permuted = input.permute(*perm)
    return permuted.contiguous() if require_contiguous else permuted


class DropoutWithByteMask(nn.Dropout):
    """Dropout; the card draws its mask in bytes."""

    def __init__(self, p: float = 0.5, inplace: bool = False, max_seed: int = 2**10 - 1) -> None:
        super().__init__(p, inplace)
        self.max_seed = max_seed


class NpuPreGenDropout(nn.Dropout):
    """Dropout; the card draws the masks of several layers at once."""

    def __init__(self, p: float, module_name: str | None = None) -> None:
        super().__init__(p)
        self.module_name = module_name

    @classmethod
    def enable_dropout_ensemble(cls, model: nn.Module) -> None:
        """Do nothing: each layer draws its own mask here."""


class NpuCachedDropout(NpuPreGenDropout):
    """Dropout; the card draws masks one step ahead."""


NpuFairseqDropout = NpuCachedDropout


class NpuDropPath(nn.Module):
    """Stochastic depth: drops whole samples [N, ...], and scales the others by 1 / (1 - drop_prob)."""

    def __init__(self, drop_prob: float | None = None) -> None:
        super().__init__()
        self.drop_prob = drop_prob or 0.0
        self.keep_prob = 1.0 - self.drop_prob

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop samples in training."""
        if not self.training or self.drop_prob == 0.0:
            return x
        kept = torch.rand(x.size(0), *[1] * (x.dim() - 1), device=x.device) < self.keep_prob
        return x * kept.to(x.dtype) / self.keep_prob

    @classmethod
    def enable_droppath_ensemble(cls, model: nn.Module) -> None:
        """Do nothing: each layer draws its own numbers here."""


class LabelSmoothingCrossEntropy(nn.Module):
    """Cross entropy of class indices, with ``smooth_factor`` spread over the other classes."""

    def __init__(self, num_classes: int = 1000, smooth_factor: float = 0.0) -> None:
        super().__init__()
        self.on_value = 1.0 - smooth_factor
        self.off_value = smooth_factor / (num_classes - 1)

    def forward(self, pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean over the batch, in fp32; ``pred`` [N, C], ``target`` [N]."""
        logs = functional.log_softmax(pred.float(), 1)
        wanted = torch.full_like(logs, self.off_value).scatter_(1, target.long().view(-1, 1), self.on_value)
        return -(wanted * logs).sum(1).mean()


class ChannelShuffle(nn.Module):
    """Joins two tensors [N, C, ...] along the channels, shuffles these; ``split_shuffle`` returns two halves."""

    def __init__(self, in_channels: int, groups: int = 2, split_shuffle: bool = True) -> None:
        super().__init__()
        self.in_channels, self.groups, self.split_shuffle = in_channels, groups, split_shuffle

    def forward(self, x1: torch.Tensor, x2: torch.Tensor) -> Any:
        """The shuffled tensor, or its halves."""
        joined = torch.cat([x1, x2], 1)
        shape = joined.shape
        grouped = joined.reshape(shape[0], self.groups, shape[1] // self.groups, *shape[2:])
        mixed = grouped.transpose(1, 2).reshape(shape)
        return mixed.chunk(2, 1) if self.split_shuffle else mixed


class _Conv(nn.Module):
    def __init__(self, c1: int, c2: int, k: int, s: int, p: int | None, g: int, act: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2 if p is None else p, groups=g, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act: nn.Module = nn.LeakyReLU(0.1, inplace=True) if act else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(self.bn(self.conv(x)))
        return result


class Focus(nn.Module):
    """YOLO's first layer: four interleaved quarters of an image [N, C, H, W] as channels, then a convolution."""

    def __init__(
        self, c1: int, c2: int, k: int = 1, s: int = 1, p: int | None = None, g: int = 1, act: bool = True
    ) -> None:
        super().__init__()
        self.conv = _Conv(c1 * 4, c2, k, s, p, g, act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution of the quarters."""
        quarters = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        result: torch.Tensor = self.conv(torch.cat(quarters, 1))
        return result


class BiLSTM(nn.Module):
    """A bidirectional LSTM made of two; ``inputs`` [length, N, input_size] -> [length, N, 2 * hidden_size]."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.fw_rnn = nn.LSTM(input_size, hidden_size)
        self.bw_rnn = nn.LSTM(input_size, hidden_size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs of both directions, side by side."""
        ahead, _ = self.fw_rnn(inputs)
        back, _ = self.bw_rnn(inputs.flip(0))
        return torch.cat([ahead, back.flip(0)], 2)


class Prefetcher:
    """Moves the next batch of ``loader`` to the device while the current one is in use."""

    def __init__(self, loader: Iterable[Any], stream: Any = None) -> None:
        self.loader = iter(loader)
        self.stream = accel.Stream() if stream is None else stream
        self.next_input: Any = None
        self.next_target: Any = None
        self.preload()

    def preload(self) -> None:
        """Get the next batch; ``(None, None)`` after the last."""
        self.next_input, self.next_target = next(self.loader, (None, None))
        if self.next_input is None:
            return
        with accel.stream(self.stream):
            self.next_input = self.next_input.to(device(), non_blocking=True)
            self.next_target = self.next_target.to(device(), non_blocking=True)

    def next(self) -> tuple[Any, Any]:
        """Return the next batch, and start to get the one after it."""
        accel.current_stream().wait_stream(self.stream)
        batch = self.next_input, self.next_target
        if batch[1] is not None:
            self.preload()
        return batch
