"""Turns a spec into a working backend, or into the reason why it does not work here."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence

from xamp._torch import TorchFailure, find_torch, one_line
from xamp.contract import Backend, BackendReport, BackendSpec, Capabilities
from xamp.errors import BackendUnavailable

__all__ = ["Failed", "Ready", "start"]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A backend whose probe passed, and what it said of itself."""

    backend: Backend
    report: BackendReport


@dataclasses.dataclass(frozen=True)
class Failed:
    """Why a backend cannot be used; ``str()`` gives the reason, and the hint on a line of its own."""

    reason: str
    hint: str
    error: BaseException | None

    def __str__(self) -> str:
        return f"{self.reason}\n{self.hint}" if self.hint else self.reason


def start(spec: BackendSpec) -> Ready | Failed:
    """Import, construct, probe and describe the backend of ``spec``.

    Third-party code runs here, so nothing that it raises gets out, SystemExit included; KeyboardInterrupt does.
    """
    torch = find_torch()
    if isinstance(torch, TorchFailure):
        return Failed(torch.reason, torch.hint, torch.error)
    try:
        for kind in spec.device_types:
            torch.device(kind)  # raises where this torch has no such type
        backend = _construct(spec)
        backend.probe()
        return Ready(backend, _describe(backend))
    except KeyboardInterrupt:
        raise
    except BackendUnavailable as error:
        reason, _, hint = str(error).strip().partition("\n")
        return Failed(reason or "its probe failed", hint.strip() or spec.install_hint, error)
    except BaseException as error:
        return Failed(one_line(error), spec.install_hint, error)


def _construct(spec: BackendSpec) -> Backend:
    module, _, path = spec.target.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailable(
            f"its target {spec.target!r} is {found!r}, not a subclass of xamp.contract.Backend\n"
            "derive the class from xamp.contract.Backend, or correct the target"
        )
    return found(spec)


def _describe(backend: Backend) -> BackendReport:
    """Ask once for all that a report shows, so that a backend that cannot answer counts as unusable everywhere."""
    capabilities: object = backend.capabilities()
    if not isinstance(capabilities, Capabilities):
        raise TypeError(f"capabilities() of {type(backend).__qualname__} returned {capabilities!r}, not Capabilities")
    names: Sequence[object] = backend.devices()
    devices = tuple(str(name) for name in names)
    versions = {str(name): str(version) for name, version in backend.versions().items()}
    spec = backend.spec
    return BackendReport(
        spec.name, spec.device_types, True, devices=devices, versions=versions, capabilities=capabilities
    )
