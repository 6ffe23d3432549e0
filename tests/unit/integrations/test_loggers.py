"""``log_metrics`` on objects with the methods that loggers have.

Covers: xamp.integrations.loggers.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import PolicyError, StateError
from xamp.integrations.loggers import log_metrics

NUMBERS = {"loss_scale": 8.0, "grad_norm": float("nan"), "steps_skipped": 2}
WRITTEN = {"xamp/loss_scale": 8.0, "xamp/steps_skipped": 2}


class Scalars:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, Any]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: Any = None) -> None:
        self.found.append((tag, scalar_value, global_step))


class Wandb:
    def __init__(self) -> None:
        self.found: list[Any] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.found.append((data, step))


class Lightnings:
    def __init__(self) -> None:
        self.found: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.found.append((metrics, step))


class FabricLike(Wandb):
    def log(self, name: str, value: Any, step: int | None = None) -> None:  # type: ignore[override]
        raise AssertionError("log_dict takes dicts")

    def log_dict(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.found.append((metrics, step))


class HuggingFaceTrainer:
    """Its ``log_metrics`` prints a table, and its ``log`` takes no step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def log_metrics(self, split: str, metrics: dict[str, float]) -> None:
        raise AssertionError("it prints")

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        self.found.append((logs, None))


@pytest.mark.parametrize("kind", [Wandb, Lightnings, FabricLike, HuggingFaceTrainer])
def test_loggers_that_take_dicts(kind: Any) -> None:
    logger = kind()
    assert log_metrics(logger, NUMBERS, 3) == WRITTEN
    assert logger.found == [(WRITTEN, None if kind is HuggingFaceTrainer else 3)]


def test_without_a_step_none_is_given() -> None:
    logger = Wandb()
    log_metrics(logger, NUMBERS)
    assert logger.found == [(WRITTEN, None)]


def test_tensorboard() -> None:
    writer = Scalars()
    log_metrics(writer, NUMBERS, 3, prefix="run/")
    assert writer.found == [("run/loss_scale", 8.0, 3), ("run/steps_skipped", 2, 3)]


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mine"):
        log_metrics(logging.getLogger("mine"), NUMBERS, 3, prefix="")
        log_metrics(logging.LoggerAdapter(logging.getLogger("mine"), {}), NUMBERS)
    assert [r.getMessage() for r in caplog.records] == [
        "step 3: loss_scale=8 steps_skipped=2",
        "xamp/loss_scale=8 xamp/steps_skipped=2",
    ]


def test_a_function() -> None:
    found: list[Any] = []
    log_metrics(lambda numbers, step: found.append((numbers, step)), NUMBERS, 3)
    assert found == [(WRITTEN, 3)]


def test_what_is_logged_may_be_a_model_an_optimizer_a_session_or_a_scaler() -> None:
    model = nn.Linear(2, 1)
    model.metrics = lambda: {"accuracy": 0.5}  # type: ignore[assignment]  # a model's own
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", init_scale=4.0, verbosity=0)
    for found in (model, optimizer, xamp.session(model), xamp.GradScaler(init_scale=4.0)):
        assert log_metrics(Wandb(), found)["xamp/loss_scale"] == 4.0
    with pytest.raises(StateError, match=r"not given to xamp\.initialize"):
        log_metrics(Wandb(), nn.Linear(1, 1))


def test_no_logger() -> None:
    with pytest.raises(PolicyError, match=r"log_metrics\(dict\): it has none of the methods add_scalar"):
        log_metrics({}, NUMBERS)
    assert torch.is_grad_enabled()
