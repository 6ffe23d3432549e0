"""docs/libraries.md: the blocks that need no library run as they stand there.

Covers: docs/libraries.md.
"""

from __future__ import annotations

import logging
from typing import Any

import docs_blocks
import pytest
import torch
from torch import nn
from torch.optim import SGD

import xamp


@pytest.fixture
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer: Any = SGD(model.parameters(), lr=0.5)
    xamp.initialize(model, optimizer, "O2", verbosity=0, init_scale=64.0)
    loader = [(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))] * 3
    return {"xamp": xamp, "model": model, "optimizer": optimizer, "loader": loader, "criterion": nn.CrossEntropyLoss()}


def test_averages(names: dict[str, Any]) -> None:
    seen: list[torch.Tensor] = []
    model = names["model"]
    docs_blocks.run(
        "libraries.md",
        {**names, "validate": lambda m: seen.append(m.state_dict()["bias"].clone())},
        "average.swapped()",
    )
    assert xamp.session(model).stats.applied == 3
    assert len(seen) == 1
    assert not torch.equal(seen[0], model.state_dict()["bias"])


def test_loggers(names: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="training"):
        docs_blocks.run("libraries.md", {**names, "step": 7}, "log_metrics(")
    (record,) = caplog.records
    assert record.getMessage().startswith("step 7: xamp/loss_scale=64 xamp/steps_applied=0")


def test_the_table_names_all_numbers(names: dict[str, Any]) -> None:
    text = (docs_blocks.DOCS / "libraries.md").read_text(encoding="utf-8").partition("## Loggers")[2]
    assert all(f"`{name}`" in text for name in xamp.session(names["model"]).metrics())


def test_every_block_is_run_by_a_test() -> None:
    tests = (docs_blocks.DOCS.parent / "tests" / "libraries" / "test_integrations_page.py").read_text(encoding="utf-8")
    words = [
        *("model.generate(", "TrainingArguments(", "accelerator.accumulate", "fabric.backward", "TrainerPrecision("),
        *("create_optimizer_v2", "add_noise", "LoraConfig(", "edge_index", "import Lion"),
    ]
    assert all(f'run("{word}"' in tests for word in words)
    words += ["average.swapped()", "log_metrics("]
    blocks = docs_blocks.blocks("libraries.md")
    assert [[word for word in words if word in block] for block in blocks] == [[word] for word in words]
