"""Runs a command against the real torch_npu on an emulated Ascend card.

Nothing of torch_npu is changed. Under it stands a stand-in for CANN (``cann.c``), and the operators, which there are
kernels of the card, are computed on the CPU by Python kernels. So everything that torch_npu itself does is real: its
registrations, its autocast lists, its scaler, its errors; numbers, speed and memory layout of a card are not.

The command runs in processes of its own, prepared by the environment alone::

    emulation.run("Ascend910B2", 1, ["python", "train.py"])

What runs there is ``activation/sitecustomize``, then ``importing``, then ``kernels``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import xamp
from xamp.backends.npu import chips
from xamp.backends.npu.emulation.library import EmulationError, build
from xamp.backends.npu.emulation.wheel import folders

__all__ = ["EmulationError", "prepare", "run"]

_MAX_DEVICES = 16


def prepare(soc: str = chips.DEFAULT, devices: int = 1) -> dict[str, str]:
    """What to set in the environment of a command so that it, and what it starts, finds emulated Ascend cards.

    Builds and fetches what is not in the cache yet.

    Args:
        soc: the chip, as CANN names it; empty: the usual one.
        devices: how many of them.

    Raises:
        EmulationError: it cannot run here; the text says why and what to do.
    """
    chip = chips.find(soc or chips.DEFAULT)
    if chip is None:
        raise EmulationError(f"unknown chip {soc!r}: known are {', '.join(chips.CHIPS)}")
    if not 0 <= devices <= _MAX_DEVICES:
        raise EmulationError(f"{devices} devices cannot be emulated: 0 to {_MAX_DEVICES} can")
    activation = Path(__file__).with_name("activation")
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(activation)]
    return {
        "PYTHONPATH": os.pathsep.join([str(activation), *before]),
        chips.EMULATED: chip.name,
        "XAMP_EMULATED_DEVICES": str(devices),
        "XAMP_EMULATED_CANN": str(build()),
        "XAMP_EMULATED_PATH": os.pathsep.join(map(str, folders())),
        "XAMP_EMULATED_PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "XAMP_EMULATED_XAMP": str(Path(xamp.__file__).parent),
        # With torch_npu's queue an operator that fails is reported by a later one, and those between return zeros.
        "TASK_QUEUE_ENABLE": "0",
    }


def run(soc: str, devices: int, command: list[str]) -> int:
    """Run ``command`` with emulated Ascend cards and return its exit code.

    ``python`` in it is the Python that this runs in.

    Args:
        soc: the chip, as CANN names it; empty: the usual one.
        devices: how many of them.
        command: its words.

    Raises:
        EmulationError: see :func:`prepare`; or the command cannot be started.
    """
    environment = {**os.environ, **prepare(soc or chips.DEFAULT, devices)}
    sys.stderr.write(f"xamp: emulated {environment[chips.EMULATED]} ({devices}); operators are computed on the CPU\n")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    try:
        done = subprocess.run(command, env=environment, check=False)
    except OSError as error:
        raise EmulationError(f"cannot run {command[0]}: {error.strerror or error}") from error
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
