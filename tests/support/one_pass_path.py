"""``pytest --one-pass``: on a CPU everything steps in one pass where it can, as on a card, in Triton's interpreter.

xamp takes the pass only where ``fused="one-pass"`` asks for it. Here every other value but False takes it too, where it
can, and lists of ``xamp.apex`` on the host; so it is in the processes that tests start too: these find
``one_pass_site/sitecustomize.py`` on their path. Nothing is imported earlier than without it. What fails on this path
for a reason that is no defect stands in ``tests/ledger.toml``, with ``one-pass = true``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import on_import

if TYPE_CHECKING:  # a process that sitecustomize.py starts needs no pytest
    import pytest

__all__ = ["begin", "install", "steps", "use"]

_SITE = Path(__file__).with_name("one_pass_site")

steps: Counter[str] = Counter()
"""How many steps this process took in one pass: of torch's optimizers at O2 and O5, and of lists of tensors."""


def begin() -> None:
    """Put this process, and all that it starts, on the path. Triton must not have been imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    if str(_SITE) not in sys.path:  # a worker of xdist has it from the process that started it
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH", "")]))
        sys.path.insert(0, str(_SITE))
    install()


def install() -> None:
    """Put this process on the path; again it does nothing."""
    on_import.change(_CHANGES)


def use(patch: pytest.MonkeyPatch) -> None:
    """For one test: what ``initialize`` makes in this process is on the path. Fails where Triton does not interpret."""
    patch.setenv("TRITON_INTERPRET", "1")
    kernels = importlib.import_module("xamp.onepass.kernels")
    assert type(kernels.clip_factor).__name__ == "InterpretedFunction", "Triton was imported before, to compile"
    state = importlib.import_module("xamp.scaling.step").OptimizerState
    patch.setattr(state, "find_parameters", _taking(state.find_parameters))
    one_pass = importlib.import_module("xamp.scaling.one_pass").OnePass
    patch.setattr(one_pass, "wait", _outside_of_graphs(one_pass.wait))


def _take(module: ModuleType) -> None:
    """Of ``xamp.scaling.step``."""
    module.OptimizerState.find_parameters = _taking(module.OptimizerState.find_parameters)


def _taking(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``find_parameters``, after which steps are one pass where they can be."""

    def find_parameters(self: Any) -> None:
        if not self.fused.one_pass:
            self.gradients.one_pass = None  # nobody has asked for it, so that nobody is told of its end
        own(self)
        if not self.fused.one_pass and self.fused._choice is not False:
            self._use_one_pass()

    return find_parameters


def _leave_graphs(module: ModuleType) -> None:
    """Of ``xamp.scaling.one_pass``."""
    module.OnePass.wait = _outside_of_graphs(module.OnePass.wait)


def _outside_of_graphs(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``wait``, which takes in a graph only what was asked for: there it is bound to the step that follows."""

    def wait(self: Any, *args: Any) -> bool:
        if self._capturing() and not self._fused.one_pass:
            return False
        waits: bool = own(self, *args)
        return waits

    return wait


def _count(module: ModuleType) -> None:
    """Of ``xamp.plans.steps``."""
    own = module.OneStep.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps["optimizers"] += 1
        return own(self, *args, **kwargs)

    module.OneStep.__call__ = call


def _step_lists(module: ModuleType) -> None:
    """Of ``xamp.plans.lists``."""
    own = module.step

    def step(*args: Any, **kwargs: Any) -> bool:
        taken: bool = own(*args, **kwargs)
        steps["lists"] += taken
        return taken

    module.step = step  # type: ignore[attr-defined]
    module._on_host = True  # type: ignore[attr-defined]


_CHANGES: Mapping[str, Callable[[ModuleType], None]] = {
    "xamp.scaling.one_pass": _leave_graphs,
    "xamp.scaling.step": _take,
    "xamp.plans.steps": _count,
    "xamp.plans.lists": _step_lists,
}
