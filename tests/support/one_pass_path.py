"""``pytest --one-pass``: on a CPU everything steps in one pass where it can, as on a card, in Triton's interpreter.

xamp leaves the host to torch's kernels unless ``fused="one-pass"`` insists. Here the default means on the host what it
means on a card, for xamp's optimizers and those of ``xamp.apex``, and in the processes that tests start too: these find
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
    step = importlib.import_module("xamp.scaling.step")
    patch.setattr(step, "refusal", _chosen(step.refusal))


def _choose(module: ModuleType) -> None:
    """Of ``xamp.scaling.one_pass``."""
    module.refusal = _chosen(module.refusal)  # type: ignore[attr-defined]
    if (step := sys.modules.get("xamp.scaling.step")) is not None:
        step.refusal = module.refusal  # type: ignore[attr-defined]


def _chosen(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``refusal`` as it is where what may be chosen is chosen on the host too."""

    def refusal(optimizer: Any, fused: Any, gradients: Any, device: Any) -> Any:
        given = fused.one_pass
        fused.one_pass = "one-pass"  # this function is asked where it is not False
        try:
            return own(optimizer, fused, gradients, device)
        finally:
            fused.one_pass = given

    return refusal


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
    "xamp.scaling.one_pass": _choose,
    "xamp.plans.steps": _count,
    "xamp.plans.lists": _step_lists,
}
