"""Runs a ported script on the CPU, in a process of its own, with every warning an error."""

from __future__ import annotations

import os
import subprocess

from forked_python import python

__all__ = ["run"]


def run(text: str) -> list[str]:
    """What a script prints on the CPU, but for what gloo prints of its connections."""
    environment = {**os.environ, "XAMP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    command = [python(), "-W", "error", "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]
