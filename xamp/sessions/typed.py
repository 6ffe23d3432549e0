"""Types of what users pass to the public calls and get back, for mypy, pyright and editors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from xamp.scaling.counts import StepOutcome

__all__ = [
    "LastStep",
    "LevelName",
    "Models",
    "OneModel",
    "OneOptimizer",
    "Optimizers",
    "SavedOptimizer",
    "SavedScaler",
    "SessionState",
    "Settings",
]

OneModel = TypeVar("OneModel", bound=nn.Module)
OneOptimizer = TypeVar("OneOptimizer", bound=Optimizer)
Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])

LevelName: TypeAlias = Literal["auto", "O0", "O1", "O2", "O3", "O4", "O5", "fp32", "amp-fp16", "fp16", "amp-bf16"]
"""The levels and their aliases. Arguments take any ``str`` too, such as a setting that was read from a file."""

LastStep: TypeAlias = StepOutcome | dict[Optimizer, StepOutcome | None] | None
"""The outcome of one optimizer's last step, None before the first; for several optimizers a dict of these."""


class Settings(TypedDict, total=False):
    """The arguments of ``initialize`` that are given by name; their defaults stand there."""

    backend: str
    loss_scale: Literal["dynamic"] | float | str | None
    dtype: torch.dtype | str | None
    keep_batchnorm_fp32: bool | str | None
    keep_fp32: Iterable[type | str]
    master_weights: bool | str | None
    cast_model_inputs: bool | str | type | Iterable[type | str]
    cast_model_outputs: torch.dtype | str | bool | None
    methods: Sequence[str]
    num_losses: int
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_loss_scale: float | None
    max_loss_scale: float | None
    on_static_overflow: Literal["skip", "step"] | str | None
    op_policy: Literal["portable", "native", "apex"] | str
    fused: Literal["auto"] | bool | str
    process_group: Any
    delegate: bool | str
    enabled: bool | str
    verbosity: int | str
    opt_level: LevelName | str | None


class SavedScaler(TypedDict):
    """One loss scale in a :class:`SessionState`."""

    dynamic: bool | None
    scale: float
    growth_tracker: int


class SavedOptimizer(TypedDict):
    """What a :class:`SessionState` holds of one optimizer."""

    overflow_run: int
    masters: dict[str, torch.Tensor]


class SessionState(TypedDict):
    """What ``xamp.state_dict`` returns in xamp's own format."""

    format: str
    schema: int
    level: str
    dtype: str
    steps: dict[str, int]
    scalers: list[SavedScaler]
    optimizers: list[SavedOptimizer]
    masters: list[dict[str, torch.Tensor]]
