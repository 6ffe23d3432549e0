"""Train on several devices, with DDP or FSDP2: ``torchrun --nproc-per-node 2 examples/distributed/train.py``.

The same script runs on GPUs, NPUs and CPUs: it names no device and no communication library. README.md has the rest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import xamp

TEXT = Path(__file__).resolve().parents[1] / "sonnet.txt"
LENGTH, WIDTH, HEADS, DEPTH, BATCH = 32, 64, 4, 2, 8


class Block(nn.Module):
    """Causal attention and a wide layer. FSDP2 gathers one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of ``x``; shape (n, length, width)."""
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.into(self.first(x)).chunk(3, -1))
        found = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        added: Tensor = self.wide(self.second(x))
        return x + added


class GPT(nn.Module):
    """A small GPT over characters."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next character at each place; shapes (n, length) and (n, length, letters)."""
        x = self.letters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def main(words: Sequence[str] | None = None) -> float:
    """Train, print the loss on rank 0, and return it: the mean over the ranks."""
    options = read_options(words)
    dist.init_process_group(xamp.distributed_backend())
    xamp.accel.set_device(int(os.environ.get("LOCAL_RANK", "0")) % xamp.accel.device_count())
    device, rank = xamp.device(), dist.get_rank()

    text = TEXT.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])

    torch.manual_seed(0)  # all ranks start from the same weights
    model: nn.Module = GPT(len(letters)).to(device)
    model, optimizer = prepare(model, options)
    torch.manual_seed(1 + rank)  # and each has data of its own
    for step in range(options.steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
        batch = torch.stack([data[start : start + LENGTH + 1] for start in starts]).to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        with xamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        xamp.clip_grad_norm_(optimizer, 1.0)  # the norm of the whole gradient, on every rank
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            skipped = xamp.session(optimizer).last_step is xamp.StepOutcome.SKIPPED
            print(f"step {step}: {'skipped' if skipped else 'applied'}, scale {xamp.loss_scale(optimizer):g}")

    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    if rank == 0:
        ranks = f"{dist.get_world_size()} ranks on {device.type}, {options.engine}, {options.level}"
        print(f"{ranks}: loss {mean.item():.4f}")
    dist.destroy_process_group()
    return mean.item()


def prepare(model: nn.Module, options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Put the model under the engine and the level, and make its optimizer. The two engines differ in the order."""
    if options.engine == "ddp":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = xamp.initialize(model, optimizer, level=options.level)
        return DistributedDataParallel(model), optimizer
    mesh = init_device_mesh(xamp.device_type(), (dist.get_world_size(),))
    policy = xamp.fsdp_policy(options.level)  # in which dtype FSDP gathers weights and reduces gradients
    blocks = model.get_submodule("blocks")
    for block in blocks.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = xamp.initialize(model, optimizer, level=options.level)
    return model, optimizer


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; ``words`` None means those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="ddp", help="who shares the work (ddp)")
    parser.add_argument("--level", default="O1", help="a level of xamp (O1)")
    parser.add_argument("--steps", type=int, default=300, help="how many steps to train (300)")
    parser.add_argument("--quick", action="store_true", help="5 steps, to see that it runs")
    options = parser.parse_args(words)
    if options.quick:
        options.steps = 5
    return options


if __name__ == "__main__":
    main()
