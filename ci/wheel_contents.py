"""Fails where a wheel lacks a module of the checkout, or holds what does not belong to the package."""

from __future__ import annotations

import pathlib
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


SUFFIXES = (".py", ".c", ".json")


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


def main(wheel: str) -> int:
    """Compares ``wheel`` with the checkout; returns the exit status."""
    names = zipfile.ZipFile(wheel).namelist()
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
    if not status:
        print(f"{len(found)} files, as in the checkout")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
