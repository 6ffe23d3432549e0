"""Benchmarks of the ratios and counts that xamp promises; run ``python -m benchmarks``, README.md describes them."""

import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: for what is counted, not timed
