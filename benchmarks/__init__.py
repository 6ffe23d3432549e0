"""Benchmarks of the ratios and counts that xamp promises; run ``python -m benchmarks``, README.md describes them."""
