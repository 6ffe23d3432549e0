"""The state of autocast.

The functions come from ``torch._C`` and not from ``torch``. Libraries that run scripts of one device on another replace
the functions of the same names in ``torch`` by their own, which look up the intended device and which the compiler
cannot trace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = [
    "DisableAutocast",
    "autocast_decrement_nesting",
    "autocast_increment_nesting",
    "clear_autocast_cache",
    "get_autocast_dtype",
    "is_autocast_cache_enabled",
    "is_autocast_enabled",
    "set_autocast_cache_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
]

is_autocast_enabled = torch._C.is_autocast_enabled
set_autocast_enabled = torch._C.set_autocast_enabled
get_autocast_dtype = torch._C.get_autocast_dtype
set_autocast_dtype = torch._C.set_autocast_dtype
is_autocast_cache_enabled = torch._C.is_autocast_cache_enabled
set_autocast_cache_enabled = torch._C.set_autocast_cache_enabled
autocast_increment_nesting = torch._C.autocast_increment_nesting
autocast_decrement_nesting = torch._C.autocast_decrement_nesting
clear_autocast_cache: Callable[[], None] = torch._C.clear_autocast_cache

DisableAutocast = torch._C._DisableAutocast
"""A block in which autocast is off for all devices."""
