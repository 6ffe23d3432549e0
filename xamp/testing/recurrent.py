"""Tier numerics: recurrent models train in the level's dtype, as near fp64 as under torch's autocast on a CPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import xamp
from xamp.policy import LEVELS
from xamp.testing.lane import Lane
from xamp.testing.tier import Tier, at_levels
from xamp.torch_compat.torch_private.modes import TorchDispatchMode, tree_iter

__all__ = ["RecurrentModels"]

STEPS = 50
SEEDS = range(4)
MORE_SEEDS = range(SEEDS.stop, 24)
"""Seeds added if the bound is exceeded: of packed sequences, 4 seeds give 0.7 to 2.8 of the error by hand, 24 1.2."""
AGAINST_HAND = 2.0
"""Bound on an error over that of torch's bf16 autocast on the CPU, over all seeds."""
SMALL = 2.0**-20
"""A factor on the loss, for which Adam does not care. In fp16 most gradients become zero, in bf16 no bit changes."""

Found = dict[str, torch.Tensor]
"""Outputs, gradients and weights after training, each one vector in fp64 on the CPU."""


class Stacked(nn.Module):
    """Two layers of LSTM, with the hidden state given. (N, time, 4) -> (N, time, 1)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        start = x.new_zeros(2, len(x), self.lstm.hidden_size)
        return self.head(self.lstm(x, (start, start))[0])  # type: ignore[no-any-return]


class Packed(nn.Module):
    """A GRU on packed sequences, of 1 to ``time`` steps in turn. (N, time, 4) -> (N, time, 1)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gru = nn.GRU(4, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        lengths = torch.arange(len(x)).remainder(x.size(1)).add(1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.size(1))
        return self.head(made)  # type: ignore[no-any-return]


each_model = pytest.mark.parametrize("kind", [Stacked, Packed], ids=lambda kind: kind.__name__.lower())
each_policy = pytest.mark.parametrize("op_policy", ["portable", "native"])
in_bf16 = at_levels(lambda row: row.casts_operators and row.dtype == "bfloat16")


class RecurrentModels(Tier):
    """Recurrent models at the levels that cast operators to bf16."""

    tier = "numerics"

    @each_policy
    @each_model
    @in_bf16
    def test_recurrent_training(self, lane: Lane, level: str, kind: Any, op_policy: str) -> None:
        """After 50 steps outputs, gradients and weights are no further from fp64 than twice torch's bf16 on the CPU."""
        _need(lane, kind, level, op_policy)
        errors: dict[str, list[float]] = {}
        for seeds in (SEEDS, MORE_SEEDS):
            for seed in seeds:
                exact, hand = _exact(kind, seed), _by_hand(kind, seed)
                found = _train(kind, seed, lane.device, level=level, op_policy=op_policy)
                for name, wanted in exact.items():
                    sums = errors.setdefault(name, [0.0, 0.0])
                    for place, other in enumerate((found[name], hand[name])):
                        sums[place] += (other - wanted).square().sum().item()
            worse = {name: (a**0.5, b**0.5) for name, (a, b) in errors.items() if not a**0.5 <= AGAINST_HAND * b**0.5}
            if not worse:
                break
        assert worse == {}, "by name: error, error by hand"

    @each_policy
    @each_model
    @in_bf16
    def test_recurrent_dtypes(self, lane: Lane, level: str, kind: Any, op_policy: str) -> None:
        """Forward, backward and step of a recurrent model meet no tensor of another lower dtype than the level's."""
        _need(lane, kind, level, op_policy)
        seen = _Dtypes()
        _train(kind, 0, lane.device, watch=seen, steps=2, level=level, op_policy=op_policy)
        lower = {torch.float16, torch.bfloat16} & seen.dtypes
        assert lower == {getattr(torch, str(LEVELS[level].dtype))}


class _Dtypes(TorchDispatchMode):
    """Records the dtypes of all tensors that operators are given or return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.dtypes.update(t.dtype for t in tree_iter((args, kwargs, made)) if isinstance(t, torch.Tensor))
        return made


def _need(lane: Lane, kind: Any, level: str, op_policy: str) -> None:
    """Leave out what the device's own list does not train under torch's autocast either: nothing is comparable."""
    lane.need(level, op_policy)
    device = lane.device.type
    if op_policy == "native" and not _trains(kind, device):
        lane.lacks(f"{kind.__name__} in bfloat16 under torch.autocast, which plain torch cannot train on {device}")


@functools.cache
def _trains(kind: Any, device: str) -> bool:
    """Whether torch's own autocast to bf16 trains a model on a device."""
    try:
        _train(kind, 0, torch.device(device), run_by=torch.autocast(device, dtype=torch.bfloat16), steps=1)
    except RuntimeError:
        return False
    return True


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Series of four channels; the target is half the running sum of the first channel."""
    x = torch.randn(16, 6, 4, generator=torch.Generator().manual_seed(step))
    return x, x[..., :1].cumsum(1) / 2


def _train(
    kind: Any,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    run_by: Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]] = lambda model: model,
    watch: contextlib.AbstractContextManager[object] | None = None,
    steps: int = STEPS,
    **options: Any,
) -> Found:
    """Train a model, and compute outputs and gradients once more with the weights that it has then.

    Args:
        kind: the model's class.
        seed: of its weights.
        device: where.
        dtype: that of the weights and the data.
        run_by: from the model to what is called in its place.
        watch: a context around the training; it is entered once.
        steps: how many.
        **options: for ``initialize``; without any the loop is plain torch.
    """
    torch.manual_seed(seed)
    model = kind().to(device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-20)
    if options:
        xamp.initialize(model, optimizer, verbosity=0, **options)
    run = run_by(model)
    with watch or contextlib.nullcontext():
        for step in range(steps + 1):
            x, y = (each.to(device, dtype) for each in _batch(step))
            optimizer.zero_grad()
            made = run(x).to(dtype)
            with _loss(F.mse_loss(made, y) * SMALL, optimizer, managed=bool(options)) as loss:
                loss.backward()
            if step < steps:
                optimizer.step()
    params = list(model.parameters())
    return {
        "outputs": _numbers([made]),
        "gradients": _numbers([p.grad for p in params if p.grad is not None]),
        "weights": _numbers(params),
    }


def _loss(loss: torch.Tensor, optimizer: torch.optim.Optimizer, managed: bool) -> Any:
    return xamp.scale_loss(loss, optimizer) if managed else contextlib.nullcontext(loss)


def _numbers(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().cpu().double().flatten() for tensor in tensors])


@functools.cache
def _exact(kind: Any, seed: int) -> Found:
    """In fp64, on the CPU."""
    return _train(kind, seed, torch.device("cpu"), torch.float64)


@functools.cache
def _by_hand(kind: Any, seed: int) -> Found:
    """Under torch's own autocast to bf16, on the CPU; without oneDNN where that has no such layer for the processor."""
    with _without_onednn() if not _trains(kind, "cpu") else contextlib.nullcontext():
        return _train(kind, seed, torch.device("cpu"), run_by=torch.autocast("cpu", dtype=torch.bfloat16))


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
