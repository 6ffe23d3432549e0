"""The pages of ci/report.py: Markdown, and HTML that asks no other place for anything."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterator, Mapping, Sequence

from ci.devices_data import Device
from ci.results import Note, Result
from xamp.testing import TIERS
from xamp.values.version import __version__

__all__ = ["Report", "html_page", "markdown"]

_HOW = {"host": "", "emulated": "emulated", "third-party": "third party", "hardware": "hardware"}
_BEHIND = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One tier of one result.

    Attributes:
        text: such as ``"123"`` or ``"2 of 123 failed"``.
        state: ``"passed"``, ``"failed"``, ``"gap"`` or ``"none"``.
    """

    text: str
    state: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What the pages show.

    Attributes:
        devices: the rows of ci/devices.toml.
        results: the newest result of each.
        release: the version of xamp that the page is about.
    """

    devices: Sequence[Device]
    results: Sequence[Result]
    release: str = __version__

    def of(self, device: Device) -> list[Result]:
        """The results of a device."""
        return [result for result in self.results if result.device == device.name]

    @property
    def unlisted(self) -> list[Result]:
        """Results of devices that ci/devices.toml does not have."""
        names = {device.name for device in self.devices}
        return [result for result in self.results if result.device not in names]

    @property
    def tiers(self) -> list[str]:
        """The tiers, in the suite's order; those that only an older suite had come last."""
        met = {tier for result in self.results for tier in result.tiers}
        return [*TIERS, *sorted(met - set(TIERS))]

    @property
    def not_run(self) -> list[Device]:
        """The hardware on which no clause has run: a result of an emulated card shows nothing of it."""
        return [row for row in self.devices if row.how == "hardware" and not any(map(_on_card, self.of(row)))]

    def is_old(self, result: Result) -> bool:
        """Whether a result is of an earlier version than the release."""
        return _numbers(result.xamp) < _numbers(self.release)

    def summary(self) -> str:
        """What the results are, in two sentences, and what they are not."""
        days = sorted(result.when for result in self.results)
        if not days:
            text = "Nothing has been run."
        else:
            first, last = f"{days[0]:%Y-%m-%d}", f"{days[-1]:%Y-%m-%d}"
            when = f"on {first}" if first == last else f"from {first} to {last}"
            many = f"{len(self.results)} run" + ("s" if len(self.results) > 1 else "")
            text = f"{many} of the conformance suite of xamp, {when}; the release is {self.release}."
        names = [row.title for row in self.not_run]
        if names:
            text += f" Not run on hardware: {', '.join(names)}."
        return text

    def notes(self) -> Iterator[tuple[str, Result, Note]]:
        """Every clause that did not simply pass, with the title of its device."""
        titles = {device.name: device.title for device in self.devices}
        for result in self.results:
            for note in result.notes:
                yield titles.get(result.device, result.device), result, note


def _on_card(result: Result) -> bool:
    return result.how == "hardware" and result.count("passed") + result.count("failed") > 0


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in _BEHIND.findall(version)[:3])


def cell(result: Result, tier: str) -> Cell:
    """What the table says of a tier."""
    counts = result.tiers.get(tier, {})
    passed, failed, gaps, skipped = (counts.get(each, 0) for each in ("passed", "failed", "known gap", "skipped"))
    if not any((passed, failed, gaps, skipped)):
        return Cell("not declared" if counts else "not run", "none")
    part = " (part)" if result.part else ""
    more = (f", {gaps} known gap{'s' * (gaps > 1)}" if gaps else "") + (f", {skipped} skipped" if skipped else "")
    if failed:
        return Cell(f"{failed} of {passed + failed} failed{more}{part}", "failed")
    return Cell(f"{passed}{more}{part}", "gap" if gaps or skipped else "passed")


def described(result: Result) -> str:
    """Versions and the name of the device."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{result.name}; Python {result.python}, {versions}"


def marks(report: Report, result: Result) -> list[str]:
    """What a reader must know of a result before its numbers."""
    told = [_HOW[result.how]] if _HOW[result.how] else []
    if result.by != "project":
        told.append("contributed")
    if report.is_old(result):
        told.append(f"of xamp {result.xamp}, older than the release")
    return told


_LEGEND = (
    "A number is a count of clauses that passed. A known gap is in the backend's ledger, with its reason. What a "
    "device does not declare is not asked of it. Emulated: the real torch_npu on a stand-in for the card, which shows "
    "nothing of a card's speed and not all of its digits. Part: only some clauses were asked for."
)


# ---------------------------------------------------------------- Markdown


def markdown(report: Report) -> str:
    """The page as Markdown."""
    tiers = report.tiers
    lines = ["# Where the conformance suite has run", "", report.summary(), "", _LEGEND, ""]
    lines += [_row(["device", *map(_plain, tiers), "run"]), _row(["---"] * (len(tiers) + 2))]
    for device in report.devices:
        found = report.of(device)
        for result in found:
            lines.append(_md_result(report, device.title, result, tiers))
        if not found:
            lines.append(_row([_plain(device.title), *["not run"] * len(tiers), ""]))
    lines += [_md_result(report, result.device, result, tiers) for result in report.unlisted]
    lines += ["", "## What did not simply pass", ""]
    noted = [
        f"- {_plain(title)}, {_plain(result.name)}: `{note.clause.replace('`', '')}`, {note.outcome}: "
        f"{_plain(note.reason)}"
        for title, result, note in report.notes()
    ]
    lines += noted or ["Nothing."]
    return "\n".join([*lines, ""])


def _md_result(report: Report, title: str, result: Result, tiers: Sequence[str]) -> str:
    told = "".join(f", **{_plain(each)}**" for each in marks(report, result))
    run = f"{result.when:%Y-%m-%d}, {_plain(described(result))}"
    return _row([f"{_plain(title)}{told}", *(cell(result, tier).text for tier in tiers), run])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """``text`` as one cell that Markdown takes as it is."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


# ---------------------------------------------------------------- HTML

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6675; --line: #dde3ea; --page: #fbfcfd; --card: #fff;
  --good: #12734a; --bad: #b3261e; --gap: #8a5a00; --tag: #eef2f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf2; --soft: #9aa7b6; --line: #2c3542; --page: #12171e;
  --card: #181f28; --good: #5fd39b; --bad: #ff8a80; --gap: #f0c060; --tag: #252e3a } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 78rem; padding: 1.5rem 1rem 4rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
p { max-width: 46rem; margin: .5rem 0 } .legend { color: var(--soft); font-size: .875rem }
.box { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  margin-top: 1rem }
table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { padding: .5rem .4375rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
tbody tr:last-child > * { border-bottom: 0 } thead th { color: var(--soft); font-weight: 600; white-space: nowrap }
tbody th { font-weight: 600; min-width: 9.5rem } small { display: block; color: var(--soft); font-weight: 400 }
.tag { display: inline-block; background: var(--tag); border-radius: .25rem; padding: 0 .375rem;
  margin: .125rem .25rem 0 0;  font-size: .75rem; font-weight: 500 }
.passed { color: var(--good) } .failed { color: var(--bad); font-weight: 600 } .gap { color: var(--gap) }
.none { color: var(--soft) } td.run { min-width: 8rem } li { overflow-wrap: anywhere; margin: .25rem 0 }
ul { padding-left: 1.25rem; max-width: 60rem } code { font-size: .875em }
@media (max-width: 40rem) {
  thead { position: absolute; clip-path: inset(50%) } table, tbody, tr, th, td { display: block }
  tr { padding: .625rem; border-bottom: 1px solid var(--line) } tbody tr:last-child { border-bottom: 0 }
  th, td { padding: .125rem 0; border: 0 }
  td[data-tier] { display: flex; justify-content: space-between; gap: 1rem }
  td[data-tier]::before { content: attr(data-tier); color: var(--soft) } td.run { min-width: 0; margin-top: .25rem }
}
"""


def html_page(report: Report) -> str:
    """The page as HTML: one file, for wide and narrow screens, light and dark."""
    tiers = report.tiers
    head = "".join(f'<th scope="col">{html.escape(each)}</th>' for each in ("device", *tiers, "run"))
    rows = []
    for device in report.devices:
        found = report.of(device)
        rows += [_html_result(report, device.title, result, tiers) for result in found]
        if not found:
            tag = f'<span class="tag">{_HOW[device.how]}</span>' if _HOW[device.how] else ""
            title = f'<th scope="row">{html.escape(device.title)} {tag}</th>'
            rows.append(f'<tr>{title}<td class="none" colspan="{len(tiers) + 1}">not run</td></tr>')
    rows += [_html_result(report, result.device, result, tiers) for result in report.unlisted]
    noted = "".join(
        f'<li><span class="{_state(note)}">{html.escape(note.outcome)}</span> {html.escape(title)}: '
        f"<code>{html.escape(note.clause)}</code> {html.escape(note.reason)}</li>"
        for title, _, note in report.notes()
    )
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>xamp: where the conformance suite has run</title><style>{_STYLE}</style>\n"
        f"<main><h1>Where the conformance suite has run</h1><p>{html.escape(report.summary())}</p>\n"
        f'<p class="legend">{html.escape(_LEGEND)}</p>\n<div class="box" tabindex="0"><table><thead><tr>{head}</tr>'
        "</thead><tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>\n<h2>What did not simply pass</h2>\n"
        + (f"<ul>{noted}</ul>" if noted else "<p>Nothing.</p>")
        + "\n</main></html>\n"
    )


def _state(note: Note) -> str:
    return "failed" if note.outcome == "failed" else "gap"


def _html_result(report: Report, title: str, result: Result, tiers: Sequence[str]) -> str:
    tags = "".join(f'<span class="tag">{html.escape(each)}</span>' for each in marks(report, result))
    cells = {tier: cell(result, tier) for tier in tiers}
    return (
        f'<tr><th scope="row">{html.escape(title)} {tags}<small>{html.escape(result.name)}</small></th>'
        + "".join(_html_cell(tier, each) for tier, each in cells.items())
        + f'<td class="run">{result.when:%Y-%m-%d}<small>{html.escape(_software(result))}</small></td></tr>'
    )


def _html_cell(tier: str, found: Cell) -> str:
    return f'<td data-tier="{html.escape(tier)}"><span class="{found.state}">{html.escape(found.text)}</span></td>'


def _software(result: Result) -> str:
    versions: Mapping[str, str] = {"Python": result.python, **result.versions}
    return ", ".join(f"{name} {version}" for name, version in versions.items())
