"""The abacus, an accelerator that nobody owns, for xamp. Only its description is here, which needs no torch."""

from __future__ import annotations

from xamp.contract import BackendSpec

__all__ = ["SPEC"]

SPEC = BackendSpec(
    "abacus", ("abacus",), "xamp_abacus.backend:AbacusBackend", priority=60, ledger="xamp_abacus:ledger.json"
)
