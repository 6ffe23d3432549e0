"""The kernels of Apex's ``FusedLAMB`` redone on the CPU, in their own order of rounding.

Parameters, moments and gradients are read into fp32, and each result is rounded to the dtype that it is kept in. A sum
of squares is taken as a block of threads takes it: each thread adds four sums of its own, the threads' are added as a
tree, and so are the chunks'. A product that is added to something is rounded once, with the sum. Apex's build computes
quotients and roots within 2 units in the last place; here they are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

THREADS = 512
SUMS = 4  # of each thread
BLOCKS = 320  # of one launch
TENSORS = 110  # of one launch that takes norms
CHUNK = 2048 * 32


class ApexLAMB(torch.optim.Optimizer):
    """Apex's ``FusedLAMB``, which leaves its update in the gradients.

    ``chunk``: how many elements a block takes.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._corrects, self._averages, self._decoupled = bias_correction, grad_averaging, adam_w_mode
        self._max_norm, self._nvlamb, self._chunk, self._step = max_grad_norm, use_nvlamb, chunk, 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self._step += 1
        params = [param for group in self.param_groups for param in group["params"]]
        of_dtype = [
            [p.grad for p in params if p.grad is not None and p.dtype == dtype]
            for dtype in (torch.float32, torch.float16)
        ]
        whole = whole_norm([whole_norm(grads, self._chunk) for grads in of_dtype], self._chunk)
        limit = single(self._max_norm)
        clip = whole / limit if whole > limit else single(1.0)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(param, group, clip)

    def _step_one(self, param: torch.Tensor, group: dict[str, Any], clip: torch.Tensor) -> None:
        assert param.grad is not None
        size = norm(param, self._chunk)
        param.grad.copy_(self._update(param, group, clip))
        changed = norm(param.grad, self._chunk)
        rate = single(group["lr"])
        if (self._nvlamb or group["weight_decay"] != 0) and changed != 0 and size != 0:
            rate = rate * (size / changed)
        param.copy_(fused(-rate, param.grad.float(), param.float()))

    def _update(self, param: torch.Tensor, group: dict[str, Any], clip: torch.Tensor) -> torch.Tensor:
        assert param.grad is not None
        beta1, beta2 = map(single, group["betas"])
        eps, decay = single(group["eps"]), single(group["weight_decay"])
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state.setdefault(name, torch.zeros_like(param))
        old = param.float()
        grad = param.grad.float() / clip
        if not self._decoupled:
            grad = fused(decay, old, grad)
        first = fused(state["exp_avg"].float(), beta1, (1 - beta1 if self._averages else single(1.0)) * grad)
        second = fused(state["exp_avg_sq"].float(), beta2, (1 - beta2) * grad * grad)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        root = (second / self._correction(beta2)).sqrt() + eps
        update = first / self._correction(beta1) / root
        return fused(decay, old, update) if self._decoupled else update

    def _correction(self, beta: torch.Tensor) -> torch.Tensor:
        """The power is fp64's, of a base in fp32."""
        return single(1 - beta.double().item() ** self._step) if self._corrects else single(1.0)


def single(number: float) -> torch.Tensor:
    """A number in fp32, without dimensions."""
    return torch.tensor(number, dtype=torch.float32)


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c``, all fp32, rounded once: the product is exact in fp64."""
    return (a.double() * b.double() + c.double()).float()


def norm(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """The norm of one tensor: each thread of a block adds the sums of some chunks."""
    return _tree(_in_turn(_padded(_squares(tensor, chunk), THREADS).view(-1, THREADS))).sqrt()


def whole_norm(tensors: Sequence[torch.Tensor], chunk: int) -> torch.Tensor:
    """The norm of all tensors together: block 0 of each launch adds its sum to one number, and so on."""
    if not tensors:
        return single(0.0)
    sums = [_squares(tensor, chunk) for tensor in tensors]
    launches = [_padded(launch, BLOCKS) for launch in _launches(sums)]
    return _tree(_padded(_in_turn(torch.stack(launches)), THREADS)).sqrt()


def _launches(sums: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The sums of chunks, sorted by launch: one takes so many chunks, or so many tensors, as its arguments can name."""
    found: list[torch.Tensor] = []
    tensors = 0
    for of_tensor in sums:
        tensors += 1
        for left in reversed(range(len(of_tensor))):
            found.append(of_tensor[len(of_tensor) - 1 - left])
            if len(found) == BLOCKS or (tensors == TENSORS and not left):
                yield torch.stack(found)
                found, tensors = [], 1 if left else 0
    if found:
        yield torch.stack(found)


def _squares(tensor: torch.Tensor, chunk: int) -> torch.Tensor:
    """The sum of squares of each chunk, shape ``[chunks]``."""
    flat = _padded(tensor.detach().float().flatten(), chunk).view(-1, chunk)
    flat = torch.nn.functional.pad(flat, (0, -chunk % (THREADS * SUMS)))
    if tensor.numel() % SUMS == 0:  # four neighbours at once
        parts = flat.view(len(flat), -1, THREADS, SUMS)
    else:
        parts = flat.view(len(flat), -1, SUMS, THREADS).transpose(2, 3)
    sums = torch.zeros_like(parts[:, 0])
    for part in parts.unbind(1):
        sums = fused(part, part, sums)
    return _tree(_in_turn(sums.permute(2, 0, 1)))


def _padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % multiple))


def _in_turn(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, one after another."""
    return list(itertools.accumulate(parts.unbind(0)))[-1]


def _tree(values: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two long: the second half is added to the first, again and again."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]
