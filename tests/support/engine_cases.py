"""What the workers of test_engines.py share: the model, the loop, and one process in fp64 that does it by hand.

A worker file has the cases of one engine. Each trains the same small net at four levels; at one step rank 1 alone
overflows. The reference is the same net, whole, in fp64 on the CPU, that sees the batches of all ranks. The workers run
on the CPU; tests/emulated/inside/ranks_engines.py sets another ``device``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import xamp
from xamp.registry import registry

LEVELS = ("O1", "O2", "O4", "O5")
ERROR = {"O1": 3e-3, "O2": 3e-3, "O4": 1.5e-2, "O5": 1.5e-2}
"""By level: how far weights may be from the reference, as a share of the largest move of one: 3 and 2 eps."""
DECIDED = (["APPLIED", "SKIPPED", "APPLIED", "APPLIED"], [1024.0, 512.0, 512.0, 512.0])
"""Outcomes and scales of the steps, on every rank."""
device = torch.device("cpu")
STEPS, SPOILT, LR, MOMENTUM, MAX_NORM = 4, 1, 0.2, 0.9, 0.2


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def batch(step: int, micro: int, seen: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + seen)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 5, generator=generator)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def compiled(model: Any) -> Any:
    """Compile layer by layer, as one does before an engine wraps the whole."""
    for layer in model:
        layer.compile(backend="aot_eager")
    return model


def checkpointed(model: Any) -> Any:
    """Recompute two layers in backward, in the two ways that torch has; the old one needs an input with a gradient."""
    model[0] = checkpoint_wrapper(model[0], CheckpointImpl.NO_REENTRANT)
    model[2] = checkpoint_wrapper(model[2], CheckpointImpl.REENTRANT)
    return model


def alone(_: int) -> int:
    """Every rank sees the same batch."""
    return 0


def same(rank: int) -> int:
    """Every rank sees a batch of its own."""
    return rank


@dataclasses.dataclass
class Case:
    """One way to use an engine.

    Attributes:
        wrap: given the net, returns what runs its forward. It is called before ``initialize``, or after it if ``late``.
        seen: the number of the batch that a rank sees.
        micro: the number of micro-batches; all but the last run in ``postponed``.
        postponed: given the model, returns a context in which its gradients are not reduced.
        optimizer: makes the optimizer.
        members: the ranks that train together with a rank; None: all.
        spoil_loss: rank 1 overflows in its loss, before anything is reduced; else in its own gradients, after.
        options: further arguments of ``initialize``.
    """

    wrap: Callable[[Any, str], Any]
    late: bool = False
    seen: Callable[[int], int] = same
    micro: int = 1
    postponed: Callable[[Any], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()
    optimizer: Callable[[Iterable[Any]], Any] = lambda params: torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
    members: Callable[[int], Sequence[int]] | None = None
    spoil_loss: bool = False
    options: Callable[[], dict[str, Any]] = dict


def train(case: Case, level: str) -> dict[str, Any]:
    """Train, and tell how the steps went and how far the weights are from those of the reference."""
    rank = dist.get_rank()
    inner = net().to(device)
    outer = inner if case.late else case.wrap(inner, level)
    optimizer = case.optimizer(outer.parameters())
    told = {"loss_scale": "dynamic", "init_scale": 1024.0, "verbosity": 0, **case.options()}
    xamp.initialize(outer, optimizer, level, **told)
    if case.late:
        outer = case.wrap(inner, level)
    outcomes, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.micro):
            x, target = (each.to(device) for each in batch(step, micro, case.seen(rank)))
            with contextlib.nullcontext() if micro == case.micro - 1 else case.postponed(outer):
                loss = loss_of(outer(x), target) / case.micro
                spoilt = step == SPOILT and rank == 1 and micro == case.micro - 1
                in_loss = spoilt and case.spoil_loss and not saturates()
                with xamp.scale_loss(loss * float("inf") if in_loss else loss, optimizer) as scaled:
                    scaled.backward()
                    if spoilt and not in_loss:
                        spoil(outer)
        xamp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        outcomes.append(xamp.session(optimizer).last_step.name)  # type: ignore[union-attr]
        scales.append(xamp.loss_scale(optimizer))
    members = range(dist.get_world_size()) if case.members is None else case.members(rank)
    seen = tuple(sorted({case.seen(member) for member in members}))
    return {"outcomes": outcomes, "scales": scales, **compared(whole(outer), reference(seen, case.micro), optimizer)}


def spoil(model: nn.Module) -> None:
    """Let this rank's part of a gradient overflow, and nobody else's."""
    grads: Any = (p.grad for p in model.parameters() if p.grad is not None)
    parts = (getattr(grad, "_local_tensor", grad) for grad in grads)
    part = next(part for part in parts if part.numel())
    if device.type == "cpu":
        part.flatten()[0] = float("inf")
    else:
        registry.resolve("auto", device.type).make_overflow_(part)


def saturates() -> bool:
    """Whether an overflow is a large number and a flag on the device, and no inf."""
    return device.type != "cpu" and registry.resolve("auto", device.type).capabilities(device).overflow == "flag"


def whole(model: Any) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint has them, fp32, by the names of the bare net."""
    state = model.state_dict()
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    assert all(value.dtype == torch.float32 for value in full.values()), {n: v.dtype for n, v in full.items()}
    return {
        name.removeprefix("_orig_mod.").removeprefix("module."): value.detach().cpu().clone()
        for name, value in full.items()
    }


@functools.cache
def reference(seen: tuple[int, ...], micro: int) -> dict[str, torch.Tensor]:
    """The weights of one process in fp64, that leaves the spoilt step out."""
    model = net().double()
    params = list(model.parameters())
    buffers = [torch.zeros_like(p) for p in params]
    for step in range(STEPS):
        if step == SPOILT:
            continue
        losses = [
            loss_of(model(x.double()), y.double()) for s in seen for m in range(micro) for x, y in [batch(step, m, s)]
        ]
        grads = torch.autograd.grad(torch.stack(losses).mean(), params)
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        with torch.no_grad():
            for p, buffer, g in zip(params, buffers, grads, strict=True):
                buffer.mul_(MOMENTUM).add_(g * min(1.0, MAX_NORM / (norm + 1e-6)))
                p.sub_(LR * buffer)
    return {name: p.detach() for name, p in model.named_parameters()}


def compared(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], optimizer: Any) -> dict[str, Any]:
    """How far the weights are from the reference, as a share of the largest move; and digests to compare ranks by."""
    found = {name: found[name] for name in wanted if name in found}  # a spare parameter is of no interest
    start = dict(net().named_parameters())
    moved = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    off = max(float((found[name] - wanted[name]).abs().max()) for name in found)
    digest = hashlib.sha256(b"".join(found[name].numpy().tobytes() for name in sorted(found))).hexdigest()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {"off": off / moved, "weights": digest, "fp32": all(p.dtype == torch.float32 for p in held)}


def dtypes(wrap: Callable[[Any, str], Any]) -> dict[str, list[str]]:
    """By level: the dtype of a gathered weight in a forward, of the output, and of what the optimizer steps."""
    found: dict[str, list[str]] = {}
    for level in LEVELS:
        inner = net().to(device)
        seen: list[torch.dtype] = []
        inner[2].register_forward_pre_hook(lambda module, _, seen=seen: seen.append(module.weight.dtype))
        outer = wrap(inner, level)
        optimizer = torch.optim.SGD(outer.parameters(), lr=LR)
        xamp.initialize(outer, optimizer, level, verbosity=0)
        seen.append(outer(batch(0, 0, 0)[0]).dtype)
        seen += {p.dtype for p in optimizer.param_groups[0]["params"]}
        found[level] = [str(dtype).removeprefix("torch.") for dtype in seen]
    return found


def averages(wrap: Callable[[Any, str], Any]) -> dict[str, dict[str, Any]]:
    """By level: whether evaluating an average changes the training, and how far what it computes is off.

    FSDP keeps the root's whole weights after a forward without backward.
    """

    def trained(level: str, evaluates: bool) -> tuple[list[float], float]:
        model = wrap(net().to(device), level)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        xamp.initialize(model, optimizer, level, verbosity=0)
        average = xamp.ema(model, 0.5)
        by_hand = whole(model)
        losses, off = [], 0.0
        for step in range(STEPS):
            x, target = (each.to(device) for each in batch(step, 0, dist.get_rank()))
            optimizer.zero_grad()
            loss = loss_of(model(x), target)
            with xamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if evaluates:
                with torch.no_grad():
                    model(x)
            average.update()
            by_hand = {name: 0.5 * by_hand[name] + 0.5 * value for name, value in whole(model).items()}
            if evaluates:
                plain = net()
                plain.load_state_dict(by_hand)
                with average.swapped(), torch.no_grad():
                    off = max(off, float((model(x).float().cpu() - plain(x.cpu())).abs().max()))
        return losses, off

    found = {}
    for level in ("O0", "O2"):
        (losses, off), (wanted, _) = trained(level, True), trained(level, False)
        found[level] = {"same": losses == wanted, "off": off}
    return found


def work(
    cases: dict[str, Case],
    others: dict[str, Callable[[], Any]] | None = None,
    on_two_ranks: dict[str, Case] | None = None,
) -> None:
    """Run cases as one rank: the first argument of the script says which. Writes one JSON file.

    Args:
        cases: run at each level, if the script was asked for ``"all"``.
        others: run as well, by name.
        on_two_ranks: if there is any, it takes the place of both where the script was asked for ``"two"``.
    """
    which, folder = sys.argv[1:]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=600))
    found: dict[str, Any] = {}
    if which == "two" and on_two_ranks is not None:
        cases, others = on_two_ranks, None
    for name, case in cases.items():
        for level in LEVELS:
            found[f"{name} {level}"] = train(case, level)
    for name, other in (others or {}).items():
        found[name] = other()
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # see ddp_worker.py
