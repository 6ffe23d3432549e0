"""What computes in the place of a card: Triton's interpreter, or the reference in torch's operators.

Triton reads its variable when it is first imported, so the kernels are imported here. Without Triton these tests fail:
they are all there is on a machine without a card.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import onepass_reference
import pytest

from xamp.plans import available


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


class _Refused:
    """In the place of a kernel that the compiler refuses."""

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError("the compiler has no fp64")


@pytest.fixture
def no_tables(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels over tables of addresses do not compile: there is the form with a launch for each tensor."""
    kernels = importlib.import_module("xamp.onepass.kernels")
    for name in ("step", "factors", "sums", "total", "clip_factor"):
        monkeypatch.setattr(kernels, name, _Refused())
    available._tried.cache_clear()
    yield
    available._tried.cache_clear()


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> type[onepass_reference.Plan]:
    """The reference is in the place of the kernels."""
    return onepass_reference.use(monkeypatch)
