"""The examination in a child process: imports torch, loads entry points, starts backends and checks what they declare.

The child writes each step into a journal before the step begins. So the parent knows in which step the child ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xamp.contract import Failure
from xamp.doctor.known import no_choice
from xamp.errors import XampError
from xamp.registry import find_torch
from xamp.registry.causes import TorchFailure, explain, one_line, table_of
from xamp.registry.findings import DEFECT, NOTE, Finding
from xamp.registry.plugins import EntryPoint, PluginSpec
from xamp.registry.probe import Failed, Ready
from xamp.registry.registry import REGISTRY

if TYPE_CHECKING:
    import torch

    from xamp.contract import Backend, BackendSpec, Setting

__all__ = ["main"]


def main(plan: Mapping[str, Any]) -> None:
    """Run an examination, then exit without the interpreter's clean-up, in which third-party code may hang.

    Args:
        plan: a dict with these keys: ``points`` (name, value and source of each entry point to load), ``torch``
            (whether to import torch), ``torch_failure`` (kind, reason and text of a failure seen in another child;
            torch is not imported then), ``starts`` (names of the backends to start; null: all), ``explain`` (by name of
            a backend: kind and text of the failure to explain), ``choose`` (whether to choose a device), ``journal``
            (the file to write to) and ``mark`` (printed where a step begins).
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here: no core files
    _Examination(plan).run()
    _flush()
    os._exit(0)


class _Examination:
    def __init__(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        # Line-buffered and never closed: the process may end after any line.
        self._journal = Path(plan["journal"]).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._began = 0.0

    def run(self) -> None:
        """Do all that the plan asks for, in an order that makes it certain which step ended the process."""
        plan = self._plan
        found: object = None
        if plan["torch_failure"]:
            find_torch.assume_failure(**plan["torch_failure"])
        if plan["torch"]:
            self._begin("torch")
            found = find_torch.find_torch()
            record = {**_torch_record(found), "seconds": self._seconds()}
            self._write("torch", **record, findings=[] if isinstance(found, TorchFailure) else _torch_findings(record))
        loaded = [self._load(EntryPoint(*point)) for point in plan["points"]]
        REGISTRY.add_entries(entry for entry in loaded if isinstance(entry, PluginSpec))
        if isinstance(found, TorchFailure):
            self._begin("explain", "torch")
            self._write("torch", **_torch_record(REGISTRY.explain_torch(found)))
        specs = {spec.name: spec for spec in REGISTRY.specs()}
        for name, (kind, text) in plan["explain"].items():
            self._explain(specs[name], kind, text)
        for name, spec in specs.items():
            if plan["starts"] is None or name in plan["starts"]:
                self._start(spec)
        if plan["choose"]:
            self._begin("choose")
            self._write("choose", **_choose(found))
        self._journal.write(json.dumps({"done": True}) + "\n")

    def _begin(self, step: str, subject: str = "") -> None:
        _flush()
        with contextlib.suppress(OSError):  # third-party code may have closed it
            os.write(1, self._plan["mark"].encode())
        self._journal.write(json.dumps({"begin": [step, subject]}) + "\n")
        self._began = time.perf_counter()

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._began, 3)

    def _write(self, step: str, subject: str = "", **record: Any) -> None:
        self._journal.write(json.dumps({"at": [step, subject], **record}, default=str) + "\n")

    def _load(self, point: EntryPoint) -> object:
        self._begin("load", point.key)
        entry = point.read()
        if isinstance(entry, PluginSpec):
            self._write("load", point.key, spec=dataclasses.asdict(entry.spec), seconds=self._seconds())
        else:
            how = entry.reason.partition(f"{point.value!r} ")[2]
            self._write("load", point.key, failed=how, seconds=self._seconds())
        return entry

    def _start(self, spec: BackendSpec) -> None:
        self._begin("start", spec.name)
        outcome = REGISTRY.outcome(spec)
        row, seconds = dataclasses.asdict(REGISTRY.report(spec)), self._seconds()
        broken = isinstance(outcome, Failed) and outcome.broken
        self._write("start", spec.name, row=row, broken=broken, findings=_table_findings(spec), seconds=seconds)
        if isinstance(outcome, Ready):
            self._try(outcome.backend)
        self._write("finished", spec.name)

    def _try(self, backend: Backend) -> None:
        import torch

        from xamp.doctor.declared import find_gaps, find_mismatches, one_pass

        device = torch.device(backend.device_type)
        self._begin("declared", backend.name)
        found = [*find_mismatches(backend, device), *find_gaps(backend, device)]
        self._write("declared", backend.name, findings=_as_dicts(found), one_pass=one_pass(backend, device))
        self._begin("settings", backend.name)
        settings, findings = _settings(backend, device)
        self._write("settings", backend.name, settings=settings, findings=findings)

    def _explain(self, spec: BackendSpec, kind: str, text: str) -> None:
        self._begin("explain", spec.name)
        known = explain(spec, Failure(kind, text))
        if known is not None:
            self._write("explain", spec.name, cause=known.cause, cure=known.cure)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # third-party code may have replaced it
            stream.flush()


def _as_dicts(findings: list[Finding]) -> list[dict[str, str]]:
    return [dataclasses.asdict(finding) for finding in findings]


def _torch_record(found: object) -> dict[str, Any]:
    if isinstance(found, TorchFailure):
        return {"version": None, "reason": found.reason, "hint": found.hint, "detail": found.detail}
    return {"version": str(getattr(found, "__version__", None)), "reason": "", "hint": "", "detail": ""}


def _torch_findings(record: dict[str, Any]) -> list[dict[str, str]]:
    from xamp.doctor.lists import list_findings

    return _as_dicts([*release_findings(record["version"]), *list_findings()])


def release_findings(version: str) -> Iterator[Finding]:
    """Say that a torch is newer than all on which xamp was tested."""
    release = find_torch.numbers(version)
    if release is not None and release[:2] > find_torch.NEWEST_TESTED:
        tested = find_torch.as_text(find_torch.NEWEST_TESTED)
        text = f"torch {version} is newer than tested ({tested})"
        yield Finding(
            NOTE, text, "nothing, as long as it works: `xamp conformance` tells; a newer xamp may be tested with it"
        )


def _table_findings(spec: BackendSpec) -> list[dict[str, str]]:
    """Check the table of causes of ``spec``. Without this check, a broken table would show only at the next failure."""
    try:
        for row in table_of(spec):
            row(Failure("exception", ""))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"its table of causes {spec.causes!r} cannot be read: {one_line(error)}"
        return _as_dicts([Finding(DEFECT, text, "report it to whoever ships the backend")])
    return []


def _settings(backend: Backend, device: torch.device) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    from xamp.registry.findings import torch_settings

    try:
        found = [*torch_settings(), *backend.precision_settings(device)]
        return [_setting_as_dict(setting) for setting in found], []
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = f"its precision_settings() failed: {one_line(error)}"
        return [], _as_dicts([Finding(DEFECT, text, "report it to whoever ships the backend")])


def _setting_as_dict(setting: Setting) -> dict[str, Any]:
    row = {field.name: getattr(setting, field.name) for field in dataclasses.fields(setting)}
    return {**row, "exact": setting.exact is not None, "severity": setting.severity}


def _choose(found: object) -> dict[str, Any]:
    """The device that xamp chooses, and the level there. Where it chooses none, such as without torch, the reason."""
    if isinstance(found, TorchFailure):
        return no_choice(REGISTRY.explain_torch(found).reason)
    try:
        from xamp.doctor.advice import advise
        from xamp.registry import device_in_use

        device = device_in_use.device()
        backend = REGISTRY.resolve("auto", device.type)
        chosen = {"device": str(device), "backend": backend.name, "reason": ""}
        advice = advise(backend, device)
        return {"chosen": chosen, "recommended": None if advice is None else dataclasses.asdict(advice)}
    except Exception as error:
        reason = str(error) if isinstance(error, XampError) else one_line(error)
        return no_choice(reason)
