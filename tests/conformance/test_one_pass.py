"""Some clauses of the suite with steps in one pass, in Triton's interpreter: a sample of ``pytest --one-pass``."""

from __future__ import annotations

import one_pass_path
import pytest
import torch
from torch import nn

import xamp
from xamp.registry.registry import HOST
from xamp.testing import Conformance
from xamp.testing.exact import closeness

CHOSEN = {
    "test_update_equals_plain",
    "test_skipped_step_changes_nothing",
    "test_overflow_in_a_micro_batch",
    "test_two_optimizers_joint_loss_and_clip",
    "test_group_added_in_the_middle",
    "test_zero_grad",
    "test_close_gives_back_fp32",
    "test_model_state_is_exact",
}
_others = {name: None for name in dir(Conformance) if name.startswith("test_") and name not in CHOSEN}
TestHost = type("TestHost", (Conformance,), {"backend": HOST, "__module__": __name__, **_others})


@pytest.fixture(autouse=True)
def _in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass_path.use(monkeypatch)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_by_default_a_step_is_one_pass_here(level: str) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    xamp.initialize(model, optimizer, level, verbosity=0)
    assert closeness(optimizer) > 0


def test_the_suite_has_the_chosen_clauses() -> None:
    assert {name for name in CHOSEN if not hasattr(Conformance, name)} == set()
