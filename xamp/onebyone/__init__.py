"""The pass of :mod:`xamp.onepass` for compilers that lack what tables of addresses need: a launch for each tensor.

``plan`` launches; ``kernels`` computes, by the rules of :mod:`xamp.onepass.kernels`; ``factors`` makes what elements
are multiplied by, and joins norms of tensors, by operators of torch.
"""

from __future__ import annotations

from xamp.onebyone.plan import OneByOne

__all__ = ["OneByOne"]
