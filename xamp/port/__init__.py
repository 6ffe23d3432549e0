"""``xamp port``: rewrites training scripts that name CUDA or Ascend, so that they run on every device.

It stands on LibCST, which is imported when the first file is parsed (``pip install xamp[port]``). Nothing of the
scripts is executed or imported. :mod:`xamp.port.engine` ports the text of one file, :mod:`xamp.port.files` finds and
writes files, :mod:`xamp.port.rules` has the rules, and :mod:`xamp.port.rule` is what a rule of another package is
written against.

Modules: ``xamp port``: ``source`` is a parsed file, ``scopes`` knows what its names stand for, ``rule`` is what a
rule is, and ``rules/`` are the rules. They look at a file through ``work``, which collects their edits; ``names`` and
``imports`` do what rules list in tables; ``places`` and ``receivers`` say what a text or a ``.cuda()`` is likely to
be; ``engine`` ports one file, ``notebook`` one notebook (``magics`` hides its lines for IPython), ``files`` finds and
writes many; ``add_amp`` is ``--add-amp``, ``explain``, ``report`` and ``settings`` serve the command. LibCST is used
in ``source`` alone, when a file is parsed; ``files.check_libcst`` only looks whether it is there.
"""

from __future__ import annotations

from xamp.port.rule import Example, Finding, Grade, Rule, Target

__all__ = ["Example", "Finding", "Grade", "Rule", "Target"]
