"""Files that are no Python: shell scripts, configurations, lists of packages, texts, sources for CUDA's compiler.

:mod:`kinds` says what a file is, :mod:`lines` holds one with its edits, the other modules read one kind each, and
:func:`xamp.port.other.port.port_other` puts them together. What is listed is what
:mod:`xamp.port.vendor_only` knows.
"""
