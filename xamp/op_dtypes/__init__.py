"""Which operator a device runs in which dtype, found by calling it; for display and comparison.

Modules: which operator a device runs in which dtype, found by calling it: ``calls`` and ``samples`` are the calls,
``observe`` looks, ``survey`` compares with the table of ``casting/ops``.
"""
