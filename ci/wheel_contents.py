"""Fails where a wheel lacks a module of the checkout, holds what does not belong to the package, or links to nowhere.

The description of a package is shown on a page of the index, from which a relative link leads nowhere.
"""

from __future__ import annotations

import email
import pathlib
import re
import sys
import zipfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent

SUFFIXES = (".py", ".c", ".json")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINKS = (
    re.compile(r"\]\(\s*<?([^)>\s]*)"),  # [text](target) and ![text](target)
    re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^>\s]*)", re.MULTILINE),  # [name]: target
    re.compile(r"""\b(?:href|src)\s*=\s*["']?([^"'\s>]*)""", re.IGNORECASE),
)
_ELSEWHERE = re.compile(r"(?:https?|mailto):")


def expected() -> set[str]:
    """Every source file of the package and what it reads at run time, by its path in the wheel."""
    files = {"xamp/py.typed"}
    for folder, prefix in ((ROOT / "xamp", "xamp"), (ROOT / "backends", "xamp/backends")):
        for path in (path for path in folder.rglob("*") if path.suffix in SUFFIXES):
            inside = path.relative_to(folder).as_posix()
            # Python before 3.13 does not enter the link xamp/backends here, later ones may.
            if not (prefix == "xamp" and inside.startswith("backends/")):
                files.add(f"{prefix}/{inside}")
    return files


def relative_links(metadata: str) -> Iterator[str]:
    """What a package index cannot follow of the links in ``metadata``, the text of a METADATA file."""
    message = email.message_from_string(metadata)
    text = _CODE.sub("", _FENCED.sub("", str(message.get_payload())))
    targets = [target for pattern in _LINKS for target in pattern.findall(text)]
    targets += [url.rpartition(",")[2].strip() for url in message.get_all("Project-URL", [])]
    yield from (target for target in targets if not _ELSEWHERE.match(target))


def main(wheel: str) -> int:
    """Compares ``wheel`` with the checkout; returns the exit status."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    found, wanted = set(names) - metadata, expected()
    status = 0
    for text, files in (("lacks", wanted - found), ("must not hold", found - wanted)):
        for name in sorted(files):
            print(f"the wheel {text} {name}")
            status = 1
    for file in ("entry_points.txt", "licenses/LICENSE"):
        if not any(name.endswith(f".dist-info/{file}") for name in metadata):
            print(f"the wheel lacks {file} in its metadata")
            status = 1
    (about,) = (name for name in metadata if name.endswith(".dist-info/METADATA"))
    for target in relative_links(archive.read(about).decode("utf-8")):
        print(f"the description links to {target!r}, which leads nowhere from the page of a package")
        status = 1
    if not status:
        print(f"{len(found)} files, as in the checkout")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
