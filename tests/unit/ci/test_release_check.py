"""ci/release_check.py: what stops a release, each by its cause and its cure."""

from __future__ import annotations

import datetime
import hashlib
import subprocess
from pathlib import Path

from ci_scripts import ROOT, script
from gathering import cases

release_check = script("release_check")
TODAY = datetime.date(2026, 12, 1)
LOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-11-30\n\n### Added\n\n- A thing.\n\n"
    "## [0.1.0] - 2026-01-01\n\n- All.\n"
)


def about(text: str, version: str = "0.2.0") -> list[str]:
    return list(release_check.about_changelog(text, version, TODAY))


def test_a_right_changelog_passes() -> None:
    assert about(LOG) == []
    assert about(LOG.replace("## [Unreleased]\n\n", "")) == []


WRONG = [
    ("2026-11-30", "unreleased", "0.2.0 has unreleased for a date: write '## [0.2.0] - 2026-12-01'"),
    (" - 2026-11-30", "", "0.2.0 has nothing for a date"),
    ("2026-11-30", "2026-12-02", "dated 2026-12-02, which is not yet"),
    ("2026-11-30", "2026-11-31", "0.2.0 has 2026-11-31 for a date"),
    ("[Unreleased]\n", "[Unreleased]\n\n- New.\n", "there is something under [Unreleased]: move it to [0.2.0]"),
    ("[0.2.0]", "[0.3.0]", "the newest section is [0.3.0]: write '## [0.2.0] - 2026-12-01' above it"),
    ("- A thing.", "", "the section of 0.2.0 says nothing"),
    ("## [0.1.0] - 2026-01-01", "## 0.1.0", "'## 0.1.0' is no section"),
    (LOG, "# Changelog\n", "the newest section is none"),
]


def test_a_wrong_changelog() -> None:
    with cases() as case:
        for old, new, text in WRONG:
            with case(text):
                assert old in LOG
                (found,) = about(LOG.replace(old, new, 1))
                assert text in found


NO_NUMBERS = ["0.2", "0.2.0.dev1", "", "v0.2.0"]


def test_a_number_that_is_none() -> None:
    with cases() as case:
        for version in NO_NUMBERS:
            with case(version):
                assert any("is no number of a release" in each for each in release_check.about_version(version, ""))


def test_another_number_than_asked_for() -> None:
    (found,) = release_check.about_version("0.1.0", "0.2.0")
    assert "xamp/values/version.py has '0.1.0', and 0.2.0 is to be released" in found


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True)


def checkout(root: Path) -> Path:
    (root / "xamp" / "values").mkdir(parents=True)
    (root / "xamp" / "values" / "version.py").write_text('__version__ = "0.2.0"\n', encoding="utf-8")
    (root / "CHANGELOG.md").write_text(LOG, encoding="utf-8")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "x")
    return root


def test_a_checkout(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    assert release_check.problems(root, "0.2.0", TODAY) == []
    git(root, "tag", "v0.2.0")
    assert release_check.problems(root, "0.2.0", TODAY) == []
    (root / "CHANGELOG.md").write_text(LOG + "\n", encoding="utf-8")
    (found,) = release_check.problems(root, "0.2.0", TODAY)
    assert "the checkout has changes, M CHANGELOG.md among them: commit them" in found
    git(root, "commit", "-qam", "y")
    (found,) = release_check.problems(root, "0.2.0", TODAY)
    assert "the tag v0.2.0 is there already, on another commit" in found
    (root / "CHANGELOG.md").unlink()
    (found,) = release_check.problems(root, "0.2.0", TODAY)
    assert "there is no CHANGELOG.md: write one, with a section '## [0.2.0] - 2026-12-01'" in found


def test_sums_of_what_is_to_be_uploaded(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "xamp-0.2.0.tar.gz").write_bytes(b"abc")
    (found,) = release_check.write_sums(tmp_path, "0.2.0")
    assert "dist/ must hold xamp-0.2.0-py3-none-any.whl and xamp-0.2.0.tar.gz, and has xamp-0.2.0.tar.gz" in found
    (dist / "xamp-0.2.0-py3-none-any.whl").write_bytes(b"")
    assert release_check.write_sums(tmp_path, "0.2.0") == []
    lines = (dist / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert lines == [
        f"{hashlib.sha256(b'').hexdigest()}  xamp-0.2.0-py3-none-any.whl",
        f"{hashlib.sha256(b'abc').hexdigest()}  xamp-0.2.0.tar.gz",
    ]


def test_this_changelog_can_be_read() -> None:
    version = release_check.version_of(ROOT)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = list(release_check.about_changelog(text.replace("unreleased", "2026-11-30", 1), version, TODAY))
    assert found == []
