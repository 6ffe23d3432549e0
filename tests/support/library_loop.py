"""What the tests of real libraries share: a case, the loop that xamp runs, the loops that a person writes by hand.

A :class:`Case` has a model, its batches and a loss. :func:`check` trains it at a level with xamp, and also without it:
by ``torch.autocast`` at O1 and O4, in 16 bits with fp32 masters at O2 and O5, in 16 bits at O3, in fp32 at O0. Both
must come to the same parameters. Then it trains again, with a stop in the middle, and must come to the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.metadata
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import xamp

__all__ = [
    "LEVELS",
    "Buffers",
    "Case",
    "Row",
    "buffers",
    "by_hand",
    "check",
    "exactly",
    "library",
    "loss_of",
    "rows",
    "with_xamp",
]

LEVELS = ("O1", "O2", "O3", "O4", "O5")
DTYPES = {"O1": torch.float16, "O2": torch.float16, "O3": torch.float16, "O4": torch.bfloat16, "O5": torch.bfloat16}
CLOSE = 1e-5  # of the largest parameter: what a fused and a plain form of an optimizer may differ by in some steps
STEPS = 4


def library(name: str) -> Any:
    """Import a library. What it warns of when it is imported is its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: one model at one level."""

    library: str
    version: str
    model: str
    level: str
    within: float
    resumed: bool | None


@dataclasses.dataclass(frozen=True)
class Buffers:
    """What becomes of the floating buffers of an architecture at O5: how far its output is from that in fp32.

    Attributes:
        model: the architecture.
        cast: how many buffers are cast.
        named: those that the warning of ``initialize`` names, without their modules.
        cast_off: the relative difference of the output, as the level casts them.
        kept_off: the same, where ``keep_fp32=`` has the modules that the warning names; None where it names none.
        left_off: the same, by hand with every buffer left in fp32; or the error that ends in.
    """

    model: str
    cast: int
    named: str
    cast_off: float
    kept_off: float | None
    left_off: float | str


rows: list[Row] = []
buffers: list[Buffers] = []
"""What the tests found, for ``--libraries-json``."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes:
        library: the name of the distribution.
        model: its name in the table.
        make: makes the model; called after a seed was set, so that each call makes the same.
        batch: the arguments of the model for one step, by name.
        loss: of what the model returns, in fp32, and the batch.
        optimizer: makes the optimizer of the parameters.
        options: of ``initialize``.
        part: of the model, what is given to ``initialize``.
    """

    library: str
    model: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]
    optimizer: Callable[[Any], Optimizer] = lambda params: SGD(params, lr=0.05, momentum=0.9)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    part: Callable[[nn.Module], nn.Module] = lambda model: model

    def __str__(self) -> str:
        return self.model

    def start(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(1)
        model = self.make()
        return model, self.optimizer([p for p in model.parameters() if p.requires_grad])

    def inputs(self, step: int) -> dict[str, Any]:
        """The batch of a step; what the model draws at random in it is drawn from the same seed in every run."""
        torch.manual_seed(100 + step)
        return self.batch()


def loss_of(output: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss that a model of transformers computes by itself where it is given labels."""
    found: torch.Tensor = output.loss
    return found.float()


def exactly(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of a model, copied."""
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


# ---------------------------------------------------------------- with xamp


def with_xamp(case: Case, level: str, *, stop: bool = False, steps: int = STEPS, **options: Any) -> list[Any]:
    """Train with xamp, and return the model's state after each step; with ``stop``, in two runs and by a file."""
    model, optimizer = case.start()
    given = {"verbosity": 0, "op_policy": "native", **case.options, **options}
    xamp.initialize(case.part(model), optimizer, level, **given)
    found = []
    for step in range(steps):
        if stop and step == steps // 2:
            file = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), xamp.state_dict(optimizer)), file)
            file.seek(0)
            model, optimizer = case.start()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            xamp.initialize(case.part(model), optimizer, level, **given)
            states = torch.load(file, weights_only=False)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            xamp.load_state_dict(states[2], optimizer)
        batch = case.inputs(step)
        optimizer.zero_grad()
        with xamp.scale_loss(case.loss(model(**batch), batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        found.append(exactly(model))
    return found


# ---------------------------------------------------------------- by hand


def lower(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating tensors of a batch."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(lower(item, dtype) for item in value)
    return value


def to_half(model: nn.Module, dtype: torch.dtype, keep: bool) -> None:
    """Cast a model as a person would: not its batch norms if ``keep``, nor buffers of one number."""
    for module in model.modules():
        if keep and isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for param in module._parameters.values():
            if param is not None and param.is_floating_point():
                param.data = param.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dim():
                module._buffers[name] = buffer.to(dtype)


def by_hand(case: Case, level: str, *, steps: int = STEPS) -> list[Any]:
    """Train as a person would without xamp, and return the fp32 weights or masters after each step."""
    model, optimizer = case.start()
    dtype = DTYPES.get(level, torch.float32)
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    if level in ("O2", "O3", "O5"):
        masters = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
        to_half(case.part(model), dtype, keep=level != "O3")
        if level != "O3":
            pairs = [(p, masters[id(p)]) for p in model.parameters() if p.requires_grad and p.dtype == dtype]
            stepped = {id(p): m for p, m in pairs}
            optimizer = case.optimizer([stepped.get(id(p), p) for p in model.parameters() if p.requires_grad])
        else:
            optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
        if case.part(model) is not model:
            case.part(model).register_forward_pre_hook(lambda _, args: lower(args, dtype))
            case.part(model).register_forward_hook(lambda _, args, output: up(output))
    scale = case.options.get("init_scale", 2.0**16) if level in ("O1", "O2") else 1.0
    found = []
    for step in range(steps):
        batch = case.inputs(step)
        for param in model.parameters():
            param.grad = None
        with cast_by_hand(level, dtype):
            spared = case.options.get("cast_model_inputs", ())
            cast = level in ("O2", "O3", "O5") and case.part(model) is model
            given = {k: lower(v, dtype) if cast and k not in spared else v for k, v in batch.items()}
            output = model(**given)
        loss = case.loss(up(output), batch)
        (loss * scale).backward()
        finite = step_by_hand(optimizer, pairs, [p for p in model.parameters() if p.grad is not None], scale)
        scale = scale if finite else scale / 2
        held = {id(p): m for p, m in pairs}
        found.append(
            {
                name: held.get(id(p), p).detach().float().clone()
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )
    return found


def up(output: Any) -> Any:
    """Cast what a model returned to fp32: a tensor, or what is like a dict or a tuple of them."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, dict) and type(output) is not dict:  # a ModelOutput
        made = copy.copy(output)
        for key, value in output.items():
            made[key] = up(value)
        return made
    if isinstance(output, dict):
        return {key: up(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)) and type(output) in (list, tuple):
        return type(output)(up(value) for value in output)
    return output


def cast_by_hand(level: str, dtype: torch.dtype) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype) if level in ("O1", "O4") else contextlib.nullcontext()


def step_by_hand(optimizer: Optimizer, pairs: Any, params: list[nn.Parameter], scale: float) -> bool:
    """Unscale, step if all gradients are finite, and write masters back; return whether they were."""
    for param, master in pairs:
        master.grad = None if param.grad is None else param.grad.float()
    lowered = {id(p) for p, _ in pairs}
    grads = [m.grad for _, m in pairs if m.grad is not None] + [p.grad for p in params if id(p) not in lowered]
    for grad in grads:
        assert grad is not None
        grad.mul_(1.0 / scale)
    finite = all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
    if finite or scale == 1.0:
        optimizer.step()
    with torch.no_grad():
        for param, master in pairs:
            param.copy_(master)
    return finite


# ---------------------------------------------------------------- the check


def distance(found: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]) -> float:
    """The largest difference, in units of the largest parameter."""
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[key].double() - expected[key].double()).abs().max()) for key in expected) / largest


def check(case: Case, level: str, *, close: float = CLOSE, resumes: bool = True, moves: float = 1e-4) -> None:
    """Train at ``level`` with xamp and by hand; stop and resume; note the result for the table.

    Args:
        case: the model.
        level: O1 to O5.
        close: how far both may differ, in units of the largest parameter.
        moves: how far the run must at least come, in the same units.
        resumes: a plain fp32 run resumes exactly: the states of model and optimizer hold all that the optimizer needs.
    """
    found = with_xamp(case, level)
    expected = by_hand(case, level)
    start, _ = case.start()
    moved = distance(found[-1], {name: p.detach() for name, p in start.named_parameters() if p.requires_grad})
    assert moved >= moves, "it did not train"
    within = max(distance(mine, other) for mine, other in zip(found, expected, strict=True))
    resumed = with_xamp(case, level, stop=True)[-1] if resumes else {}
    same = all(torch.equal(resumed[key], found[-1][key]) for key in found[-1]) if resumes else None
    version = importlib.metadata.version(case.library)
    rows.append(Row(case.library, version, case.model, level, within, same))
    assert within <= close
    assert same is not False, (
        f"{[key for key in found[-1] if not torch.equal(resumed[key], found[-1][key])]} differ after resuming"
    )
