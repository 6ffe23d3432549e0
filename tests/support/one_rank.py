"""A process group of one rank in the process of a test, over gloo and without a network."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

__all__ = ["begin", "end", "one_rank"]


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """For a block."""
    begin()
    try:
        yield
    finally:
        end()


def begin() -> None:
    """Make the group."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def end() -> None:
    """Destroy it.

    torch 2.7 waits for gloo's threads and holds the interpreter's lock meanwhile, for which one of them waits if it has
    the last reference to a tensor of Python. In the pause it gets that lock.
    """
    time.sleep(0.01)
    dist.destroy_process_group()
