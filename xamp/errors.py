"""What xamp raises: one tree, so that one ``except xamp.XampError`` catches all of it.

::

    XampError
    ├── PolicyError (ValueError)        an argument, or a combination of arguments, that cannot be right
    │   └── UnsupportedPolicy           right in itself, but this device, backend or model cannot do it
    ├── BackendUnavailable (RuntimeError)   the backend asked for is unknown, or its probe failed
    ├── StateError (RuntimeError)       a call at the wrong moment, or on an object xamp does not manage
    ├── LossScaleCollapsed (RuntimeError)   the loss scale cannot fall any further and still overflows
    └── CheckpointError (ValueError)    a state that does not fit

Each message echoes the call, says the constraint, lists the choices and names the fix. A call that raises one of them
leaves its arguments as they were.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "LossScaleCollapsed",
    "PolicyError",
    "StateError",
    "UnsupportedPolicy",
    "XampError",
]


class XampError(Exception):
    """Root of every error that xamp raises on purpose."""


class PolicyError(XampError, ValueError):
    """An argument, or a combination of arguments, cannot be right anywhere."""


class UnsupportedPolicy(PolicyError):
    """The request is sound, but this device, backend or model cannot do it. The message lists what it can."""


class BackendUnavailable(XampError, RuntimeError):
    """The backend asked for is unknown or its probe failed. The message carries the probe's reason."""


class StateError(XampError, RuntimeError):
    """A call came at the wrong moment or on the wrong object. The message names the remedy."""


class LossScaleCollapsed(XampError, RuntimeError):
    """Gradients kept overflowing although the loss scale could not fall any further."""


class CheckpointError(XampError, ValueError):
    """A saved state does not fit what it is loaded into. The message names the key."""
