"""Mutants. A mutant is a backend, or the engine below it, with one deliberate fault; a clause must fail on it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

from xamp.contract import BackendSpec
from xamp.registry import registry as backends

Breaks = Callable[[], "contextlib.AbstractContextManager[Any]"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One deliberate fault.

    Attributes:
        name: The fault, in words.
        clause: The clause that must fail on it, without parameters: ``"scaling.floor"``.
        breaks: Makes a context in which the fault is there.
        backend: Name of the backend that the suite runs on meanwhile.
        error: How the error begins, if the clause ends in an error and not in a failed check of its own.
    """

    name: str
    clause: str
    breaks: Breaks = contextlib.nullcontext
    backend: str = "cpu"
    error: str = ""

    def __str__(self) -> str:
        return f"{self.clause}: {self.name}"


def patched(target: Any, name: str, new: Any) -> Breaks:
    """A fault that replaces an attribute by ``new``."""
    return lambda: mock.patch.object(target, name, new)


def also(*each: Breaks) -> Breaks:
    """Several faults at once."""

    @contextlib.contextmanager
    def breaks() -> Any:
        with contextlib.ExitStack() as stack:
            for one in each:
                stack.enter_context(one())
            yield

    return breaks


def registered(target: str, **fields: Any) -> Breaks:
    """A fault that registers a backend ``mutant`` of the class ``"module:Class"``, on the CPU unless told otherwise.

    The ``Mutant`` then has ``backend="mutant"``. The class derives from one that passes, so only its fault fails.
    """

    @contextlib.contextmanager
    def breaks() -> Any:
        spec = BackendSpec(**{"name": "mutant", "device_types": ("cpu",), "target": target, "priority": -1, **fields})
        backends.register_backend(spec, override=True)
        try:
            yield
        finally:
            registry = backends.REGISTRY
            registry._specs.pop("mutant", None)
            registry._sources.pop("mutant", None)
            registry._outcomes.pop(spec, None)

    return breaks
