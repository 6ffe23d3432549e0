"""Writes a lock from pip's report of what it would install: names, versions and hashes. Used by ci/lock.sh."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HEAD = """\
# Made by ci/lock.sh; not to be edited. What CI installs, whole: pip install --require-hashes -r this file
# extras: {extras}
"""


def normal(name: str) -> str:
    """Return the name of a distribution as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(text: str) -> dict[str, set[str]]:
    """Return the hashes in a lock by ``name==version``."""
    found: dict[str, set[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            found[line.split()[0]] = set(re.findall(r"--hash=(\S+)", line))
    return found


def write(pins: dict[str, set[str]], extras: str) -> str:
    """Return the text of a lock."""
    lines = [" \\\n    ".join([pin, *(f"--hash={each}" for each in sorted(pins[pin]))]) for pin in sorted(pins)]
    return HEAD.format(extras=extras) + "\n".join(lines) + "\n"


def main(report: str, lock: str, extras: str) -> None:
    """Write ``lock`` from the file ``report``; hashes that it has for the same versions stay."""
    pins: dict[str, set[str]] = {}
    for item in json.loads(Path(report).read_text(encoding="utf-8"))["install"]:
        name, version = normal(item["metadata"]["name"]), item["metadata"]["version"]
        if name == "xamp":
            continue
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if "sha256" not in hashes:
            sys.exit(f"error: the index gives no hash for {name} {version}")
        # 2.13.0+cpu is a build of 2.13.0, and another index has another build.
        pins[f"{name}=={version.partition('+')[0]}"] = {f"sha256:{hashes['sha256']}"}
    path = Path(lock)
    before = read(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(write({pin: found | before.get(pin, set()) for pin, found in pins.items()}, extras), "utf-8")
    print(f"{len(pins)} distributions")


if __name__ == "__main__":
    main(*sys.argv[1:])
