"""A mutant is a backend, or the engine under it, with one thing broken on purpose: a clause must fail on it."""

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
    """One broken thing.

    Attributes:
        name: What is broken, in words.
        clause: The clause that must fail on it, without parameters: ``"scaling.floor"``.
        breaks: Breaks it while the context is open.
        backend: Name of the backend that the suite runs on meanwhile.
        error: Where the clause ends in an error, and not in a check of its own: how that begins.
    """

    name: str
    clause: str
    breaks: Breaks = contextlib.nullcontext
    backend: str = "cpu"
    error: str = ""

    def __str__(self) -> str:
        return f"{self.clause}: {self.name}"


def patched(target: Any, name: str, new: Any) -> Breaks:
    """Breaks by putting ``new`` in the place of an attribute."""
    return lambda: mock.patch.object(target, name, new)


def also(*each: Breaks) -> Breaks:
    """Breaks several things at once."""

    @contextlib.contextmanager
    def breaks() -> Any:
        with contextlib.ExitStack() as stack:
            for one in each:
                stack.enter_context(one())
            yield

    return breaks


def registered(target: str, **fields: Any) -> Breaks:
    """Breaks by registering a backend ``mutant`` of the class ``"module:Class"``, on the CPU unless told otherwise.

    Its ``Mutant`` says ``backend="mutant"``. But for what is broken the class passes: it derives from one that does.
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
