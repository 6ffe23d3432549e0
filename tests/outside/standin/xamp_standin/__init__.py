"""A stand-in for a device that is not here, for xamp. Only its description is here, which needs no torch."""

from __future__ import annotations

from xamp.contract import BackendSpec

__all__ = ["SPEC"]

SPEC = BackendSpec(
    "standin", ("standin",), "xamp_standin.backend:StandinBackend", priority=70, ledger="xamp_standin:ledger.json"
)
