"""A model with known gradients, for which a plain fp32 loop is an exact reference; and comparison of states to the bit.

The gradient of :class:`Dot` is its input, whatever its weights are. So in fp32, under autocast and in half precision
the same numbers reach the optimizer, as long as the scale keeps them in range.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

import xamp
from xamp.testing.lane import Lane
from xamp.torch_compat import kernels

__all__ = [
    "LR",
    "Dot",
    "Pair",
    "assert_follows",
    "assert_same",
    "clip",
    "closeness",
    "inputs",
    "iterate",
    "outcome",
    "picture",
    "plain_iterate",
    "run_backward",
    "sgd",
    "start",
    "step_alike",
    "stepped",
]

SIZES = (4, 3)
"""Elements of ``Dot.first.weight`` and ``Dot.second.weight``."""

LR = 0.125

_ONE_PASS = 2e-6
"""How far a run of some steps in one pass may be from torch's: each number of a step is within 2 units of fp64's."""


class Part(nn.Module):
    """``weight . x``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(size,) -> ()."""
        return (self.weight * x).sum()


class Dot(nn.Module):
    """``first . x[:4] + second . x[4:]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part(SIZES[0])
        self.second = Part(SIZES[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(7,) -> ()."""
        loss: torch.Tensor = self.first(x[: SIZES[0]]) + self.second(x[SIZES[0] :])
        return loss


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model under xamp and its twin, the same model in plain fp32, each with its own optimizer, in the same form."""

    model: Any
    optimizer: Any
    plain_model: Any
    plain_optimizer: Any

    def __post_init__(self) -> None:
        step_alike(self.plain_optimizer, self.optimizer)


def step_alike(plain: Optimizer, optimizer: Optimizer) -> None:
    """From now on ``plain`` makes each step in the form that xamp chose for the same step of ``optimizer``.

    Two forms of an optimizer round differently: Adam's fused kernel on CUDA keeps its betas in fp32, and is 2e-6 from
    its loop after two steps. So a comparison to the last digits needs the same form on both sides. Where the user left
    the form open and xamp fused it, every step is fused but the first one of a parameter, which makes its state.
    """
    fused: list[dict[str, Any]] = []

    def before(*_: Any) -> None:
        groups = zip(plain.param_groups, optimizer.param_groups, strict=False)  # one of both may have got a new group
        if all(_has_state(plain, group, p) for group in plain.param_groups for p in group["params"]):
            fused.extend(mine for mine, its in groups if mine.get("fused") is None and its.get("fused"))
        for group in fused:
            group["fused"] = True
            for param in group["params"]:
                state = plain.state.get(param, {})
                if torch.is_tensor(step := state.get("step")):  # a fused kernel needs it there
                    state["step"] = step.to(param.device, torch.float32)

    def after(*_: Any) -> None:
        for group in fused:
            group["fused"] = None
        fused.clear()

    plain.register_step_pre_hook(before)
    plain.register_step_post_hook(after)


def _has_state(optimizer: Optimizer, group: dict[str, Any], param: torch.Tensor) -> bool:
    """Whether a step of ``param`` finds its state, needs none, or does not happen."""
    return param.grad is None or group.get("momentum") == 0 or bool(optimizer.state.get(param))


def closeness(optimizer: Optimizer) -> float:
    """How near a run is to that of a twin: 0 where torch steps both in one form, which is equal bit for bit."""
    managed = getattr(optimizer, "_xamp", None)
    return 0.0 if managed is None or managed.state.gradients.one_pass is None else _ONE_PASS


def sgd(params: Any) -> Optimizer:
    """SGD with momentum."""
    return SGD(params, lr=LR, momentum=0.9)


def start(lane: Lane, level: str, make: Any = sgd, **options: Any) -> Pair:
    """Make a :class:`Dot` at ``level`` and its twin in fp32.

    Args:
        lane: Where; the clause ends there if it does not declare the level.
        level: Its name.
        make: From parameters to an optimizer, for both.
        **options: For ``initialize``; the scale starts at 64 unless they say otherwise.
    """
    lane.need(level)
    model = Dot().to(lane.device)
    plain = copy.deepcopy(model)
    plain_optimizer, optimizer = make(plain.parameters()), make(model.parameters())
    xamp.initialize(model, optimizer, level=level, **{"init_scale": 64.0, "verbosity": 0, **options})
    return Pair(model, optimizer, plain, plain_optimizer)


def inputs(count: int, lane: Lane, seed: int = 1) -> list[torch.Tensor]:
    """Inputs for :class:`Dot`, (7,): multiples of 1/8 from -1 to 1 without 0, exact in every dtype and scale."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.randint(1, 9, (count, sum(SIZES)), generator=generator) / 8
    sign = torch.randint(0, 2, (count, sum(SIZES)), generator=generator) * 2 - 1
    return list((magnitude * sign).to(lane.device))


def run_backward(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    lane: Lane | None = None,
    spoil: Iterable[torch.Tensor] = (),
    **options: Any,
) -> None:
    """Run ``scale_loss`` and backward; then make the device of ``lane`` overflow in the gradients of ``spoil``."""
    with xamp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()
        for param in spoil:
            assert lane is not None
            assert param.grad is not None
            lane.overflow_(param.grad)


def iterate(model: Any, optimizer: Any, x: torch.Tensor, lane: Lane | None = None, spoil: Sequence[str] = ()) -> None:
    """Run one whole iteration; the gradients of the parameters named in ``spoil`` overflow."""
    optimizer.zero_grad()
    run_backward(model(x), optimizer, lane, [model.get_parameter(name) for name in spoil])
    optimizer.step()


def plain_iterate(model: Any, optimizer: Any, *xs: torch.Tensor) -> None:
    """Run the same iteration in plain torch, as the reference, with one backward for each of ``xs``."""
    optimizer.zero_grad()
    for x in xs:
        model(x).backward()
    optimizer.step()


def clip(params: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip as plain torch does; by its operators on lists where the device has them."""
    held = list(params)
    foreach = kernels.foreach_of([param.grad for param in held if param.grad is not None])
    return torch.nn.utils.clip_grad_norm_(held, max_norm, norm_type, foreach=foreach)


def stepped(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors that the optimizer steps: masters or parameters."""
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def picture(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """A copy of everything that a step may change."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "model": {key: value.detach() for key, value in model.state_dict().items()},
            "stepped": [stepped(optimizer) for optimizer in optimizers],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    )


def outcome(optimizer: Optimizer) -> str | None:
    """The name of the outcome of the optimizer's last step, such as ``"APPLIED"``."""
    last = xamp.session(optimizer).last_step
    found = last[optimizer] if isinstance(last, dict) else last
    return None if found is None else found.name


def assert_follows(pair: Pair, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Check that xamp's optimizer steps the twin's values, and that the model's parameters are these values rounded.

    Bit for bit, unless tolerances are given, or kernels of xamp's step in one pass: the same gradients reach both, and
    the same form steps both.
    """
    found, wanted = stepped(pair.optimizer), [p.detach() for p in pair.plain_model.parameters()]
    least = closeness(pair.optimizer)
    torch.testing.assert_close(found, wanted, rtol=max(rtol, least), atol=max(atol, least))
    for param, master in zip(pair.model.parameters(), found, strict=True):
        assert torch.equal(param.detach(), master.to(param.dtype)), "a parameter does not follow its master"


def assert_same(now: Any, before: Any, where: str = "") -> None:
    """Check that ``now`` equals ``before``, bit for bit."""
    assert type(now) is type(before), where
    if isinstance(before, torch.Tensor):
        assert now.dtype == before.dtype, where
        assert now.shape == before.shape, where
        assert torch.equal(_bits(now), _bits(before)), f"{where} moved"
    elif isinstance(before, dict):
        assert list(now) == list(before), where
        for key, value in before.items():
            assert_same(now[key], value, f"{where}[{key!r}]")
    elif isinstance(before, (list, tuple)):
        assert len(now) == len(before), where
        for index, value in enumerate(before):
            assert_same(now[index], value, f"{where}[{index}]")
    else:
        assert now == before, where


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous()
    return flat.view(-1).view(torch.uint8) if flat.numel() else flat
