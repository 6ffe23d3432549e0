"""Whether the kernels can run on a device."""

from __future__ import annotations

import torch

__all__ = ["refusal"]


def refusal(device: torch.device | str) -> str:
    """Say in one line why the kernels cannot run on ``device``; the empty string where they can.

    Triton is looked for, and imported only where the device could be one of its own. On a CPU they run with
    ``TRITON_INTERPRET=1`` in the environment, set before Triton is first imported: for tests.
    """
    raise NotImplementedError
