"""``xamp port``: rewrites training scripts that name CUDA or Ascend, so that they run on every device.

It stands on LibCST, which is imported when the first file is parsed (``pip install xamp[port]``). Nothing of the
scripts is executed or imported. :mod:`xamp.port.engine` ports the text of one file, :mod:`xamp.port.files` finds and
writes files, :mod:`xamp.port.rules` has the rules, and :mod:`xamp.port.rule` is what a rule of another package is
written against.
"""

from __future__ import annotations

from xamp.port.rule import Example, Finding, Grade, Rule, Target

__all__ = ["Example", "Finding", "Grade", "Rule", "Target"]
