"""The conformance suite: tests that define what a level means, and that every backend must pass.

It needs pytest: ``xamp[conformance]``. A third party's test file is a class with the backend's name, run by pytest::

    from xamp.testing import Conformance

    class TestMine(Conformance):
        backend = "mine"

``xamp conformance`` runs the same tests on every device of the machine. See docs/backends.md.

Modules: the conformance suite: ``conformance`` is the class of all tiers, ``lane`` a device on trial, ``ledger`` its
known gaps; ``run`` starts pytest on ``suite``, ``jobs`` several ``workers``; each tier is one to three modules.
``facts`` records what a device lacks, by ``fact_calls``.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xamp.testing.conformance import TIERS, Conformance
    from xamp.testing.lane import CAPABILITIES, Lane, usable_lanes

__all__ = ["CAPABILITIES", "TIERS", "Conformance", "Lane", "usable_lanes"]

_HOMES = {"TIERS": "conformance", "Conformance": "conformance"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import pytest
    except ImportError as error:
        raise ImportError(
            "xamp.testing needs pytest, which is not installed: pip install 'xamp[conformance]'"
        ) from error
    modules = {f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)}
    pytest.register_assert_rewrite(*(modules - set(sys.modules)))  # pytest then explains the asserts in them
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'lane')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
