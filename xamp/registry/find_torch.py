"""Imports torch for callers that must work without it, and explains a failed import.

``import torch`` fails in several ways: torch is missing, it is older than what xamp is written for, a folder named
``torch`` shadows it, or an extension that torch loads by itself raises any kind of error because its driver is missing.
"""

from __future__ import annotations

import re
from types import ModuleType

from xamp.registry.causes import TorchFailure, full_text, one_line

__all__ = ["MINIMUM_TORCH", "NEWEST_TESTED", "as_text", "assume_failure", "find_torch", "numbers"]

MINIMUM_TORCH = (2, 7, 1)
"""The oldest release that is taken. README, docs/, setup.cfg and ci/ name the same one, and tests compare them."""

NEWEST_TESTED = (2, 15)
"""The newest release that was tried: docs/validated.md has what was seen. `xamp doctor` names a torch that is newer."""

_INSTALL = 'pip install "xamp[torch]"'


# The first failure is kept and reported: after one `import torch` that raised half-way, a second one fails differently,
# since names are already registered. A missing torch is not kept: the user may install it while a notebook runs.
_first_failure: TorchFailure | None = None


def find_torch() -> ModuleType | TorchFailure:
    """Import torch, or return why it cannot be used. Raises only KeyboardInterrupt."""
    global _first_failure
    if _first_failure is not None:
        return _first_failure
    try:
        import torch
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return TorchFailure("torch cannot be imported: it is not installed", _install_hint(), error)
        reason = f"torch cannot be imported: {one_line(error)}"
        _first_failure = TorchFailure(reason, _repair_hint(), error, text=full_text(error))
        return _first_failure
    return _wrong_torch(torch) or torch


def assume_failure(kind: str, reason: str, text: str) -> None:
    """Make :func:`find_torch` fail without trying, because importing torch ended another process or hung in it.

    Args:
        kind: ``"crash"`` or ``"timeout"``.
        reason: what happened, one line.
        text: what that process printed last.
    """
    global _first_failure
    _first_failure = TorchFailure(reason, _repair_hint(), kind=kind, text=text or reason)


def _install_hint() -> str:
    return f"install it: {_INSTALL}; on a GPU or NPU machine the vendor's build of torch first, so that pip keeps it"


def _repair_hint() -> str:
    return (
        "`import torch` has to work first. Where the error names an extension that torch loads by itself, repair that "
        "(driver, toolkit, matching versions) or set TORCH_DEVICE_BACKEND_AUTOLOAD=0; else reinstall torch, "
        f"such as with {_INSTALL}"
    )


def _wrong_torch(torch: ModuleType) -> TorchFailure | None:
    version = getattr(torch, "__version__", None)
    if version is None:
        where = getattr(torch, "__file__", None) or list(getattr(torch, "__path__", []))
        return TorchFailure(
            f"torch cannot be imported: a module of that name at {where} is not PyTorch", "rename or remove it"
        )
    parts = numbers(str(version))
    if parts is not None and parts < MINIMUM_TORCH:
        minimum = as_text(MINIMUM_TORCH)
        return TorchFailure(f"torch {version} is older than {minimum}", f'upgrade it: pip install "torch>={minimum}"')
    return None


def numbers(version: str) -> tuple[int, int, int] | None:
    """Return the three numbers of a version of torch; None for what is none, such as a build's own name."""
    parts = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return None if parts is None else (int(parts[1]), int(parts[2]), int(parts[3] or 0))


def as_text(version: tuple[int, ...]) -> str:
    """Return a version as people write it, such as ``"2.7.1"``."""
    return ".".join(map(str, version))
