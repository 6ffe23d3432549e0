"""Checks that a version can be released: its number, its section of CHANGELOG.md, the checkout. ci/release.sh calls it.

python ci/release_check.py 0.1.0            fails where something does not fit
python ci/release_check.py --rehearse       the same for the version as it stands, and always ends well
python ci/release_check.py --sums 0.1.0     writes dist/SHA256SUMS, and says what is left to do
"""

from __future__ import annotations

import datetime
import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REHEARSE = "--rehearse"
_RELEASE = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_HEAD = re.compile(r"^## (.*)$", re.MULTILINE)
_SECTION = re.compile(r"\[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?")


def version_of(root: Path) -> str:
    """The version that the package has."""
    text = (root / "xamp" / "values" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return found[1] if found else ""


def about_version(version: str, given: str) -> Iterator[str]:
    """What is wrong with the number."""
    if given and version != given:
        yield f"xamp/values/version.py has {version!r}, and {given} is to be released: write it there"
    if not _RELEASE.fullmatch(version):
        yield f"{version!r} is no number of a release: write it as 0.1.0, or 0.1.0rc1"


def about_changelog(text: str, version: str, today: datetime.date) -> Iterator[str]:
    """What is wrong with the changelog, in the form of Keep a Changelog."""
    parts = _HEAD.split(text)[1:]
    sections = [
        (_SECTION.fullmatch(head.strip()), head, body) for head, body in zip(parts[::2], parts[1::2], strict=True)
    ]
    for match, head, _ in sections:
        if match is None:
            yield f"CHANGELOG.md: '## {head}' is no section: write '## [{version}] - {today}'"
    found = [(match["version"], match["date"], body) for match, _, body in sections if match]
    if found and found[0][0].lower() == "unreleased":
        if found[0][2].strip():
            yield f"CHANGELOG.md: there is something under [Unreleased]: move it to [{version}]"
        found = found[1:]
    if not found or found[0][0] != version:
        there = f"[{found[0][0]}]" if found else "none"
        yield f"CHANGELOG.md: the newest section is {there}: write '## [{version}] - {today}' above it"
        return
    _, date, body = found[0]
    yield from about_date(version, date, today)
    if not re.search(r"^- ", body, re.MULTILINE):
        yield f"CHANGELOG.md: the section of {version} says nothing"


def about_date(version: str, date: str | None, today: datetime.date) -> Iterator[str]:
    """What is wrong with the date of a section."""
    fix = f"write '## [{version}] - {today}'"
    try:
        when = datetime.date.fromisoformat(date or "")
    except ValueError:
        yield f"CHANGELOG.md: {version} has {date or 'nothing'} for a date: {fix}"
        return
    if when > today:
        yield f"CHANGELOG.md: {version} is dated {when}, which is not yet: {fix}"


def about_checkout(root: Path, version: str) -> Iterator[str]:
    """What is wrong with the checkout: it must be what is committed, and the tag must be free."""
    try:
        changed = _git(root, "status", "--porcelain")
        here, tagged = _git(root, "rev-parse", "HEAD"), _git(root, "tag", "--list", f"v{version}")
    except (OSError, subprocess.CalledProcessError) as error:
        yield f"this is no checkout of git: a release is made from one ({error})"
        return
    if changed:
        yield f"the checkout has changes, {changed.splitlines()[0].strip()} among them: commit them"
    if tagged and _git(root, "rev-parse", f"v{version}^{{commit}}") != here:
        yield f"the tag v{version} is there already, on another commit: take the next number"


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def problems(root: Path, given: str, today: datetime.date) -> list[str]:
    """All that stops a release."""
    version = version_of(root)
    changelog = root / "CHANGELOG.md"
    if not changelog.is_file():
        return [f"there is no CHANGELOG.md: write one, with a section '## [{version}] - {today}'"]
    return [
        *about_version(version, given),
        *about_changelog(changelog.read_text(encoding="utf-8"), version, today),
        *about_checkout(root, version),
    ]


def write_sums(root: Path, version: str) -> list[str]:
    """Writes dist/SHA256SUMS; returns what is wrong with the files there."""
    dist = root / "dist"
    files = sorted(path for path in dist.glob("*") if path.name.endswith((".whl", ".tar.gz")))
    wanted = [f"xamp-{version}-py3-none-any.whl", f"xamp-{version}.tar.gz"]
    if [path.name for path in files] != wanted:
        return [
            f"dist/ must hold {' and '.join(wanted)}, and has {', '.join(path.name for path in files) or 'nothing'}"
        ]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (dist / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print("".join(lines), end="")
    return []


def what_is_left(version: str) -> str:
    """The commands that a person gives."""
    return (
        f"Left to do, by hand:\n"
        f"    git tag -a v{version} -m 'xamp {version}'\n"
        f"    git push origin v{version}\n"
        f"    python -m twine upload dist/xamp-{version}-py3-none-any.whl dist/xamp-{version}.tar.gz"
    )


def main(words: Sequence[str]) -> int:
    """Checks, or writes the sums; returns the exit status."""
    sums, given = words[:-1] == ["--sums"], words[-1] if words else ""
    if not given or len(words) > 1 + sums:
        print("say which version: ci/release_check.py 0.1.0", file=sys.stderr)
        return 2
    rehearsed = given == REHEARSE
    today = datetime.datetime.now(datetime.timezone.utc).date()
    version = version_of(ROOT)
    found = write_sums(ROOT, version) if sums else problems(ROOT, "" if rehearsed else given, today)
    for line in found:
        print(("would stop a release: " if rehearsed else "error: ") + line)
    if sums and not found:
        print("That was a rehearsal." if rehearsed else what_is_left(version))
    return int(bool(found) and (sums or not rehearsed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
