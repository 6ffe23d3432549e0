"""Writes what readers see of ci/devices.toml: the tables of README.md and docs/ci.md, and the badge docs/devices.svg.

``python ci/devices.py pages`` calls it. With ``--check`` nothing is written: it fails where a page is not what the data
says. The tables stand between marks, and the rest of a page stays as it is. The table of README.zh-CN.md is written by
hand, but for the releases in it. The badge says which jobs there are, and
nothing about whether they passed: it needs no address and no service.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ci.devices_data import ROOT, Device, DevicesError, Job, load

COMMAND = "python ci/devices.py pages"
README, CHINESE, PAGE, BADGE = "README.md", "README.zh-CN.md", "docs/ci.md", "docs/devices.svg"
IN_WORDS = {
    "host": "on any machine",
    "emulated": "emulated, on any machine",
    "third-party": "another wheel's, on any machine",
    "hardware": "on hardware",
}
NOT_READY = "not in CI: no runner has one"
GROUPS = {"host": "", "emulated": "emulated: ", "third-party": "third party: ", "hardware": "hardware: "}
"""What stands before the names of a group on the badge."""
COLOURS = {"host": "#1a7f37", "emulated": "#0969da", "third-party": "#8250df", "hardware": "#59636e"}
"""Of the badge, each dark enough for white letters (contrast 4.5 or more)."""
_LABEL = "#24292f"
_LETTER = 6.6
"""Width of a letter in px, at 11 px of a sans-serif font; each text is set to its width."""


def made(devices: Sequence[Device], jobs: Sequence[Job], root: Path = ROOT) -> dict[str, str]:
    """The text of each page, by its path.

    Raises:
        DevicesError: a page lacks the marks of its table, or is not there.
    """
    return {
        README: placed(root / README, {"devices": short_table(devices)}),
        CHINESE: with_releases(root / CHINESE, devices),
        PAGE: placed(root / PAGE, {"devices": long_table(devices), "jobs": job_table(jobs)}),
        BADGE: badge(devices),
    }


def short_table(devices: Iterable[Device]) -> str:
    """A line for each device, for README.md."""
    return table(
        ("device", "tested", "with", "`ci/device.sh`", ""),
        ([row.title, tested(row), _versions(row), f"`{row.name}`", row.note] for row in devices),
    )


def long_table(devices: Iterable[Device]) -> str:
    """A line for each device, for docs/ci.md: what README.md does not say of it."""
    return table(
        ("`ci/device.sh`", "device", "must be there", "a machine needs"),
        ([f"`{row.name}`", row.title, _required(row.require), row.needs] for row in devices),
    )


def _required(names: Sequence[str]) -> str:
    """Names of capabilities in a line; levels that follow one another by the first and the last."""
    text = ", ".join(names)
    found = re.match(r"O(\d)(?:, O\d)+", text)
    if found is None:
        return text
    levels = found[0].split(", ")
    follow = [f"O{int(found[1]) + at}" for at in range(len(levels))]
    return text.replace(found[0], f"{levels[0]} to {levels[-1]}", 1) if levels == follow else text


def job_table(jobs: Iterable[Job]) -> str:
    """A line for each job that is not about one device or one release; a weekly one is a part of ci/nightly.sh."""
    return table(
        ("`ci/device.sh`", "what", "runs"),
        (
            [f"`{row.name}`", row.title, "weekly" if row.nightly else f"`{row.run}`"]
            for row in jobs
            if not row.name.startswith("versions-")
        ),
    )


def tested(row: Device) -> str:
    """In words, how a device is tested."""
    return IN_WORDS[row.how] if row.ready else NOT_READY


def _versions(row: Device) -> str:
    if not row.torch:
        return "the Python and torch of the machine"
    first, *others = zip(row.torch, row.python, strict=True)
    return ", ".join([f"torch {first[0]} (Python {first[1]})", *(f"{torch} ({python})" for torch, python in others)])


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    body = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    return "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|\n" + body


def with_releases(path: Path, devices: Iterable[Device]) -> str:
    """The text of a page whose table is written by hand, as :func:`short_table` has it, with the releases of today.

    A test compares its lines with those of README.md.

    Raises:
        DevicesError: the page is not there.
    """
    page = _text(path)
    for row in devices:
        if row.torch:
            line = rf"^(\|[^|]*\|[^|]*\| )[^|]*( \| `{row.name}` \|)"
            page = re.sub(line, rf"\g<1>{_versions(row)}\g<2>", page, flags=re.MULTILINE)
    return page


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DevicesError(f"{path.name}: {error.strerror or error}") from error


def placed(path: Path, tables: dict[str, str]) -> str:
    """The text of a page, with each table between its marks.

    Raises:
        DevicesError: the page or a mark is not there.
    """
    page = _text(path)
    for mark, body in tables.items():
        start, end = f"<!-- {mark}: made by ci/devices.py -->\n", f"<!-- end of {mark} -->\n"
        before, found, rest = page.partition(start)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise DevicesError(
                f"{path.name}: the lines {start.strip()} and {end.strip()} are not there; the table goes there"
            )
        page = f"{before}{start}\n{body}\n{end}{after}"
    return page


def badge(devices: Sequence[Device]) -> str:
    """A picture that names the devices which have a job, each in the colour of how it is tested."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in devices:
        groups.setdefault((GROUPS[row.how] if row.ready else "no runner: ", COLOURS[row.how]), []).append(row.name)
    parts = [("xamp in CI", _LABEL)]
    parts += [(before + ", ".join(names), colour) for (before, colour), names in groups.items()]
    at, shapes = 0, []
    for text, colour in parts:
        long = round(len(text) * _LETTER)
        shapes.append(
            f'<rect x="{at}" width="{long + 12}" height="20" fill="{colour}"/>'
            f'<text x="{at + 6}" y="14" textLength="{long}">{html.escape(text)}</text>'
        )
        at += long + 12
    said = html.escape("; ".join([parts[0][0], *(f"{row.title}: {tested(row)}" for row in devices)]), quote=False)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{at}" height="20" viewBox="0 0 {at} 20" role="img">\n'
        f"<title>{said}</title>\n"
        f'<clipPath id="round"><rect width="{at}" height="20" rx="3"/></clipPath>\n'
        '<g clip-path="url(#round)" fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11">\n'
        + "\n".join(shapes)
        + "\n</g>\n</svg>\n"
    )


def main(data: Path, check: bool, root: Path = ROOT) -> int:
    """Writes the pages, or checks them; returns the exit status.

    Raises:
        DevicesError: the data is wrong, or a page lacks its marks; nothing is written.
    """
    status = 0
    rows = load(data)
    for name, text in made(rows.devices, rows.jobs, root).items():
        path = root / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{name} is not what {data.name} says. Run: {COMMAND}")
            status = 1
        else:
            path.write_text(text, encoding="utf-8")
    return status
