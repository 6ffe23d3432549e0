"""What a run names of its machine: the device, its software, the cores; no host and no path.

python -m ci.gpu.machine [DEVICE]           prints it as JSON; DEVICE is a type, or the best one
python -m ci.gpu.machine DEVICE FILE        prints what xamp doctor finds too, and writes into FILE what is kept of it
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci.results import clean

__all__ = ["NoDevice", "ask", "file_name"]


class NoDevice(RuntimeError):
    """The device cannot be used. The message says why."""


def ask(device: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Describe a device, from another process: who starts processes should not have initialised it.

    Raises:
        NoDevice: it cannot be used.
    """
    command = [sys.executable, "-m", __name__, *filter(None, [device])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoDevice((done.stderr.strip().splitlines() or ["it ended without a word"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def file_name(about: Mapping[str, Any]) -> str:
    """The result's, without its ending: device, Python and torch."""
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    python, torch = about["python"].split("."), about["versions"].get("torch", "").partition("+")[0]
    return f"gpu-{device}-python{python[0]}.{python[1]}-torch{torch}"


def _described(kind: str) -> dict[str, Any]:
    import xamp
    from xamp.testing.lane import open_lane

    lane = open_lane("auto", kind or xamp.device().type)
    return {
        "device": clean(lane.device_name),
        "type": lane.kind,
        "backend": str(lane),
        "devices": len(list(lane.backend.devices())),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: clean(version) for name, version in lane.backend.versions().items()},
        "xamp": xamp.__version__,
    }


def _doctor(file: Path) -> int:
    from xamp.cli._doctor_text import render
    from xamp.cli.doctor import examine

    found = examine()
    print(render(found))
    backends = [{"name": row["name"], "usable": row["usable"], "reason": row["reason"]} for row in found["backends"]]
    kept = {"ok": found["ok"], "chosen": found["chosen"], "recommended": found["recommended"], "backends": backends}
    file.write_text(json.dumps(kept), encoding="utf-8")
    return 0 if found["ok"] else 1


def main(device: str = "", file: str = "") -> int:
    """See the module."""
    from xamp.errors import XampError

    if file:
        return _doctor(Path(file))
    try:
        print(json.dumps(_described(device)))
    except XampError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
