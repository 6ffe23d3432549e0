"""Training through Apex's interface, in cases whose results are in ``tests/data/apex/training.json``.

The driver takes the ``amp`` module as an argument: the same steps run over the last ``apex.amp``, moved to CPU tensors,
and over any other module with its interface. One thread, fixed seeds, no randomness in the steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 50
EARLY = 6  # values are recorded after this many steps, before the kernels of another CPU lead to other results
BATCHES = 10
ROWS = 8
# Printed once in a process, whichever case comes first.
ONCE = ("Warning:  multi_tensor_applier fused unscale kernel", "Attempting to unscale a grad with type")


class Trunk(nn.Module):
    """Convolutions with a batch norm that has weights and one that has none.

    The convolutions have no biases: batch norm cancels a bias, so its gradient would be only rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(2)
        self.second = nn.Conv2d(2, 2, 3, bias=False)
        self.plain = nn.BatchNorm2d(2, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        out: torch.Tensor = self.plain(self.second(hidden))
        return out.flatten(1)


class Head(nn.Module):
    """Linear layers around a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.late = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.inner(x)))
        hidden = hidden + torch.relu(self.late(hidden))
        out: torch.Tensor = self.last(hidden)
        return out


class Net(nn.Module):
    """:class:`Trunk` and :class:`Head` in one model."""

    def __init__(self, trunk: Trunk, head: Head) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.trunk(x))
        return out


@dataclass(frozen=True)
class Injection:
    """An inf written into a model's gradient inside the body of ``scale_loss``.

    Attributes:
        step: the step, counted from 0.
        dtype: the first gradient of this dtype gets the inf; if none has it, the first of all.
        loss: the loss in whose body it is written.
    """

    step: int
    dtype: torch.dtype
    loss: int = 0


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        name: a unique name.
        level: O0 to O3.
        loss_scale: as given to ``amp.initialize``.
        losses: the number of losses, each with its own scaler.
        optimizers: one for one model, or two for a list of two models.
        kind: ``sgd`` or ``adam``.
        steps: the number of optimizer steps.
        injections: where an inf is written.
        late_from: step before which ``Run.late`` is added; None: all parameters are there from the start.
        accumulate: backward passes for each loss and step.
        delay: whether all but the last of these use ``delay_unscale``.
        clip: norm to which master gradients are clipped.
        start: a scale and a count for each loss, which ``amp.load_state_dict`` loads before the first step.
        extra: further arguments of ``amp.initialize``.
    """

    name: str
    level: str
    loss_scale: float | str
    losses: int = 1
    optimizers: int = 1
    kind: str = "sgd"
    steps: int = STEPS
    injections: tuple[Injection, ...] = ()
    late_from: int | None = None
    accumulate: int = 1
    delay: bool = False
    clip: float | None = None
    start: tuple[tuple[float, int], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


LEVELS = ("O0", "O1", "O2", "O3")
INJECTIONS = (Injection(23, torch.float32), Injection(31, torch.float16), Injection(32, torch.float16))


def _grid() -> Iterator[Case]:
    """The combinations of levels, scales, numbers of losses and optimizers, and kinds of optimizer."""
    scales: tuple[float | str, ...] = (128.0, "dynamic")
    for level, scale, losses, optimizers, kind in itertools.product(LEVELS, scales, (1, 2), (1, 2), ("sgd", "adam")):
        injections: tuple[Injection, ...] = INJECTIONS if scale == "dynamic" else ()
        if losses == 2 and injections:
            injections = (*injections, Injection(40, torch.float32, 1), Injection(41, torch.float16, 1))
        name = f"{level} {scale} losses={losses} optimizers={optimizers} {kind}"
        yield Case(name, level, scale, losses, optimizers, kind, injections=injections)


def _more() -> Iterator[Case]:
    """Cases that are not in the grid."""
    inf = (Injection(31, torch.float16),)
    for level, kind in itertools.product(LEVELS, ("sgd", "adam")):
        common: dict[str, Any] = {"level": level, "loss_scale": "dynamic", "kind": kind}
        yield Case(f"{level} added group {kind}", late_from=20, injections=inf, **common)
        yield Case(f"{level} accumulated {kind}", accumulate=3, injections=INJECTIONS, **common)
    for level in LEVELS:
        yield Case(f"{level} accumulated, losses=2 optimizers=2", level, "dynamic", 2, 2, accumulate=2, injections=inf)
        yield Case(f"{level} added group and accumulated", level, 128.0, late_from=20, accumulate=2, clip=0.5)
        yield Case(f"{level} growth", level, "dynamic", start=((2.0**8, 1985),))
        yield Case(f"{level} growth, losses=2", level, "dynamic", 2, start=((2.0**8, 1990), (2.0**6, 1970)))
        yield Case(f"{level} clipped", level, "dynamic", clip=0.1, injections=inf)
        yield Case(f"{level} delayed", level, 64.0, accumulate=2, delay=True)
        yield Case(f"{level} defaults", level, "default")
    ceiling = {"max_loss_scale": 2.0**12}
    yield Case("O2 ceiling", "O2", "dynamic", start=((2.0**11, 1990),), extra=ceiling)
    yield Case("O1 ceiling at once", "O1", "dynamic", extra=ceiling)
    many = tuple(Injection(step, torch.float16) for step in range(5, 15))
    yield Case("O2 floor", "O2", "dynamic", injections=many, extra={"min_loss_scale": 2.0**13})
    yield Case("O1 floor", "O1", "dynamic", injections=many, extra={"min_loss_scale": 2.0**13})
    yield Case("O2 batch norm in fp16", "O2", "dynamic", extra={"keep_batchnorm_fp32": False})
    yield Case("O3 batch norm in fp32", "O3", 128.0, extra={"keep_batchnorm_fp32": "True"})
    yield Case("O2 without masters", "O2", "dynamic", extra={"master_weights": False}, injections=inf)
    yield Case("O3 with masters", "O3", "128.0", extra={"master_weights": True})
    yield Case("O2 outputs in fp16", "O2", "dynamic", extra={"cast_model_outputs": torch.float16})
    yield Case("O1 outputs in fp16", "O1", "dynamic", extra={"cast_model_outputs": torch.float16})
    for level in LEVELS:  # no check: the step is taken
        yield Case(f"{level} inf at a static scale", level, 128.0, steps=12, injections=(Injection(9, torch.float32),))


CASES = (*_grid(), *_more())


def batch(step: int, accumulated: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shape (ROWS, 1, 6, 6) and targets of shape (ROWS, 4), in fp32."""
    made = torch.Generator().manual_seed(1000 + step % BATCHES + 100 * accumulated)
    return torch.randn(ROWS, 1, 6, 6, generator=made), torch.randn(ROWS, 4, generator=made)


class Run:
    """Models and optimizers of a case, after ``amp.initialize``.

    Attributes:
        models: the trained models, as the caller keeps them.
        optimizers: the models' optimizers.
        late: parameters that join the optimizer in the middle of some cases.
    """

    def __init__(self, amp: Any, case: Case) -> None:
        self.amp = amp
        self.case = case
        torch.manual_seed(7)
        trunk, head = Trunk(), Head()
        self.late = [*head.late.parameters(), *trunk.norm.parameters()]  # at O2 some in fp16, some in fp32
        given: dict[str, Any] = dict(case.extra, opt_level=case.level, num_losses=case.losses)
        if case.loss_scale != "default":
            given["loss_scale"] = case.loss_scale
        if case.optimizers == 1:
            net: nn.Module = Net(trunk, head)
            net, optimizer = amp.initialize(net, self._optimizer(net), **given)
            self.models, self.optimizers = [net], [optimizer]
        else:
            optimizers = [self._optimizer(trunk), self._optimizer(head)]
            self.models, self.optimizers = amp.initialize([trunk, head], optimizers, **given)
        if case.start:
            amp.load_state_dict(
                {
                    f"loss_scaler{index}": {"loss_scale": scale, "unskipped": count}
                    for index, (scale, count) in enumerate(case.start)
                }
            )

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        held_back = {id(entry) for entry in self.late} if self.case.late_from is not None else set()
        parameters = [entry for entry in model.parameters() if id(entry) not in held_back]
        if self.case.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)  # an eps that fp16 can hold

    def losses(self, step: int, accumulated: int) -> list[torch.Tensor]:
        """One number for each loss, which share the forward pass."""
        x, target = batch(step, accumulated)
        for model in self.models:
            x = model(x)
        found = [nn.functional.mse_loss(x, target.to(x.dtype)) * 4.0]
        if self.case.losses == 2:
            found.append(x.float().abs().mean() * 0.5)
        return found

    def _inject(self, step: int, loss: int) -> None:
        for injection in self.case.injections:
            if (injection.step, injection.loss) == (step, loss):
                grads = [p.grad for model in self.models for p in model.parameters() if p.grad is not None]
                fitting = [grad for grad in grads if grad.dtype == injection.dtype]
                (fitting or grads)[0].view(-1)[0] = float("inf")

    def backward(self, step: int) -> None:
        """Run backward for all losses of a step."""
        case = self.case
        for accumulated in range(case.accumulate):
            last = accumulated == case.accumulate - 1
            losses = self.losses(step, accumulated)
            for index, loss in enumerate(losses):
                options: dict[str, Any] = {"delay_unscale": True} if case.delay and not last else {}
                optimizers = self.optimizers if case.optimizers > 1 else self.optimizers[0]
                with self.amp.scale_loss(loss, optimizers, loss_id=index, **options) as scaled:
                    scaled.backward(retain_graph=index < len(losses) - 1)
                    if last:
                        self._inject(step, index)

    def step(self, step: int) -> None:
        """One step of every optimizer."""
        if step == self.case.late_from:
            # With the kind's defaults, half the rate.
            self.optimizers[-1].add_param_group({"params": self.late, "lr": 0.005})
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(step)
        for optimizer in self.optimizers:
            if self.case.clip is not None:
                nn.utils.clip_grad_norm_(list(self.amp.master_params(optimizer)), self.case.clip)
            optimizer.step()

    def held(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the models hold them, and the masters in the order of the optimizers' groups."""
        found = {}
        for index, model in enumerate(self.models):
            for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
                found[f"{index}.{name}"] = tensor.detach()
        own = {id(parameter) for model in self.models for parameter in model.parameters()}
        for index, optimizer in enumerate(self.optimizers):
            masters = [entry for entry in self.amp.master_params(optimizer) if id(entry) not in own]
            found |= {f"master {index}.{number}": entry.detach() for number, entry in enumerate(masters)}
        return found


def machine() -> dict[str, str]:
    """What the last bits of a run depend on: the build of torch, and the processor's vector instructions.

    The vendor counts too, because it selects some kernels. A system without ``/proc/cpuinfo`` gives neither vendor nor
    flags, so it matches none of the recorded machines.
    """
    about: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            about.setdefault(name.strip(), value.strip())
    vector = ("amx", "avx", "f16c", "fma", "sse4_")
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "vendor": about.get("vendor_id", ""),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": " ".join(sorted(flag for flag in about.get("flags", "").split() if flag.startswith(vector))),
    }


def recorded_here(machines: list[dict[str, Any]]) -> int | None:
    """The index of the recorded machine with the same bits as this one; None: only the numbers can be compared."""
    here = machine()
    found = [index for index, entry in enumerate(machines) if here.items() <= entry.items()]
    return found[0] if found else None


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The first 32 digits of the SHA-256 of dtypes, shapes and bytes. All nans count as equal."""
    made = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = torch.where(torch.isnan(tensor), torch.full_like(tensor, float("nan")), tensor)
        made.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.contiguous().numpy().tobytes())
    return made.hexdigest()[:32]


def short_hex(number: torch.Tensor) -> str:
    """A number, rounded to fp32, as a hexadecimal float without the digits that are 0."""
    digits, _, exponent = float(number.float()).hex().partition("p")
    return f"{digits.rstrip('0').rstrip('.')}p{exponent}" if exponent else digits


def values(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each floating tensor its dtype, its first entry and the sum of its absolute values, with blanks between."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            wide = tensor.double()
            first, total = short_hex(wide.view(-1)[0]), short_hex(wide.abs().sum())
            found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {first} {total}"
    return found


class _Printed(logging.Handler):
    """Prints log messages unchanged."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[io.StringIO]:
    """Collect what the block prints, as Apex does, or logs through xamp's logger."""
    logger, handler = logging.getLogger("xamp"), _Printed()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            yield out
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def printed(text: str) -> list[str]:
    """The lines of ``text`` without trailing blanks, empty lines, and lines that a process prints only once."""
    lines = [line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(ONCE)]


def runs(entries: Iterable[Any]) -> list[list[Any]]:
    """Run lengths: ``[entry, count]``."""
    return [[entry, sum(1 for _ in group)] for entry, group in itertools.groupby(entries)]


def quiet(amp: Any) -> None:
    """Removes the casts if a case installed them."""
    handle = getattr(amp._amp_state, "handle", None)
    if handle is not None:
        handle._deactivate()


def run(amp: Any, case: Case) -> dict[str, Any]:
    """Run a whole case.

    Args:
        amp: a module with Apex's interface.
        case: one of ``CASES``.

    Returns:
        ``header``, the lines that ``amp.initialize`` printed; ``printed``, step and line of all later lines;
        ``scales``, run lengths of each loss's scale after each step; ``unskipped`` at the end; ``skipped``, for each
        optimizer the steps that did not change its parameters; ``values`` of the held tensors after ``EARLY`` steps,
        and ``sha256`` of those at the end.
    """
    torch.set_num_threads(1)
    try:
        with heard() as out:
            this = Run(amp, case)
        header = printed(out.getvalue())
        later: list[list[Any]] = []
        scales: list[list[float]] = [[] for _ in range(case.losses)]
        skipped: list[list[int]] = [[] for _ in this.optimizers]
        for step in range(case.steps):
            before = [[entry.detach().clone() for entry in _parameters(this, index)] for index in range(len(skipped))]
            with heard() as out:
                this.step(step)
            later += [[step, line] for line in printed(out.getvalue())]
            for index, entry in enumerate(amp.state_dict().values()):
                scales[index].append(entry["loss_scale"])
            if step + 1 == EARLY:
                early = {name: tensor.clone() for name, tensor in this.held().items()}
            for index, kept in enumerate(before):
                if all(torch.equal(*pair) for pair in zip(kept, _parameters(this, index), strict=True)):
                    skipped[index].append(step)
        unskipped = [entry["unskipped"] for entry in amp.state_dict().values()]
        quiet(amp)  # no casts in what follows, which is not a part of the case
        held = this.held()
        return {
            "header": header,
            "printed": later,
            "scales": [runs(entries) for entries in scales],
            "unskipped": unskipped,
            "skipped": skipped,
            "sha256": digest(held.values()),
            "values": values(early),
        }
    finally:
        quiet(amp)


def _parameters(this: Run, index: int) -> list[torch.Tensor]:
    model = this.models[index] if len(this.models) > 1 else this.models[0]
    return list(model.parameters())


CHECKPOINTED = Case("checkpointed", "O2", "dynamic", kind="adam")


def checkpoint(amp: Any, steps: int = 5) -> dict[str, Any]:
    """States as an Apex script saves them: model, optimizer and amp, after some steps of ``CHECKPOINTED``."""
    torch.set_num_threads(1)
    with heard():
        this = Run(amp, CHECKPOINTED)
        for step in range(steps):
            this.step(step)
    states = {
        "model": this.models[0].state_dict(),
        "optimizer": this.optimizers[0].state_dict(),
        "amp": amp.state_dict(),
    }
    quiet(amp)
    return states


def resume(amp: Any, states: dict[str, Any] | None, *, masters_first: bool = False) -> dict[str, Any]:
    """Continues from saved states, in the order of Apex's recipe: initialize, then load model, optimizer and amp.

    Args:
        amp: a module with Apex's interface.
        states: the result of ``checkpoint`` after 5 steps; None runs from step 0 without a break.
        masters_first: make the masters before the optimizer's state is loaded. Apex makes them later, so it loads the
            moments as fp16.

    Returns:
        ``amp``, ``sha256`` and ``values`` after step 10.
    """
    torch.set_num_threads(1)
    with heard():
        this = Run(amp, CHECKPOINTED)
        if states is not None:
            this.models[0].load_state_dict(states["model"])
            if masters_first:
                this.optimizers[0].zero_grad()
            this.optimizers[0].load_state_dict(states["optimizer"])
            amp.load_state_dict(states["amp"])
        for step in range(0 if states is None else 5, 10):
            this.step(step)
    quiet(amp)
    held = this.held()
    return {"amp": dict(amp.state_dict()), "sha256": digest(held.values()), "values": values(held)}
