"""Child processes that have the lane on trial too, even if its backend is registered only in this process.

``python -m xamp.testing.processes LANE MODULE ARGUMENT...`` calls ``main(lane, *arguments)`` of the module.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Mapping

from xamp.registry import registry
from xamp.registry.plugins import spec_of
from xamp.testing.lane import Lane, in_full_fp32, open_lane

__all__ = ["command", "described", "environment", "main", "opened"]


def command(lane: Lane, module: str, *arguments: str) -> list[str]:
    """The command line that calls ``module.main(lane, *arguments)``."""
    return [sys.executable, "-m", __name__, described(lane), module, *arguments]


def described(lane: Lane) -> str:
    """The lane as a text, from which :func:`opened` makes it in another process."""
    about = {"spec": dataclasses.asdict(lane.backend.spec), "device": str(lane.device)}
    return json.dumps({**about, "required": sorted(lane.required)})


def opened(text: str) -> Lane:
    """The lane that :func:`described` describes; its backend is registered here too."""
    found = json.loads(text)
    spec = spec_of(found["spec"])
    if spec not in registry.REGISTRY.specs():
        registry.register_backend(spec, override=True)
    return open_lane(spec.name, found["device"], found["required"])


def environment(**more: str) -> Mapping[str, str]:
    """This process's environment, with its import path, so that a child imports the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


def main(lane_as_text: str, module: str, *arguments: str) -> None:
    """Run in the child: register the backend, open the lane, and call ``main`` of ``module``."""
    lane = opened(lane_as_text)
    with in_full_fp32(lane):
        importlib.import_module(module).main(lane, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
