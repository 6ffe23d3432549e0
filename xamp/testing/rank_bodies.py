"""The functions that each rank runs; see :class:`xamp.testing.ranks.Ranks`. They return results and check nothing."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import xamp
from xamp.errors import LossScaleCollapsed, StateError
from xamp.testing.exact import Dot, sgd
from xamp.testing.lane import Lane
from xamp.testing.ranks import micro_batch
from xamp.testing.reads import steps_late
from xamp.testing.shared import Shared, local, saturating, spoiling, whole, wrap

__all__ = ["BODIES", "main"]

_WAIT = datetime.timedelta(seconds=60)  # timeout of a collective call that another rank does not reach


def main(lane: Lane, meeting: str) -> None:
    """Run the requests that arrive on stdin, until it ends.

    Args:
        lane: This rank's lane, with its device.
        meeting: A file through which the ranks find each other.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # text that other code prints must not look like a reply
    torch.set_num_threads(1)
    if lane.device.index is not None:
        xamp.accel.set_device(lane.device)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    method = Path(meeting).as_uri()
    dist.init_process_group(lane.can.process_group, method, rank=rank, world_size=world, timeout=_WAIT)
    gc.collect()
    gc.freeze()  # what is imported by now stays: no collection looks through it, nor what searches for DDPs
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = {"result": BODIES[request["body"]](lane, **request["arguments"])}
        except Exception:
            found = {"error": traceback.format_exc()}
        replies.write(json.dumps(found) + "\n")
        replies.flush()
        gc.collect()  # no model outlives its body
    os._exit(0)  # threads of a process group may abort the interpreter while it shuts down


def add_up(lane: Lane) -> int:
    """The number of ranks, found by an all-reduce."""
    one = torch.ones((), device=lane.device)
    dist.all_reduce(one)
    return int(one.item())


def train(
    lane: Lane,
    level: str,
    wrapper: str,
    *,
    steps: int = 4,
    spoilt: Sequence[int] = (),
    flags: bool = False,
    apart: bool = False,
    seeds: Sequence[int] = (0, 0),
    window: int = 1,
    early: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train, and return the result of each step.

    Args:
        lane: This rank's lane.
        level: For ``initialize``.
        wrapper: See :func:`wrap`.
        steps: How many steps to take.
        spoilt: Steps at which the device of rank 1 overflows.
        flags: The chip saturates and raises a flag.
        apart: Each rank is its own process group for xamp.
        seeds: Seeds of the weights, by rank.
        window: Micro-batches in a step; only the last one is reduced.
        early: The device overflows in the first micro-batch, not in the last.
        **options: For ``initialize``.
    """
    rank = dist.get_rank()
    if apart:
        options["process_group"] = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    found = []
    with saturating(lane) if flags and lane.can.overflow != "flag" else contextlib.nullcontext():
        shared = Shared(lane, level, wrapper, seeds[rank], **options)
        for step in range(steps):
            shared.optimizer.zero_grad()
            spoil = rank == 1 and step in spoilt
            inside = [accumulate(shared, step, micro, spoil and early and micro == 0) for micro in range(window - 1)]
            shared.backward(micro_batch(lane, step, window - 1, rank), spoil and not early)
            gradients = shared.gradients()
            shared.optimizer.step()
            found.append({**shared.told(), "gradients": gradients, "inside": inside})
    return found


def accumulate(shared: Shared, step: int, micro: int, spoil: bool) -> dict[str, Any]:
    """Run a backward that is not reduced; return the scale after it, and the errors of clipping and stepping."""
    with shared.postponed():
        shared.backward(micro_batch(shared.lane, step, micro, dist.get_rank()), spoil)
    return {
        "scale": xamp.loss_scale(shared.optimizer),
        "clipping": error_of(lambda: xamp.clip_grad_norm_(shared.optimizer, 1.0)),
        "stepping": error_of(shared.optimizer.step),
    }


def error_of(call: Callable[[], Any]) -> str:
    """The text of the StateError that ``call`` raises; empty if it raises none."""
    try:
        call()
    except StateError as error:
        return str(error)
    return ""


def collapse(lane: Lane, level: str, limit: int) -> dict[str, Any]:
    """After one good step rank 1 alone overflows; return the step at which this rank raises LossScaleCollapsed.

    ``late`` is how many steps after the last of the overflows that should be.
    """
    shared = Shared(lane, level, "none", init_scale=1.0)
    late = steps_late(lane, shared.optimizer)
    for step in range(limit):
        shared.optimizer.zero_grad()
        shared.backward(micro_batch(lane, step), spoil=step > 0 and dist.get_rank() == 1)
        try:
            shared.optimizer.step()
        except LossScaleCollapsed as error:
            return {"step": step, "late": late, "error": str(error)}
    return {"step": None, "late": late, "error": ""}


def logged(lane: Lane, level: str) -> list[str]:
    """The messages of the logger ``xamp`` in three steps; rank 1 overflows in the second."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("xamp")
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        shared = Shared(lane, level, "none", verbosity=1, fused=False)
        records.clear()  # drop the messages of initialize
        take(shared, range(3), spoilt=1)
    finally:
        logger.removeHandler(handler)
    return [record.getMessage() for record in records]


def resume(lane: Lane, level: str, folder: str) -> dict[str, Any]:
    """Train, save on rank 0, train on; then all ranks load the file into fresh objects and train the same steps."""
    path = Path(folder) / f"{level}.pt"
    first = Shared(lane, level, "ddp", growth_interval=3)
    take(first, range(6), spoilt=1)
    if dist.get_rank() == 0:
        parts = {"model": first.model, "optimizer": first.optimizer, "xamp": xamp.session(first.optimizer)}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    dist.barrier()
    take(first, range(6, 10), spoilt=8)
    second = Shared(lane, level, "ddp", seed=5 + dist.get_rank(), growth_interval=3, init_scale=8.0)
    state = torch.load(path, map_location="cpu", weights_only=True)
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"])
    xamp.load_state_dict(state["xamp"], second.optimizer)
    loaded = xamp.state_dict(second.optimizer)["scalers"]
    take(second, range(6, 10), spoilt=8)
    return {"loaded": loaded, "first": first.told(), "second": second.told()}


def take(shared: Shared, steps: range, spoilt: int) -> None:
    """Train; the device of rank 1 overflows at step ``spoilt``."""
    rank = dist.get_rank()
    for step in steps:
        shared.optimizer.zero_grad()
        shared.backward(micro_batch(shared.lane, step, 0, rank), spoil=rank == 1 and step == spoilt)
        shared.optimizer.step()


def wrapped_before(lane: Lane, level: str, wrapper: str) -> dict[str, Any]:
    """The error of ``initialize`` on a model that is already wrapped, and whether the model is unchanged."""
    torch.manual_seed(0)
    model = wrap(lane, wrapper, Dot().to(lane.device))
    optimizer = sgd(model.parameters())
    before = [(p.dtype, type(p), local(p).clone()) for p in model.parameters()]
    error = error_of(lambda: xamp.initialize(model, optimizer, level=level, verbosity=0))
    after = [(p.dtype, type(p), local(p)) for p in model.parameters()]
    same = all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))
    return {"error": error, "same": same}


def by_hand(lane: Lane, wrapper: str, spoilt: int) -> list[dict[str, Any]]:
    """Train in fp32 with ``GradScaler``; return outcome, scale and weights after each step."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model: Any = Dot().to(lane.device)
    outer = wrap(lane, wrapper, model)
    optimizer, scaler = sgd(outer.parameters()), xamp.GradScaler(init_scale=64.0)
    found = []
    for step in range(4):
        optimizer.zero_grad()
        spoil = rank == 1 and step == spoilt
        with spoiling(lane, model.first.weight) if spoil and wrapper == "ddp" else contextlib.nullcontext():
            scaler.scale(outer(micro_batch(lane, step, 0, rank))).backward()
        if spoil and wrapper != "ddp":
            lane.overflow_(next(local(p.grad) for p in outer.parameters() if p.grad is not None))
        scaler.step(optimizer)
        scaler.update()
        weights = [whole(p).tolist() for p in model.parameters()]
        found.append({"outcome": scaler.last_step.name, "scale": scaler.get_scale(), "weights": weights})
    return found


def plain_gradient(lane: Lane, wrapper: str) -> float:
    """Without xamp, the sum of the gradients whose mean is one, of ranks that share a model under torch's wrapper."""
    model = torch.nn.Linear(2, 1, bias=False).to(lane.device)
    outer = wrap(lane, wrapper, model)
    outer(torch.ones(1, 2, device=lane.device)).sum().backward()
    return float(whole(model.weight.grad).mean())


BODIES: dict[str, Callable[..., Any]] = {
    body.__name__: body for body in (add_up, plain_gradient, train, collapse, logged, resume, wrapped_before, by_hand)
}
