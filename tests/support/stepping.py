"""A model whose gradients are known, and what a test of the training step does again and again.

The gradient of :class:`Dot` is its input, whatever its weights: so in fp32, under autocast and in half precision the
same numbers reach the optimizer (while the scale keeps them in range), and a plain loop in fp32 is an exact oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lanes import Lane
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import xamp

SIZES = (4, 3)
"""Elements of ``Dot.a`` and ``Dot.b``."""


class Part(nn.Module):
    """``weight . x``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Dot(nn.Module):
    """``a . x[:4] + b . x[4:]``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part(SIZES[0])
        self.second = Part(SIZES[1])

    @property
    def a(self) -> nn.Parameter:
        return self.first.weight

    @property
    def b(self) -> nn.Parameter:
        return self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.first(x[: SIZES[0]]) + self.second(x[SIZES[0] :])
        return loss


SCALED = ["O1", "O2", "O2-second-fp32"]
"""The levels that scale; in the third ``b`` stays fp32, so that the optimizer steps a master and a plain parameter."""


def at(level: str) -> dict[str, Any]:
    """The arguments of ``initialize`` for one of :data:`SCALED`, or another level."""
    name, _, partly = level.partition("-")
    return {"level": name, "verbosity": 0, **({"keep_fp32": ["*second"]} if partly else {})}


def inputs(count: int, lane: Lane, seed: int = 1) -> list[torch.Tensor]:
    """Inputs of :class:`Dot`: eighths between -1 and 1, none of them 0, exact in every dtype under every scale here."""
    generator = torch.Generator().manual_seed(seed)
    size = sum(SIZES)
    magnitude = torch.randint(1, 9, (count, size), generator=generator) / 8
    sign = torch.randint(0, 2, (count, size), generator=generator) * 2 - 1
    return list((magnitude * sign).to(lane.device))


def run_backward(
    loss: torch.Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    lane: Lane | None = None,
    spoil: Iterable[torch.Tensor] = (),
    **options: Any,
) -> None:
    """``scale_loss`` and backward; then the device overflows in the gradients of ``spoil``."""
    with xamp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()
        for param in spoil:
            assert lane is not None
            assert param.grad is not None
            lane.overflow_(param.grad)


def iterate(
    model: nn.Module, optimizer: Optimizer, x: torch.Tensor, lane: Lane | None = None, spoil: Sequence[str] = ()
) -> None:
    """One whole iteration, overflowing in the parameters named in ``spoil``."""
    optimizer.zero_grad()
    run_backward(model(x), optimizer, lane, [model.get_parameter(name) for name in spoil])
    optimizer.step()


def plain_iterate(model: nn.Module, optimizer: Optimizer, *xs: torch.Tensor) -> None:
    """The reference: the same in plain torch, with one backward for each of ``xs``."""
    optimizer.zero_grad()
    for x in xs:
        model(x).backward()
    optimizer.step()


def twin(original: Any) -> Any:
    """A copy to run the reference on; of a model, take it before ``initialize``."""
    return copy.deepcopy(original)


def stepped(optimizer: Optimizer) -> list[torch.Tensor]:
    """What the optimizer steps: masters or parameters."""
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def picture(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Everything a step may move, copied."""
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in model.parameters()],
            "model": {key: value.detach() for key, value in model.state_dict().items()},
            "stepped": [stepped(optimizer) for optimizer in optimizers],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    )


def assert_same(now: Any, before: Any, where: str = "") -> None:
    """``now`` is ``before`` bit for bit."""
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
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.cpu()


def assert_follows(optimizer: Optimizer, reference: nn.Module, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """What ``optimizer`` steps is what the parameters of ``reference`` are, and the lowered parameters follow it."""
    found, wanted = stepped(optimizer), [p.detach() for p in reference.parameters()]
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def assert_lowered_follow(model: nn.Module, optimizer: Optimizer) -> None:
    """Each parameter is what the optimizer steps, rounded to the parameter's dtype."""
    for param, master in zip(model.parameters(), stepped(optimizer), strict=True):
        assert torch.equal(param.detach(), master.to(param.dtype))


def outcome(optimizer: Optimizer) -> str | None:
    """What the optimizer's last step did, by name."""
    last = xamp.session(optimizer).last_step
    found = last[optimizer] if isinstance(last, dict) else last
    return None if found is None else found.name


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a tensor's numbers, each of which waits for the device.

    Attributes:
        scalars: reads through the dispatcher: ``item()``, ``bool()``, ``float()``.
        lists: calls of ``tolist()``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scalars = 0
        self.lists = 0
        self._tolist: Any = torch.Tensor.tolist

    def __enter__(self) -> Any:
        def counted(tensor: torch.Tensor) -> Any:
            self.lists += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.scalars += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: SGD(params, lr=0.125, momentum=0.9),
    "SGD-for-loop": lambda params: SGD(params, lr=0.125, momentum=0.9, foreach=False),
    "Adam": lambda params: Adam(params, lr=0.125),
    "AdamW-foreach": lambda params: AdamW(params, lr=0.125, foreach=True),
    "Adagrad": lambda params: Adagrad(params, lr=0.125),
}


def start(lane: Lane, level: str, **options: Any) -> tuple[Any, Optimizer]:
    """A model under xamp, its scale 64 unless told otherwise, and SGD with momentum over it."""
    model = Dot().to(lane.device)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    model, optimizer = xamp.initialize(model, optimizer, **{"init_scale": 64.0, **at(level), **options})
    return model, optimizer


def start_beside(lane: Lane, level: str, **options: Any) -> tuple[Any, Optimizer, Any, Optimizer]:
    """The same with a reference in plain fp32 and its optimizer; the scale is torch's unless told otherwise."""
    model = Dot().to(lane.device)
    reference = twin(model)
    plain = SGD(reference.parameters(), lr=0.125, momentum=0.9)
    optimizer: Optimizer = SGD(model.parameters(), lr=0.125, momentum=0.9)
    model, optimizer = xamp.initialize(model, optimizer, **at(level), **options)
    return model, optimizer, reference, plain
