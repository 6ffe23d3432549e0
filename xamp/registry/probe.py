"""Starts a backend from its spec: returns the working backend, or the reason why it does not work here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xamp.contract import Backend, BackendReport, BackendSpec, Capabilities, Failure
from xamp.errors import BackendUnavailable
from xamp.registry.causes import NotNow, TorchFailure, explain, full_text, is_in_use, one_line
from xamp.registry.find_torch import find_torch

__all__ = ["Failed", "Ready", "start"]


class Ready(NamedTuple):
    """A backend whose probe passed, and its report."""

    backend: Backend
    report: BackendReport


class Failed(NamedTuple):
    """Why a backend cannot be used; ``str()`` gives the reason, and the hint on a line of its own.

    Attributes:
        reason: the cause, one line.
        hint: the cure.
        error: the exception.
        detail: the exception in one line, where ``reason`` comes from the backend's table of causes.
        broken: True for a defect: the backend failed in a way that it does not explain. False where a device or its
            framework is absent.
        is_there: the device is there, and cannot be used: it is busy, has no memory left or does not compute rightly.
    """

    reason: str
    hint: str
    error: BaseException | None
    detail: str = ""
    broken: bool = False
    is_there: bool = False

    def __str__(self) -> str:
        return f"{self.reason}\n{self.hint}" if self.hint else self.reason


def start(spec: BackendSpec, explain_torch: Callable[[TorchFailure], TorchFailure]) -> Ready | Failed:
    """Import, construct, probe and describe the backend of ``spec``.

    Third-party code runs here. This function catches whatever that raises, SystemExit included; only KeyboardInterrupt
    is passed on, and NotNow, which finds nothing out.

    Args:
        spec: the backend to start.
        explain_torch: looks up why importing torch failed in the tables of causes.
    """
    torch = find_torch()
    if isinstance(torch, TorchFailure):
        torch = explain_torch(torch)
        return Failed(torch.reason, torch.hint, torch.error, torch.detail)
    try:
        backend = _construct(spec)
        backend.probe()
        for kind in spec.device_types:
            _require_type(kind)  # only now: a module that the backend imports may add the type
        return Ready(backend, _describe(backend))
    except (KeyboardInterrupt, NotNow):
        raise
    except BaseException as error:
        return _failed(spec, error)


def _failed(spec: BackendSpec, error: BaseException) -> Failed:
    in_use = is_in_use(error)
    is_there = in_use or getattr(error, "is_there", False)
    known = explain(spec, Failure("exception", full_text(error)))
    if known is not None:
        behind = error.__cause__ if isinstance(error, BackendUnavailable) else None
        return Failed(known.cause, known.cure, error, detail=one_line(behind or error), is_there=is_there)
    if in_use:
        hint = "free the device's memory, or wait for who uses it; then start a new process, this one tries no more"
        return Failed(f"it was tried while it was out of memory or busy: {one_line(error)}", hint, error, is_there=True)
    if isinstance(error, BackendUnavailable):
        reason, _, hint = str(error).strip().partition("\n")
        return Failed(reason or "its probe failed", hint.strip() or spec.install_hint, error, is_there=is_there)
    # A missing module is the framework, which is no defect, unless it is the backend's own module.
    own = spec.target.partition(":")[0].partition(".")[0]
    broken = not (isinstance(error, ModuleNotFoundError) and (error.name or own).partition(".")[0] != own)
    hint = spec.install_hint or "this looks like a defect of the backend: update it, or report it to whoever ships it"
    return Failed(one_line(error), hint, error, broken=broken)


def _require_type(kind: str) -> None:
    import torch

    try:
        torch.device(kind)
    except RuntimeError as error:
        raise BackendUnavailable(f"torch {torch.__version__} knows no device type {kind!r}") from error


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
    """Call once every method that the report shows: a backend that cannot answer one of them counts as unusable."""
    capabilities: object = backend.capabilities()
    if not isinstance(capabilities, Capabilities):
        raise TypeError(f"capabilities() of {type(backend).__qualname__} returned {capabilities!r}, not Capabilities")
    _ask_kernels(backend, capabilities)
    names: Sequence[object] = backend.devices()
    devices = tuple(str(name) for name in names)
    versions = {str(name): str(version) for name, version in backend.versions().items()}
    spec = backend.spec
    return BackendReport(
        spec.name, spec.device_types, True, devices=devices, versions=versions, capabilities=capabilities
    )


def _ask_kernels(backend: Backend, can: Capabilities) -> None:
    """Ask the device which operators on lists it has, where the backend's probe has not; register its formats."""
    import torch

    from xamp.registry.trials import ask_once
    from xamp.torch_compat import kernels

    if type(backend).plain is not Backend.plain:
        kernels.register_formats(backend.device_type, backend.plain)
    for dtype in ("float32", *can.dtypes):
        if isinstance(kind := getattr(torch, dtype, None), torch.dtype) and kind.is_floating_point:
            ask_once(torch.device(backend.device_type), kind, can.overflow == "inf")
