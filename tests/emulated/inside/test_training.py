"""Training on the card and on the CPU, from the same start on the same data: losses and weights alike.

Covers: backends.npu.emulation.kernels, backends.npu.backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

npu: Any = torch.get_device_module("npu")
Data = Callable[[], tuple[torch.Tensor, ...]]
Loss = Callable[..., torch.Tensor]


def train(
    make: Callable[[], nn.Module], data: Data, loss: Loss, optimizer: Any = None, tolerance: float = 1e-5
) -> None:
    """Four steps on each device; compares losses, parameters and buffers."""
    courses, states = [], []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = make().to(device)
        stepped = (optimizer or (lambda params: SGD(params, lr=0.05)))(list(model.parameters()))
        course = []
        for step in range(4):
            torch.manual_seed(100 + step)
            batch = [tensor.to(device) for tensor in data()]
            stepped.zero_grad()
            value = loss(model, *batch)
            value.backward()
            stepped.step()
            course.append(value.item())
        courses.append(course)
        states.append([tensor.detach().cpu() for tensor in model.state_dict().values()])
    assert all(math.isfinite(value) for value in courses[1])
    assert courses[1] == pytest.approx(courses[0], rel=tolerance, abs=tolerance)
    torch.testing.assert_close(states[1], states[0], rtol=20 * tolerance, atol=20 * tolerance)


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def images() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 8, 8), torch.randint(5, (4,))


def vectors() -> tuple[torch.Tensor, ...]:
    return torch.randn(8, 6), torch.randint(5, (8,))


def sequences() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 5, 6), torch.randint(5, (4,))


def tokens() -> tuple[torch.Tensor, ...]:
    return torch.randint(11, (4, 3)), torch.randint(5, (4,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )


def unet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, 1),
        nn.GroupNorm(2, 4),
        nn.LeakyReLU(),
        nn.ConvTranspose2d(4, 4, 2, 2),
        nn.InstanceNorm2d(4, affine=True),
        nn.ELU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Upsample(scale_factor=2),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 5),
    )


def normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 5)
    )


class Recurrent(nn.Module):
    def __init__(self, layer: Any, **options: Any) -> None:
        super().__init__()
        self.layer = layer(6, 7, batch_first=True, **options)
        self.head = nn.Linear(14 if options.get("bidirectional") else 7, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.layer(x)[0].mean(1))
        return made


class Packed(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 3, 2]), batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        made: torch.Tensor = self.head(out.sum(1))
        return made


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        made: torch.Tensor = self.head(self.encoder(self.into(x), mask=mask).mean(1))
        return made


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 24)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        made: torch.Tensor = self.head(mixed.transpose(1, 2).flatten(2).mean(1))
        return made


class Views(nn.Module):
    """Writes into views of what autograd watches, and reads by index."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x).clone()
        x[:, 1:3] *= 2.0
        x[:, -1].add_(x[:, 0])
        x[x > 1.0] = 1.0
        order = torch.arange(5, device=x.device).flip(0)
        made: torch.Tensor = self.head(x[:, order].transpose(0, 1)[2:4].sum(0))
        return made


def spectral() -> nn.Module:
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(inner, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(6, 5)))


class Words(nn.Module):
    def __init__(self, *, bag: bool = False, **options: Any) -> None:
        super().__init__()
        self.table: Any = (nn.EmbeddingBag if bag else nn.Embedding)(11, 5, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.table(x)
        return made if made.dim() == 2 else made.mean(1)


def penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    value: torch.Tensor = (found.norm(dim=1) - 1).square().mean() + cross_entropy(model, x, y)
    return value


def by_sample(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradients of each sample by vmap and grad, beside the loss."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def one(at: dict[str, torch.Tensor], sample: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, at, (sample[None],))
        return F.cross_entropy(out, target[None])

    each = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(values, x, y)
    norm = torch.stack([grad.flatten(1).square().sum(1) for grad in each.values()]).sum()
    return cross_entropy(model, x, y) * (1.0 + norm)


def clipped(params: list[nn.Parameter]) -> Any:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(params, 0.1)

    optimizer = SGD(params, lr=0.5)
    optimizer.register_step_pre_hook(clip)
    return optimizer


CASES: dict[str, tuple[Any, ...]] = {
    "cnn": (cnn, images, cross_entropy),
    "unet": (unet, images, cross_entropy),
    "norms": (normed, vectors, cross_entropy),
    "lstm": (lambda: Recurrent(nn.LSTM), sequences, cross_entropy),
    "lstm, two layers, both ways": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        sequences,
        cross_entropy,
    ),
    "lstm, packed": (lambda: Packed(nn.LSTM), sequences, cross_entropy),
    "gru": (lambda: Recurrent(nn.GRU), sequences, cross_entropy),
    "gru, packed, two layers": (lambda: Packed(nn.GRU, num_layers=2), sequences, cross_entropy),
    "rnn": (lambda: Recurrent(nn.RNN), sequences, cross_entropy),
    "rnn, both ways, no bias": (lambda: Recurrent(nn.RNN, bidirectional=True, bias=False), sequences, cross_entropy),
    "transformer": (Transformer, sequences, cross_entropy),
    "transformer, not training": (lambda: Transformer().eval(), sequences, cross_entropy),
    "attention": (Attention, sequences, cross_entropy),
    "views": (Views, sequences, cross_entropy),
    "spectral norm": (spectral, vectors, cross_entropy),
    "gradients by sample": (mlp, vectors, by_sample),
    "embedding": (lambda: Words(padding_idx=0), tokens, cross_entropy),
    "embedding, sparse": (lambda: Words(sparse=True), tokens, cross_entropy),
    "embedding, max_norm": (lambda: Words(max_norm=1.0), tokens, cross_entropy),
    "bag, SparseAdam": (
        lambda: Words(bag=True, sparse=True),
        tokens,
        cross_entropy,
        lambda params: SparseAdam(params, lr=0.01),
    ),
    "gradient penalty": (mlp, vectors, penalty),
    "clipping": (mlp, vectors, cross_entropy, clipped),
    "SGD": (mlp, vectors, cross_entropy, lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True)),
    "Adam": (mlp, vectors, cross_entropy, lambda p: Adam(p, lr=0.01, amsgrad=True)),
    "AdamW": (mlp, vectors, cross_entropy, lambda p: AdamW(p, lr=0.01)),
    "AdamW, fused": (mlp, vectors, cross_entropy, lambda p: AdamW(p, lr=0.01, fused=True)),
    "Adam, foreach": (mlp, vectors, cross_entropy, lambda p: Adam(p, lr=0.01, foreach=True)),
    "RMSprop": (mlp, vectors, cross_entropy, lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True)),
    "Adagrad": (mlp, vectors, cross_entropy, lambda p: Adagrad(p, lr=0.01)),
    "SGD, fused": (mlp, vectors, cross_entropy, lambda p: SGD(p, lr=0.05, momentum=0.9, fused=True)),
    "Adam, fused": (mlp, vectors, cross_entropy, lambda p: Adam(p, lr=0.01, fused=True)),
    "AdamW, amsgrad, maximize": (
        mlp,
        vectors,
        cross_entropy,
        lambda p: AdamW(p, lr=0.01, amsgrad=True, maximize=True, foreach=True),
    ),
    "Adadelta": (mlp, vectors, cross_entropy, lambda p: Adadelta(p, lr=0.5)),
    "Adafactor": (mlp, vectors, cross_entropy, lambda p: Adafactor(p, lr=0.01)),
    "Adamax": (mlp, vectors, cross_entropy, lambda p: Adamax(p, lr=0.01)),
    "NAdam": (mlp, vectors, cross_entropy, lambda p: NAdam(p, lr=0.01)),
    "RAdam": (mlp, vectors, cross_entropy, lambda p: RAdam(p, lr=0.01)),
    "ASGD": (mlp, vectors, cross_entropy, lambda p: ASGD(p, lr=0.01)),
    "Rprop": (mlp, vectors, cross_entropy, lambda p: Rprop(p, lr=0.01)),
}


@pytest.mark.parametrize("name", CASES)
def test_training_goes_as_on_the_cpu(name: str) -> None:
    train(*CASES[name])


def test_two_models_against_each_other() -> None:
    """A generator and a critic with a gradient penalty, each with its own optimizer."""
    found = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        maker = nn.Linear(3, 6).to(device)
        critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        steps = Adam(maker.parameters(), lr=0.01), Adam(critic.parameters(), lr=0.01)
        for _ in range(3):
            real, noise = torch.randn(4, 6).to(device), torch.randn(4, 3).to(device)
            fake = maker(noise)
            between = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            loss = critic(fake.detach()).mean() - critic(real).mean() + (slope.norm(dim=1) - 1).square().mean()
            steps[1].zero_grad()
            loss.backward()
            steps[1].step()
            steps[0].zero_grad()
            (-critic(fake).mean()).backward()
            steps[0].step()
        found.append([p.detach().cpu() for p in (*maker.parameters(), *critic.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_lbfgs_runs_its_closure_as_on_the_cpu() -> None:
    found = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = mlp().to(device)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
        x, y = (tensor.to(device) for tensor in vectors())

        def closure(model: nn.Module = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> torch.Tensor:
            optimizer.zero_grad()
            value = cross_entropy(model, x, y)
            value.backward()
            return value

        found.append([optimizer.step(closure).item() for _ in range(3)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert found[1][-1] < found[1][0]
