"""The pass of :mod:`xamp.onepass` for compilers that lack what tables of addresses need: a launch for each tensor.

``plan`` makes the factors of a step by operators of torch and launches; ``kernels`` computes, by the rules of
:mod:`xamp.onepass.kernels`. SGD and Adam only.
"""

from __future__ import annotations

from xamp.onebyone.plan import OneByOne

__all__ = ["OneByOne"]
