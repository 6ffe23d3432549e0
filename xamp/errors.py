"""The errors that xamp raises. They form one tree, so that ``except xamp.XampError`` catches all of them.

::

    XampError
    ├── PolicyError (ValueError)        an argument, or a combination of arguments, cannot be right
    │   └── UnsupportedPolicy           it is right in itself, but this device, backend or model cannot do it
    ├── BackendUnavailable (RuntimeError)   the requested backend is unknown, or its probe failed
    ├── StateError (RuntimeError)       a call came at the wrong moment, or for an object that xamp does not manage
    ├── LossScaleCollapsed (RuntimeError)   gradients still overflow, and the loss scale cannot fall any further
    └── CheckpointError (ValueError)    a saved state does not fit

Each message repeats the call, says the constraint, lists the choices and names the fix. A call that raises one of these
errors leaves its arguments as they were.
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
    """An argument, or a combination of arguments, cannot be right on any device."""


class UnsupportedPolicy(PolicyError):
    """The request is right in itself, but this device, backend or model cannot do it. The message lists what it can."""


class BackendUnavailable(XampError, RuntimeError):
    """The requested backend is unknown, or its probe failed. The message gives the probe's reason.

    Attributes:
        is_there: a probe that raises this sets it where the device is there and does not compute rightly. Where xamp
            looks for the best device it then logs a warning before it takes another one.
    """

    is_there = False


class StateError(XampError, RuntimeError):
    """A call came at the wrong moment or for the wrong object. The message names the remedy."""


class LossScaleCollapsed(XampError, RuntimeError):
    """Gradients kept overflowing although the loss scale could not fall any further."""


class CheckpointError(XampError, ValueError):
    """A saved state does not fit the session it is loaded into. The message names the key."""
