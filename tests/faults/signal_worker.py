"""Trains while signals raise KeyboardInterrupt at any moment; prints what they did to the session and to autocast."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import xamp
from xamp.errors import StateError

X = torch.randn(8, 6)


class Storm:
    """Raises KeyboardInterrupt in the main thread after random times of up to some ms."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.signals = 0
        signal.signal(signal.SIGALRM, self._arrive)

    def _arrive(self, *_: object) -> None:
        self.signals += 1
        raise KeyboardInterrupt

    def through(self, body: Callable[[], None]) -> None:
        """Call ``body`` again and again until a signal ends it."""
        try:
            signal.setitimer(signal.ITIMER_REAL, self._random.uniform(0.0001, 0.004))
            while True:
                body()
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def left_on() -> bool:
    """Whether autocast is on; switches it off."""
    found = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)
    return found


def managed(level: str, storm: Storm, count: int) -> dict[str, int]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    xamp.initialize(model, optimizer, level, verbosity=0)

    def iterate() -> None:
        optimizer.zero_grad()
        with xamp.scale_loss(model(X).square().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()

    dead = on = 0
    until = storm.signals + count
    while storm.signals < until:
        try:
            storm.through(iterate)
        except StateError:
            dead += 1
            xamp.session(model).close()
            xamp.initialize(model, optimizer, level, verbosity=0)
        on += left_on()
    iterate()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return {"dead": dead, "autocast": on}


def bare(storm: Storm, count: int) -> dict[str, int]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def iterate() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).square().mean()
        loss.backward()
        optimizer.step()

    on = 0
    until = storm.signals + count
    while storm.signals < until:
        storm.through(iterate)
        on += left_on()
    return {"autocast": on}


def main(seed: int, count: int) -> None:
    torch.set_num_threads(1)
    storm, found = Storm(seed), dict[str, Any]()
    started = time.process_time()
    for level in ("O1", "O2", "O5"):
        found[level] = managed(level, storm, count)
    found["bare"] = bare(storm, count)
    found["signals"] = storm.signals
    found["seconds"] = round(time.process_time() - started, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
