"""Runs a command against the real torch_npu on an emulated Ascend card.

torch_npu is unchanged. Below it is a stand-in for CANN (``cann.c``). Python kernels compute the operators on the CPU,
in place of the card's kernels. So everything that torch_npu itself does is real: its registrations, its autocast lists,
its scaler, its errors. The numbers, speed and memory layout are not those of a card.

The command runs in its own processes, prepared only by environment variables::

    emulation.run("Ascend910B2", 1, ["python", "train.py"])

In these processes ``activation/sitecustomize`` runs first, then ``importing``, then ``kernels``. Beside a torch that is
built for CUDA, ``cuda_half`` comes before torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import xamp
from xamp.backends.npu import chips
from xamp.backends.npu.emulation import asked, cuda_half
from xamp.backends.npu.emulation.library import EmulationError, build
from xamp.backends.npu.emulation.wheel import folders

__all__ = ["EmulationError", "prepare", "run"]

_MAX_DEVICES = 16
_USUAL_MEMORY = 64  # GiB, where the data sheet was not seen


def prepare(
    soc: str = chips.DEFAULT, devices: int = 1, wheels: Sequence[str] = (), *, strict: bool = False
) -> dict[str, str]:
    """Return the environment variables with which a command and its children find emulated Ascend cards.

    This builds and fetches what the cache does not hold yet.

    Args:
        soc: the chip, as CANN names it; empty: the default one.
        devices: the number of cards.
        wheels: files to install in place of what pip would fetch: torch_npu's wheel, and those that it needs.
        strict: whether the card refuses what no source shows a card to take; see :mod:`.limits`.

    Raises:
        EmulationError: the emulation cannot run here; the text says why and what to do.
    """
    chip = chips.find(soc or chips.DEFAULT)
    if chip is None:
        raise EmulationError(f"unknown chip {soc!r}: known are {', '.join(chips.CHIPS)}")
    if not 0 <= devices <= _MAX_DEVICES:
        raise EmulationError(f"{devices} devices cannot be emulated: 0 to {_MAX_DEVICES} can")
    cuda_half.check()  # before anything is fetched
    cann, path = build(), folders(wheels)
    activation = Path(__file__).with_name("activation")
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(activation)]
    return {
        "PYTHONPATH": os.pathsep.join([str(activation), *before]),
        chips.EMULATED: chip.name,
        "XAMP_EMULATED_DEVICES": str(devices),
        "XAMP_EMULATED_MEMORY": str(chip.memory or _USUAL_MEMORY),
        "XAMP_EMULATED_STRICT": str(int(strict)),
        "XAMP_EMULATED_CANN": os.pathsep.join(map(str, asked.stand_ins(cann, path))),
        "XAMP_EMULATED_NO_CUDA": str(cuda_half.stand_in() or ""),
        "XAMP_EMULATED_PATH": os.pathsep.join(map(str, path)),
        "XAMP_EMULATED_PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "XAMP_EMULATED_XAMP": str(Path(xamp.__file__).parent),
        # With torch_npu's queue a later operator reports a failure. So only a script that asks for it gets it.
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "0"),
    }


def run(soc: str, devices: int, command: list[str], wheels: Sequence[str] = (), *, strict: bool = False) -> int:
    """Run ``command`` with emulated Ascend cards and return its exit code.

    ``python`` in the command is the Python that runs this function.

    Args:
        soc: the chip, as CANN names it; empty: the default one.
        devices: the number of cards.
        command: the words of the command.
        wheels: see :func:`prepare`.
        strict: see :func:`prepare`.

    Raises:
        EmulationError: see :func:`prepare`; or the command cannot be started.
    """
    environment = {**os.environ, **prepare(soc or chips.DEFAULT, devices, wheels, strict=strict)}
    how = ", strict" if strict else ""
    name = environment[chips.EMULATED]
    sys.stderr.write(f"xamp: emulated {name} ({devices}){how}; operators are computed on the CPU\n")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
    try:
        done = subprocess.run(command, env=environment, check=False)
    except OSError as error:
        raise EmulationError(f"cannot run {command[0]}: {error.strerror or error}") from error
    return done.returncode if done.returncode >= 0 else 128 - done.returncode
