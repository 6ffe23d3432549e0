"""The registry of backends: lists them, starts them, and chooses the one that serves a model.

Backends come from three sources, in this order: the built-ins below, the entry points of installed distributions (group
``xamp.backends``, each of which names a :class:`~xamp.contract.BackendSpec` in a module that is cheap to import), and
:func:`register_backend`. The registry imports and probes a backend when it is first asked for, once. Where one fails,
the registry keeps the reason for the process and goes on with the others. This module imports no torch at module level,
and names no device outside the table of built-ins.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
import os
import sys
import threading
from collections.abc import Iterable
from types import ModuleType

from xamp.contract import CONTRACT, Backend, BackendReport, BackendSpec
from xamp.errors import BackendUnavailable, PolicyError
from xamp.registry.causes import TorchFailure, explain_torch
from xamp.registry.find_torch import MINIMUM_TORCH, as_text, find_torch
from xamp.registry.plugins import ALIASES, PluginSpec, check_spec, read_entry_points
from xamp.registry.probe import Failed, Ready, start
from xamp.values.shown import shown

__all__ = [
    "BACKEND_VARIABLE",
    "BUILT_INS",
    "ENTRY_POINT_GROUP",
    "HOST",
    "REGISTRY",
    "Registry",
    "available_backends",
    "register_backend",
    "require_torch",
    "resolve",
]

BACKEND_VARIABLE = "XAMP_BACKEND"
ENTRY_POINT_GROUP = "xamp.backends"
HOST = "cpu"  # the device type that every machine has: no accelerator, and its index means nothing

_SHIPPED = (
    BackendSpec("cpu", ("cpu",), "xamp.backends.cpu:CpuBackend", priority=0, ledger="xamp.backends:ledger/cpu.json"),
    BackendSpec(
        "cuda",
        ("cuda",),
        "xamp.backends.cuda:CudaBackend",
        priority=100,
        masks=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        causes="xamp.backends.cuda_causes:CAUSES",
        ledger="xamp.backends:ledger/cuda.json",
    ),
    BackendSpec(
        "npu",
        ("npu",),
        "xamp.backends.npu.backend:NpuBackend",
        priority=90,
        masks=("ASCEND_RT_VISIBLE_DEVICES",),
        causes="xamp.backends.npu.causes:CAUSES",
        ledger="xamp.backends:ledger/npu.json",
        emulations=(("ascend", "xamp.backends.npu.emulation:run"),),
    ),
    BackendSpec(
        "xpu",
        ("xpu",),
        "xamp.backends.xpu:XpuBackend",
        priority=50,
        tested=False,
        masks=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    ),
    BackendSpec("mps", ("mps",), "xamp.backends.mps:MpsBackend", priority=40, tested=False),
)
BUILT_INS = tuple(dataclasses.replace(spec, contract=CONTRACT) for spec in _SHIPPED)

_logger = logging.getLogger("xamp")


class Registry:
    """The registered backends of a process, and the outcome of each one that was started.

    Args:
        built_ins: the specs that are registered from the start.
        group: the entry-point group, read on first use; with None no entry point is read.
    """

    def __init__(self, built_ins: Iterable[BackendSpec] = BUILT_INS, group: str | None = ENTRY_POINT_GROUP) -> None:
        self._specs = {spec.name: spec for spec in built_ins}
        self._sources = dict.fromkeys(self._specs, "xamp")
        self._spelt: dict[tuple[str, Backend], Backend] = {}
        self._generation = 0
        self._rejected: list[BackendReport] = []
        self._outcomes: dict[BackendSpec, Ready | Failed] = {}
        self._unread_group = group
        self._lock = threading.RLock()  # reentrant: a backend may ask for another one in its probe

    def register(self, spec: BackendSpec, *, override: bool = False, source: str = "a call of register") -> None:
        """Register ``spec`` as :func:`register_backend` does; ``source`` says in reports and errors who did."""
        check_spec(spec, f"register_backend({shown(spec)})")
        with self._lock:
            self._read_entry_points()
            if spec.name in self._specs and not override:
                raise PolicyError(
                    f"register_backend({spec!r}): the name {spec.name!r} is already taken by "
                    f"{self._sources[spec.name]}, and {source} wants it too. Registered are {self._listed()}. "
                    "Choose another name, or pass override=True to replace that backend."
                )
            self._specs[spec.name] = spec
            self._sources[spec.name] = source
            self._outcomes.pop(spec, None)
            self._generation += 1

    @property
    def generation(self) -> int:
        """A number that grows with each registration. When it has grown, drop what you cached about backends."""
        with self._lock:
            self._read_entry_points()
            return self._generation

    def specs(self) -> list[BackendSpec]:
        """All registered specs, highest priority first, then by name."""
        with self._lock:
            self._read_entry_points()
            return sorted(self._specs.values(), key=lambda spec: (-spec.priority, spec.name))

    def explain_torch(self, failure: TorchFailure) -> TorchFailure:
        """``failure`` with the cause and the cure from the first table of causes that knows it."""
        return explain_torch(failure, self.specs())

    def resolve(self, name: str, device_type: str) -> Backend:
        """The backend for a model on ``device_type``.

        Args:
            name: a registered name, or ``"auto"``: the one that ``XAMP_BACKEND`` names, else the usable one of highest
                priority that serves ``device_type``.
            device_type: type of the device that the model is on, such as ``"cpu"``; the model is never moved.

        Raises:
            BackendUnavailable: unknown name, wrong device type, failed probe, or no backend for the device type.
        """
        origin, wanted = f"backend={name!r}", name
        if name == "auto":
            wanted = os.environ.get(BACKEND_VARIABLE, "").strip() or "auto"
            origin = f"{BACKEND_VARIABLE}={wanted!r} (environment variable)"
        if wanted == "auto":
            return self.best_for(device_type)
        if wanted in ALIASES:
            return self._under_name(wanted, self.best_for(device_type))
        specs = {spec.name: spec for spec in self.specs()}
        if wanted not in specs:
            raise self._unknown(wanted, origin)
        spec = specs[wanted]
        if device_type not in spec.device_types:
            raise self._does_not_serve(spec, device_type, origin)
        outcome = self.outcome(spec)
        if isinstance(outcome, Failed):
            raise BackendUnavailable(f"{origin}: this backend cannot be used: {outcome}") from outcome.error
        return outcome.backend

    def _under_name(self, name: str, backend: Backend) -> Backend:
        """A copy of ``backend`` under another name; one copy for each name."""
        with self._lock:
            found = self._spelt.get((name, backend))
            if found is None:
                found = self._spelt[name, backend] = copy.copy(backend)
                found.spec = dataclasses.replace(backend.spec, name=name)
            return found

    def best_for(self, device_type: str) -> Backend:
        """The usable backend of highest priority that serves ``device_type``. Ignores ``XAMP_BACKEND``.

        Raises:
            BackendUnavailable: no backend is registered for it (the message says how to register one), or none of them
                works (the message says why).
        """
        failures: list[tuple[str, Failed]] = []
        for spec in self.specs():
            if device_type not in spec.device_types:
                continue
            outcome = self.outcome(spec)
            if isinstance(outcome, Ready):
                for name, failed in failures:
                    _logger.info("backend %s passed over for %s: %s", name, spec.name, failed.reason)
                return outcome.backend
            failures.append((spec.name, outcome))
        if not failures:
            raise self._none_serves(device_type)
        reasons = "\n".join(f"{name}: {failed}" for name, failed in failures)
        cause = failures[0][1].error
        raise BackendUnavailable(f"no backend for device type {device_type!r} can be used:\n{reasons}") from cause

    def reports(self) -> list[BackendReport]:
        """A report on every registered backend and on every entry point that gave none, highest priority first."""
        rows = [self.report(spec) for spec in self.specs()]
        return sorted([*rows, *self._rejected], key=lambda row: (-row.priority, row.name))

    def _read_entry_points(self) -> None:
        if self._unread_group is None:
            return
        group, self._unread_group = self._unread_group, None  # first: a plugin's module may call register_backend
        try:
            self.add_entries(read_entry_points(group))
        except BaseException:
            self._unread_group = group  # Ctrl-C: all of them are read again, for none was added
            raise

    def add_entries(self, entries: Iterable[PluginSpec | BackendReport]) -> None:
        """Register what entry points gave, all of it or nothing; those that are unread are then not read any more."""
        with self._lock:
            specs, sources, rejected = dict(self._specs), dict(self._sources), list(self._rejected)
            for entry in entries:
                if isinstance(entry, BackendReport):
                    rejected.append(entry)
                elif entry.spec.name in specs:
                    rejected.append(entry.clashing_with(sources[entry.spec.name]))
                else:
                    specs[entry.spec.name] = entry.spec
                    sources[entry.spec.name] = entry.source
            self._unread_group = None
            self._generation += 1
            self._specs, self._sources, self._rejected = specs, sources, rejected

    def outcome(self, spec: BackendSpec) -> Ready | Failed:
        """The outcome of starting the backend of ``spec``, which the first call does, for the process.

        Raises:
            StateError: a graph is being captured, and the backend would have to be started; that is not kept.
        """
        with self._lock:
            if spec not in self._outcomes:
                self._outcomes[spec] = start(spec, self.explain_torch)
            return self._outcomes[spec]

    def report(self, spec: BackendSpec) -> BackendReport:
        """The row of :func:`available_backends` for a registered ``spec``."""
        outcome = self.outcome(spec)
        if isinstance(outcome, Ready):
            report = outcome.report
        else:
            report = BackendReport(
                spec.name, spec.device_types, False, outcome.reason, outcome.hint, detail=outcome.detail
            )
        source = self._sources.get(spec.name, "")
        return dataclasses.replace(report, source=source, tested=spec.tested, priority=spec.priority)

    def _listed(self) -> str:
        return ", ".join(sorted(self._specs))

    def _unknown(self, name: str, origin: str) -> BackendUnavailable:
        for row in self._rejected:
            if row.name == name:
                return BackendUnavailable(f"{origin}: this backend cannot be used: {row.reason}\n{row.hint}")
        close = difflib.get_close_matches(name, self._specs, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        return BackendUnavailable(
            f"{origin}: no backend of that name is registered.{guess} Registered are {self._listed()}. Install the "
            "package that ships it, or register it first: xamp.register_backend(spec)."
        )

    def _does_not_serve(self, spec: BackendSpec, device_type: str, origin: str) -> BackendUnavailable:
        serving = [other.name for other in self.specs() if device_type in other.device_types]
        instead = f"choose one that serves {device_type!r} ({', '.join(serving)})" if serving else "choose another one"
        return BackendUnavailable(
            f"{origin}: this backend serves {', '.join(spec.device_types)}, not {device_type!r}, and xamp never moves "
            f'a model. Move the model first (model.to("{spec.device_types[0]}")), {instead}, or leave it to xamp '
            f'(backend="auto", {BACKEND_VARIABLE} not set).'
        )

    def _none_serves(self, device_type: str) -> BackendUnavailable:
        served = ", ".join(f"{spec.name} ({', '.join(spec.device_types)})" for spec in self.specs())
        example = f'BackendSpec("my_{device_type}", ("{device_type}",), "my_package.my_module:MyBackend")'
        broken = "".join(f"\nnot readable: {row.name} from {row.source}: {row.reason}" for row in self._rejected)
        return BackendUnavailable(
            f"no backend is registered for device type {device_type!r}. Registered are {served}. Install a package "
            f"that ships one (entry-point group {ENTRY_POINT_GROUP!r}), or register it: "
            f"xamp.register_backend({example}), see xamp.contract.{broken}"
        )


REGISTRY = Registry()


def register_backend(spec: BackendSpec, *, override: bool = False) -> None:
    """Register a backend under ``spec.name`` for the rest of the process. Imports and probes nothing yet.

    Args:
        spec: where the backend is and what it serves.
        override: replace a backend of the same name. Its probe is then forgotten, also where the spec is the same.

    Raises:
        PolicyError: the spec is malformed, or its name is taken (the message names both registrants).
    """
    caller = sys._getframe(1)
    source = f"register_backend at {caller.f_code.co_filename}:{caller.f_lineno}"
    REGISTRY.register(spec, override=override, source=source)


def resolve(name: str, device_type: str) -> Backend:
    """The backend for a model on ``device_type``, as :meth:`Registry.resolve` finds it in the process's registry."""
    return REGISTRY.resolve(name, device_type)


def available_backends() -> list[BackendReport]:
    """A report on every registered backend, highest priority first, then by name. Probes those not probed yet.

    A backend that cannot be used is listed with its reason. So is an entry point that fails or whose name is taken.
    A probe uses its device for something small; on most accelerators that initialises their runtime. What it finds
    holds for the process.

    Raises:
        StateError: a graph is being captured, and some backend is not probed yet. Nothing else is raised.
    """
    return REGISTRY.reports()


def require_torch(needed_by: str = "xamp") -> ModuleType:
    """Import torch for a caller that needs it.

    Args:
        needed_by: what the user asked for; the message begins with it.

    Returns:
        The module ``torch``.

    Raises:
        BackendUnavailable: torch is missing, too old or raises on import; the message says what to install.
    """
    found = find_torch()
    if isinstance(found, TorchFailure):
        found = REGISTRY.explain_torch(found)
        raise BackendUnavailable(
            f"{needed_by} needs torch >= {as_text(MINIMUM_TORCH)}, but {found.reason}\n{found.hint}"
        ) from found.error
    return found
