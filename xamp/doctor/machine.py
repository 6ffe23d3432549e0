"""Examines this machine for ``doctor`` with child processes. Itself, it imports no torch and no third-party code.

One child process examines everything. If that child ends early, each further child examines one thing. So one broken
thing hides no other.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from xamp.contract import BackendReport
from xamp.doctor.children import Outcome, kill_children, run_child
from xamp.doctor.known import Known, Record, no_choice, row_of
from xamp.registry.findings import NOTE, Finding
from xamp.registry.plugins import PLUGINS_VARIABLE, EntryPoint, allowed_points, list_entry_points
from xamp.registry.registry import ENTRY_POINT_GROUP

__all__ = ["LIMIT", "Examined", "examine_machine"]

LIMIT = 60.0  # seconds for one step; importing torch from a slow network drive takes a large part of them
_AUTOLOAD, _AUTOLOAD_GROUP = "TORCH_DEVICE_BACKEND_AUTOLOAD", "torch.backends"
_WORKERS = 4  # a child that hangs uses no CPU time
_STAGES = {"declared": "trying what it declares", "settings": "reading its precision settings"}


@dataclasses.dataclass(frozen=True)
class Examined:
    """The findings of an examination.

    Attributes:
        torch: ``version``, ``reason``, ``hint``, ``detail``, ``printed`` (the last lines printed where it failed), and
            ``findings`` about its autocast lists.
        rows: one for every backend and broken entry point, with the fields of :class:`~xamp.contract.BackendReport`,
            ``broken``, ``findings``, ``settings``, ``one_pass``, ``seconds`` and ``printed``.
        chosen: ``device``, ``backend``, ``reason``.
        recommended: the fields of :class:`xamp.doctor.advice.Advice`; None where no device could be chosen, or where it
            runs no level.
    """

    torch: Record
    rows: list[Record]
    chosen: Record
    recommended: Record | None


def examine_machine(limit: float = LIMIT, say: Callable[[str], object] = len) -> Examined:
    """Find out what works here. Raises only KeyboardInterrupt.

    Args:
        limit: seconds that one step may take: importing torch, loading an entry point, starting a backend.
        say: called with a line of progress where the examination takes longer; the default does nothing.
    """
    listed = list_entry_points(ENTRY_POINT_GROUP)
    points, left_out = allowed_points([] if isinstance(listed, BackendReport) else listed)
    survey = _Survey(points, limit, say)
    while not survey.known.is_complete():
        known = len(survey.known.records)
        outcome = survey.run(survey.whole_plan())
        if outcome.kind:
            survey.isolate(outcome)
        elif len(survey.known.records) == known:  # this should not happen; but then the loop would never end
            survey.give_up("the process that examines it finds nothing out", outcome)
    rows = [*survey.known.rows(), *map(row_of, left_out)]
    if isinstance(listed, BackendReport):
        rows.append(row_of(listed, broken=True))
    torch, choose = survey.known.of("torch"), survey.known.of("choose")
    if not torch["version"]:
        torch["hint"] += survey.without_extensions()
    shown = {name: torch.get(name, "") for name in ("version", "reason", "hint", "detail")}
    shown["printed"] = [] if torch["version"] else torch.get("printed", [])
    shown["findings"] = torch.get("findings", [])
    return Examined(shown, rows, choose["chosen"], choose["recommended"])


class _Survey:
    """One examination: keeps what is known, and starts the children that find out the rest."""

    def __init__(self, points: Sequence[EntryPoint], limit: float, say: Callable[[str], object]) -> None:
        self.known = Known(points)
        self._limit = limit
        self._say = say
        self._torch_failure: Record | None = None
        self._ended: set[str] = set()  # backends that ended a process of their own
        self._only_built_ins = False

    def whole_plan(self) -> Record:
        """The plan for one child to do all that is left."""
        known = self.known
        points = [key for key in known.points if key not in known.fatal and not self._only_built_ins]
        starts = None if known.unloaded() else known.unstarted()
        return self._plan(points, starts=starts, choose=True, torch_failure=self._torch_failure)

    def _plan(self, points: Sequence[str], **changes: Any) -> Record:
        nothing: Record = {"torch": True, "torch_failure": None, "starts": [], "explain": {}, "choose": False}
        return {**nothing, **changes, "points": [self.known.points[key] for key in points]}

    def run(self, plan: Record) -> Outcome:
        """Run a child, and keep what it found."""
        outcome = run_child(plan, self._limit)
        for record in outcome.records:
            step, subject = record["at"]
            self.known.keep(step, subject, **{name: value for name, value in record.items() if name != "at"})
        for (step, subject), printed in outcome.printed.items():
            if printed.size and self.known.of(step, subject):
                self.known.keep(step, subject, printed_bytes=printed.size, printed=printed.lines)
        return outcome

    def isolate(self, outcome: Outcome) -> None:
        """Find out what ended the common child: examine each thing of that kind that is left in its own child."""
        at = outcome.open_step
        if at is None or (at[0] == "torch" and self._torch_failure is not None):
            self.give_up(f"the process that examines it {outcome.how}", outcome)
            return
        self._say(f"{' '.join(at).strip()}: {outcome.how}; looking at each thing by itself")
        company = ", ".join(key for key in self.known.points if key not in self.known.fatal and key != at[1])
        together = f"works by itself, but together with {company or 'the other backends'} it {outcome.how}"
        if at[0] == "torch":
            self._torch_ended(outcome)
        elif at[0] == "choose":
            self._choice_ended(outcome)
        elif at[0] == "load":
            self._loads_ended(at[1], outcome, together)
        else:
            self._starts_ended(at[1], outcome, together)

    def _examine_each(
        self,
        look: Callable[[str], None],
        subjects: Sequence[str],
        ended: Callable[[str, Outcome], None],
        outcome: Outcome,
    ) -> None:
        """Call ``look`` for each of ``subjects``; for one that has just timed out, call ``ended`` instead."""
        if outcome.kind == "timeout" and outcome.open_step and outcome.open_step[1] in subjects:
            ended(outcome.open_step[1], outcome)
            subjects = [subject for subject in subjects if subject != outcome.open_step[1]]
        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
            try:
                list(pool.map(look, subjects))
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                kill_children()
                raise

    def _torch_ended(self, outcome: Outcome) -> None:
        """Assume from here on that importing torch fails like this."""
        reason = f"torch cannot be imported: it {outcome.how}"
        self._torch_failure = {"kind": outcome.kind, "reason": reason, "text": outcome.last_text}
        self.known.keep("torch", printed=outcome.last_lines)

    def _choice_ended(self, outcome: Outcome) -> None:
        """Let the next child choose with the built-ins only. Where that ended too, report that there is no choice.

        This should not happen, since choosing starts only backends that were started before.
        """
        if self._only_built_ins or not self.known.points:
            reason = f"choosing a device {outcome.how}; set XAMP_DEVICE to a device type that is usable"
            self.known.keep("choose", **no_choice(reason))
        self._only_built_ins = True

    def _loads_ended(self, key: str, outcome: Outcome, together: str) -> None:
        if ("load", key) in self.known.records:  # it was loaded alone before, and that child did not end
            self.known.keep("load", key, failed=together)
            self.known.fatal.add(key)
        else:
            self._examine_each(self._load_alone, self.known.unloaded(), self._load_ended, outcome)

    def _starts_ended(self, name: str, outcome: Outcome, together: str) -> None:
        self._examine_each(self._start_alone, self.known.unstarted(), self._start_ended, outcome)
        start = self.known.of("start", name)
        if start and name not in self._ended:
            self.known.keep("start", name, together=together)

    def _load_alone(self, key: str) -> None:
        outcome = self.run(self._plan([key], torch=False))
        if outcome.kind:
            self._load_ended(key, outcome)

    def _load_ended(self, key: str, outcome: Outcome) -> None:
        hint = "; until then whatever asks xamp for a backend in this environment meets the same, unless "
        hint += f"{PLUGINS_VARIABLE} leaves it out: none, or the names of the others"
        self.known.keep("load", key, failed=outcome.how, hint=hint, printed=outcome.last_lines)
        self.known.fatal.add(key)

    def _start_alone(self, name: str) -> None:
        points = self.known.point_of(name)
        outcome = self.run(self._plan(points, starts=[name], torch_failure=self._torch_failure))
        if outcome.kind:
            self._start_ended(name, outcome)

    def _start_ended(self, name: str, outcome: Outcome) -> None:
        self._ended.add(name)
        stage = outcome.open_step[0] if outcome.open_step else ""
        if stage in _STAGES and self.known.of("start", name):
            self.known.keep("start", name, ended=f"{_STAGES[stage]} {outcome.how}", printed=outcome.last_lines)
        else:
            self.known.fatal.update(self.known.point_of(name))
            self._record_failed_start(name, f"using it {outcome.how}", outcome)
        self.known.keep("finished", name)

    def _record_failed_start(self, name: str, how: str, outcome: Outcome) -> None:
        """Keep a row for a backend whose start ended its process; its table of causes may explain it."""
        key, spec = next((key, spec) for key, spec in self.known.specs() if spec.name == name)
        owner = f"uninstall {self.known.source_of(key)}" if key else "reinstall torch in a version that suits it"
        hint = spec.install_hint or f"update the driver of its device, or {owner}"
        report = BackendReport(
            name,
            spec.device_types,
            usable=False,
            reason=how,
            hint=hint,
            source=self.known.source_of(key),
            tested=spec.tested,
            priority=spec.priority,
        )
        text = outcome.last_text or outcome.how
        answer = run_child(
            self._plan([key] if key else [], torch=False, explain={name: [outcome.kind, text]}), self._limit
        )
        for record in answer.records:
            if record["at"] == ["explain", name]:
                report = dataclasses.replace(report, reason=record["cause"], hint=record["cure"], detail=how)
        leaving = (
            [Finding(NOTE, f"{PLUGINS_VARIABLE} can leave it out: none, or the names of the others")] if key else []
        )
        findings = [dataclasses.asdict(finding) for finding in leaving]
        self.known.keep("start", name, row=row_of(report), broken=True, printed=outcome.last_lines, findings=findings)

    def give_up(self, reason: str, outcome: Outcome) -> None:
        """Fill all missing records with ``reason``: not even xamp's own code runs to its end in a child."""
        known = self.known
        known.keep("torch", version=None, reason=reason, hint="", detail="", printed=outcome.last_lines)
        for key in known.unloaded():
            known.keep("load", key, failed="was not examined")
        for name in known.unstarted():
            self._record_failed_start(name, reason, outcome)
            known.keep("finished", name)
        known.keep("choose", **no_choice(reason))

    def without_extensions(self) -> str:
        """Try torch without the extensions that it loads by itself; return a line for the hint where that works."""
        listed = list_entry_points(_AUTOLOAD_GROUP)
        if isinstance(listed, BackendReport) or not listed or os.environ.get(_AUTOLOAD) == "0":
            return ""
        outcome = run_child(self._plan([]), self._limit, {_AUTOLOAD: "0"})
        found = next((record for record in outcome.records if record["at"][0] == "torch"), None)
        if found is None or not found["version"]:
            return ""
        names = ", ".join(f"{point.name} (of {point.source})" for point in listed)
        return f"\ntorch {found['version']} itself can be imported: with {_AUTOLOAD}=0, which leaves out {names}"
