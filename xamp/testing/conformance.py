"""The suite as one class."""

from __future__ import annotations

from xamp.testing.checkpoint import Checkpoint
from xamp.testing.compiled import Compiled
from xamp.testing.distributed import Distributed
from xamp.testing.fp8 import Fp8
from xamp.testing.grad_scaler import ByHand
from xamp.testing.levels import Levels
from xamp.testing.losses import Losses
from xamp.testing.numerics import Numerics
from xamp.testing.operators import Operators
from xamp.testing.optimizer_scripts import OptimizerScripts
from xamp.testing.optimizer_sparse import SparseGradients
from xamp.testing.optimizer_steps import OptimizerSteps
from xamp.testing.overhead import Overhead
from xamp.testing.probe import Probe
from xamp.testing.recurrent import RecurrentModels
from xamp.testing.regions import Regions
from xamp.testing.scales import Scales

__all__ = ["TIERS", "Conformance"]

TIERS: tuple[str, ...] = (
    "probe",
    "operators",
    "levels",
    "numerics",
    "fp8",
    "optimizers",
    "scaling",
    "checkpoint",
    "distributed",
    "compiled",
    "overhead",
)
"""The tiers in the order in which they run: a failure in an early one explains failures in later ones."""


class Conformance(  # pytest runs the last base's clauses first
    Overhead,
    Compiled,
    Distributed,
    Checkpoint,
    ByHand,
    Losses,
    Scales,
    SparseGradients,
    OptimizerScripts,
    OptimizerSteps,
    Fp8,
    RecurrentModels,
    Numerics,
    Regions,
    Levels,
    Operators,
    Probe,
):
    """What every backend must do.

    A third party's test file is this class with the backend's name::

        from xamp.testing import Conformance

        class TestMine(Conformance):
            backend = "mine"
    """
