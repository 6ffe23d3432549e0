"""Where figures were taken: device, versions, date, and how busy the machine was."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re

import torch

import xamp

LIBRARIES = ("accelerate", "lightning", "apex")


def described(device: torch.device) -> dict[str, object]:
    """What a reader must know to compare figures with their own."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "xamp": xamp.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": xamp.accel.get_device_name(),
        "type": device.type,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }


def slug() -> str:
    """The device's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", xamp.accel.get_device_name().lower()).strip("-")


if __name__ == "__main__":
    print(slug())
