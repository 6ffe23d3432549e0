"""What computes in the place of a card: Triton's interpreter, or the reference in torch's operators.

Triton reads its variable when it is first imported, so the kernels are imported here. Without Triton these tests fail:
they are all there is on a machine without a card.
"""

from __future__ import annotations

import importlib

import onepass_reference
import pytest


def _load() -> str:
    """Import the kernels for the interpreter, and say what hinders that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            kernels = importlib.import_module("xamp.onepass.kernels")
        except ImportError as missing:
            return f"these tests need Triton (pip install 'xamp[test]'): {missing}"
    if type(kernels.clip_factor).__name__ != "InterpretedFunction":
        return "Triton was imported before TRITON_INTERPRET was set: run tests/unit/plans in a process of its own"
    return ""


_HINDERED = _load()


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run in Triton's interpreter."""
    if _HINDERED:
        pytest.fail(_HINDERED)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> type[onepass_reference.Plan]:
    """The reference is in the place of the kernels."""
    return onepass_reference.use(monkeypatch)
