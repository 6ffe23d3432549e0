"""Registers the entries of the op policies on the CPU anew: a process does so once, at its first session there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from torch.compiler import config

from xamp.casting import autocast
from xamp.casting.ops import fixed_dtype, layers, portable
from xamp.torch_compat import cache_keys

__all__ = ["anew"]


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Register xamp's entries on the CPU anew, inside by the first session there, and again afterwards."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for added in (portable._added, fixed_dtype._added):
        found: Any = added.pop("cpu", None)
        if found is not None:
            found[1]._destroy()
    layers._joins.pop("cpu", None)
    autocast._marks.clear()
    cache_keys.put("cpudtype", "")
    config.cache_key_tag = re.sub(";xamp-cpu-[0-9a-f]+", "", config.cache_key_tag)
