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


def main(report: str, lock: str, extras: str) -> None:
    """Write ``lock`` from the file ``report``; hashes that it has for the same versions stay."""
    path, pins = Path(lock), dict[str, set[str]]()
    before = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if path.exists() else []
    for item in json.loads(Path(report).read_text(encoding="utf-8"))["install"]:
        name, version = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(), item["metadata"]["version"]
        hashes = item["download_info"].get("archive_info", {}).get("hashes", {})
        if name != "xamp" and "sha256" not in hashes:
            sys.exit(f"error: the index gives no hash for {name} {version}")
        if name != "xamp":  # 2.13.0+cpu is a build of 2.13.0, and another index has another build
            pin = f"{name}=={version.partition('+')[0]}"
            old = [line for line in before if line.startswith(f"{pin} ")]
            pins[pin] = {f"sha256:{hashes['sha256']}", *re.findall(r"--hash=(\S+)", "".join(old))}
    lines = [" \\\n    ".join([pin, *(f"--hash={each}" for each in sorted(pins[pin]))]) for pin in sorted(pins)]
    path.write_text(HEAD.format(extras=extras) + "\n".join(lines) + "\n", "utf-8")
    print(f"{len(pins)} distributions")


if __name__ == "__main__":
    main(*sys.argv[1:])
