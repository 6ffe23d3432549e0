"""Precision plugins for Lightning's ``Trainer`` and for Fabric, on xamp's engine.

::

    from xamp.integrations.lightning import TrainerPrecision

    trainer = Trainer(plugins=[TrainerPrecision("O1")])

Packages ``lightning`` and ``pytorch_lightning`` with ``lightning_fabric`` are served: the one that is imported already,
else the one that is installed. They are imported when a plugin class is first asked for.

``TrainerPrecision(level, **settings)`` takes the arguments of ``xamp.initialize``. At O0, O1 and O4 the LightningModule
is the model, and its steps (``training_step`` and the others) run under the policy. At O2, O3 and O5 its child modules
are the models, so that losses in ``training_step`` and metrics stay fp32. Clipping, gradient accumulation, automatic
and manual optimization, toggled optimizers and checkpoints work as with Lightning's own plugins; a step that
overflowed is skipped. Hooks see gradients unscaled; at O2 and O5 these are in ``xamp.master_params(optimizer)``. When
``fit`` ends, the model is plain fp32 again.

What it cannot do: FSDP, DeepSpeed, XLA and other strategies that insist on a precision plugin of their own; an
optimizer that needs a closure (LBFGS) at levels with a loss scale or masters; a loss that is no single number.

``FabricPrecision(level, **settings)`` works with ``fabric.setup`` at O0, O1, O3 and O4. At O2 and O5 the optimizer must
be known before: ``plugin.setup(fabric, model, optimizer)`` does both. What it cannot do: the above; save its own state
with ``fabric.save``, unless it is put into the dict (``{"model": model, "xamp": plugin}``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from xamp.integrations._lightning_fabric import FabricRules
from xamp.integrations._lightning_trainer import TrainerRules

if TYPE_CHECKING:
    FabricPrecision: Any
    TrainerPrecision: Any

__all__ = ["FabricPrecision", "TrainerPrecision"]

_PACKAGES = {
    "TrainerPrecision": ("lightning.pytorch", "pytorch_lightning"),
    "FabricPrecision": ("lightning.fabric", "lightning_fabric"),
}

_RULES = {"TrainerPrecision": TrainerRules, "FabricPrecision": FabricRules}


@functools.cache
def _make(name: str, package: str) -> type:
    """Make the plugin class ``name`` on the ``Precision`` of ``package``."""
    base = importlib.import_module(f"{package}.plugins.precision").Precision
    rules = _RULES[name]
    return type(name, (rules, base), {"__doc__": rules.__doc__, "__module__": __name__, "__qualname__": name})


def _package(name: str) -> str:
    candidates = _PACKAGES[name]
    for package in candidates:
        if package in sys.modules:
            return package
    for package in candidates:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ModuleNotFoundError(
        f"xamp.integrations.lightning.{name} needs {candidates[0].partition('.')[0]}: pip install lightning"
    )


def __getattr__(name: str) -> Any:
    if name not in _RULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _make(name, _package(name))
