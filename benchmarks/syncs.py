"""How often one training step waits for the device, counted as in the conformance suite.

A CPU stands in for an accelerator: an asynchronous copy that is read many steps later is no wait. Reads that the
optimizer also does in a plain loop do not count: an unfused Adam keeps its step counters on the host on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import xamp
from benchmarks import bounds
from benchmarks.report import Figure
from benchmarks.timing import first_wait
from xamp.testing.reads import HostReads, host_as_device

STEPS = 40
WARM_UP = 3

Make = Callable[[Any], torch.optim.Optimizer]


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


CASES: dict[str, tuple[Make, dict[str, Any], int]] = {
    "O1 SGD fused": (_sgd, {"level": "O1"}, bounds.SYNCS["fused"]),
    "O1 Adam fused": (_adam, {"level": "O1"}, bounds.SYNCS["fused"]),
    "O2 Adam fused": (_adam, {"level": "O2"}, bounds.SYNCS["fused"]),
    "O1 Adam unfused": (_adam, {"level": "O1", "fused": False}, bounds.SYNCS["other"]),
    "O2 Adam unfused": (_adam, {"level": "O2", "fused": False}, bounds.SYNCS["other"]),
    "O1 SGD unfused, static 128": (_sgd, {"level": "O1", "fused": False, "loss_scale": 128}, bounds.SYNCS["other"]),
    "O4 Adam unfused": (_adam, {"level": "O4", "fused": False}, bounds.SYNCS["pass-through"]),
    "O5 Adam unfused": (_adam, {"level": "O5", "fused": False}, bounds.SYNCS["pass-through"]),
}
"""By name: the optimizer, arguments of ``initialize``, and the bound on waits in a step."""


def run(device: torch.device) -> list[Figure]:
    figures = []
    for case, (make, arguments, bound) in CASES.items():
        reads, names = _count(make, arguments, device)
        if arguments.get("fused") is False:
            reads -= _count(make, None, device)[0]
        figures.append(Figure(case, reads / STEPS, "a step", bound, ", ".join(sorted(names))))
        if bound == 0:
            figures += _strict(case, make, arguments, device)
    return figures


def _training(make: Make, arguments: dict[str, Any] | None, device: torch.device) -> Callable[[], None]:
    """A function that takes one training step; a plain step if ``arguments`` is None."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
    optimizer = make(model.parameters())
    x = torch.randn(4, 8, device=device)

    def plain() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    if arguments is None:
        return plain
    xamp.initialize(model, optimizer, op_policy="native", verbosity=0, **arguments)

    def one() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    return one


def _count(make: Make, arguments: dict[str, Any] | None, device: torch.device) -> tuple[int, set[str]]:
    with host_as_device(device):
        one = _training(make, arguments, device)
    for _ in range(WARM_UP):  # the host decides about a parameter's first fused step
        one()
    with HostReads(device) as reads:
        for _ in range(STEPS):
            one()
    return reads.count, set(reads.names)


def _strict(case: str, make: Make, arguments: dict[str, Any], device: torch.device) -> list[Figure]:
    """Measure with the device's sync debug mode, where it has one."""
    one = _training(make, arguments, device)
    for _ in range(WARM_UP):
        one()
    waited = first_wait(one, device, STEPS)
    return [] if waited is None else [Figure(f"{case}, sync debug mode", float(bool(waited)), "a step", 0, waited)]
