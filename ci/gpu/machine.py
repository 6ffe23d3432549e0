"""What a run names of its machine: the device, its software, the cores; no host and no path.

``python -m ci.gpu.machine [DEVICE]`` prints it as JSON; DEVICE is a type, or the best one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ci.results import cleaned

__all__ = ["ask", "file_name"]


def ask(device: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """What the module's main prints, in another process; or why the device cannot be used."""
    command = [sys.executable, "-m", __name__, *filter(None, [device])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def file_name(about: Mapping[str, Any]) -> str:
    """The result's, without its ending: device, Python and torch."""
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    python, torch = about["python"].split("."), about["versions"].get("torch", "").partition("+")[0]
    return f"gpu-{device}-python{python[0]}.{python[1]}-torch{torch}"


def main(device: str = "") -> int:
    """See the module."""
    import xamp
    from xamp.errors import XampError
    from xamp.testing.lane import open_lane

    try:
        lane = open_lane("auto", device or xamp.device().type)
    except XampError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    about = {
        "device": lane.device_name,
        "type": lane.kind,
        "backend": str(lane),
        "devices": len(list(lane.backend.devices())),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": dict(lane.backend.versions()),
        "xamp": xamp.__version__,
    }
    print(json.dumps(cleaned(about)))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
