"""Models that tests of the core share, importable by name, so that they pickle; and checks on their outputs."""

from __future__ import annotations

import abc
import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lanes import Lane
from torch import nn

import xamp
from xamp import policy
from xamp.registry.registry import HOST

LEVELS = tuple(policy.LEVELS)
INSIDE = {name: getattr(torch, row.dtype or "float32") for name, row in policy.LEVELS.items()}


class Net(nn.Module):
    """Two linear layers around a batch norm. Returns the result and, as fp64, the first layer's output.

    xamp casts no fp64 tensor, so the second result shows after the fact in which dtype the first layer ran.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, *, gain: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.inner(x)
        out: torch.Tensor = self.head(self.norm(hidden)) * gain
        return out, hidden.double()

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.double()


class Recorder(nn.Module):
    """Runs a module and records the dtypes of inputs and outputs, and whether autocast was on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.into: list[torch.dtype] = []
        self.out_of: list[torch.dtype] = []
        self.autocast: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.into.append(x.dtype)
        self.autocast.append(torch.is_autocast_enabled(x.device.type))
        out: torch.Tensor = self.module(x)
        self.out_of.append(out.dtype)
        return out


class Registered(nn.Module):
    """A class whose subclasses must pass a keyword argument."""

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tag = tag

    tag: str


class WithInitSubclass(Registered, tag="one"):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.double()


class Meta(abc.ABCMeta):
    """A user's metaclass."""


class WithMetaclass(nn.Module, metaclass=Meta):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.double()


class WithSlots(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.double() * self.factor


class WithReduce(nn.Module):
    """Pickles by calling its class again, as Python's manual shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made.double()

    def __reduce__(self) -> Any:
        return type(self), (self.inner.out_features,), self.__dict__.copy()


class WithDeepcopy(WithMetaclass):
    def __deepcopy__(self, memo: dict[int, Any]) -> WithDeepcopy:
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        for name, value in self.__dict__.items():
            made.__dict__[name] = copy.deepcopy(value, memo)
        return made


class WithDeepcopyByName(WithMetaclass):
    """Names its class when it copies itself, so the copy does not have the class that xamp gave the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WithDeepcopyByName:
        made = WithDeepcopyByName().to(self.inner.weight.device)
        made.load_state_dict(self.state_dict())
        for mine, other in zip(made.parameters(), self.parameters(), strict=True):
            mine.data = mine.data.to(other.dtype)
        return made


SPECIAL: list[Callable[[], nn.Module]] = [
    WithInitSubclass,
    WithMetaclass,
    lambda: WithReduce(8),
    WithDeepcopy,
    WithDeepcopyByName,
]
SPECIAL_IDS = ["init_subclass", "metaclass", "reduce", "deepcopy", "deepcopy_by_name"]


def net(lane: Lane) -> Net:
    """A fresh :class:`Net`, the same each time, in training mode."""
    torch.manual_seed(1)
    return Net().to(lane.device)


def batch(lane: Lane, rows: int = 16) -> torch.Tensor:
    """An input for :class:`Net`, the same each time."""
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(2)).to(lane.device)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def start(model: Any, level: str, lane: Lane, **options: Any) -> Any:
    """``xamp.initialize`` for inference, without logs; skips if the device lacks the level."""
    if level not in lane.can.levels:
        pytest.skip(f"{lane} cannot run {level}")
    return xamp.initialize(model, level=level, verbosity=0, **options)


def data_parallel(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], nn.DataParallel[Any]]:
    """What makes a ``DataParallel`` on the lane's first device; skips where torch's own does not run.

    By itself torch takes the accelerators of the machine, also for a model that is on the CPU.
    """
    if lane.kind == HOST:
        module = importlib.import_module("torch.nn.parallel.data_parallel")  # its name is a function's, too
        monkeypatch.setattr(module, "_get_available_device_type", lambda: None)
        return nn.DataParallel
    make = functools.partial(nn.DataParallel, device_ids=[0])
    try:
        make(nn.Linear(2, 1).to(lane.device))(torch.ones(1, 2, device=lane.device))
    except (RuntimeError, AttributeError) as error:  # a torch that is built without CUDA lacks what it calls
        pytest.skip(f"{lane}: torch's own DataParallel does not run there: {error}")
    return make


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int = 1) -> None:
    """Take steps as in the README."""
    for _ in range(steps):
        optimizer.zero_grad()
        result = model(x)
        loss = (result[0] if isinstance(result, tuple) else result).float().square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def ran_in(values: torch.Tensor) -> torch.dtype:
    """The narrowest dtype that can hold ``values``, fp64: with enough values, the dtype that an operator ran in."""
    values = values.cpu()  # a CPU has all dtypes
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.equal(values.to(dtype).double(), values):
            return dtype
    return torch.float64
