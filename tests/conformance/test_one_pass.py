"""Some clauses of the suite with ``fused="one-pass"``, in Triton's interpreter.

Of their cases only those that can step in one pass: the others are as in ``test_conformance.py``.

Covers: xamp.plans.steps, xamp.scaling.one_pass.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest

import xamp
from xamp.registry.registry import HOST
from xamp.testing import Conformance

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
FORMS = ("SGD-auto", "SGD-momentum-nesterov-weight_decay-auto", "Adam-amsgrad-auto", "AdamW-auto", "AdamW-fused")
"""Of the forms that can step in one pass, some: ``unit/plans/test_one_pass.py`` has all."""
ONE_PASS: dict[str, Callable[[Any], bool]] = {
    "setting": lambda setting: setting.startswith(("O2", "O5")),
    "level": lambda level: level in ("O2", "O5"),
    "form": lambda form: str(form) in FORMS,
    "fused": lambda fused: fused is not False,
}
"""By an argument of clauses, whether a case with it can step in one pass."""


def _in_one_pass_only(clause: Any) -> Any:
    """Return a clause with the cases that :data:`ONE_PASS` leaves."""

    @functools.wraps(clause)
    def chosen(*args: Any, **kwargs: Any) -> None:
        clause(*args, **kwargs)

    vars(chosen)["pytestmark"] = [_thinned(mark) for mark in clause.pytestmark]
    return chosen


def _thinned(mark: pytest.Mark) -> pytest.Mark:
    if mark.name != "parametrize" or mark.args[0] not in ONE_PASS:
        return mark
    name, values = mark.args[0], [*mark.args[1]]
    kept = [number for number, value in enumerate(values) if ONE_PASS[name](value)]
    assert kept, f"no {name} of {values} can step in one pass"
    ids = mark.kwargs.get("ids")
    ids = [ids[number] for number in kept] if isinstance(ids, list) else ids
    return pytest.mark.parametrize(name, [values[number] for number in kept], ids=ids).mark


_clauses: dict[str, Any] = {
    name: _in_one_pass_only(getattr(Conformance, name)) if name in CHOSEN else None
    for name in dir(Conformance)
    if name.startswith("test_")
}
TestHost = type("TestHost", (Conformance,), {"backend": HOST, "__module__": __name__, **_clauses})


@pytest.fixture(autouse=True)
def _in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """``initialize`` asks for one pass, whatever else but False a clause asks for."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = importlib.import_module("xamp.onepass.kernels")
    assert type(kernels.clip_factor).__name__ == "InterpretedFunction", "Triton was imported before, to compile"
    own = xamp.initialize

    def initialize(*args: Any, **options: Any) -> Any:
        return own(*args, **{**options, "fused": options.get("fused") is not False and "one-pass"})

    monkeypatch.setattr(xamp, "initialize", initialize)


def test_the_suite_has_the_chosen_clauses() -> None:
    assert {name for name in CHOSEN if not hasattr(Conformance, name)} == set()
