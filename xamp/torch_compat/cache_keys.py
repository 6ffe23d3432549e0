"""Texts in the keys of the compiler's caches on disk: what changes a graph and is not seen in it.

torch keeps its settings by thread: what one thread writes to ``torch.compiler.config.cache_key_tag`` another does not
see. What xamp changes holds for all threads, so the text goes where torch keeps the value of the environment variable.
"""

from __future__ import annotations

import re
from typing import Any

from torch.compiler import config

from xamp.torch_compat.torch_private.dynamo import config_entries

__all__ = ["put"]


def put(name: str, text: str) -> None:
    """Let ``;xamp-NAME-TEXT`` stand in the keys, in place of what stood there under ``name``; empty: nothing.

    Args:
        name: of letters and digits.
        text: what tells one state from another, without a semicolon.
    """
    own = re.compile(f";xamp-{re.escape(name)}-[^;]*")
    tag = f";xamp-{name}-{text}" if text else ""
    entry: Any = config_entries().get("cache_key_tag")
    if hasattr(entry, "env_value_default") and isinstance(entry.default, str):
        known = entry.env_value_default
        entry.env_value_default = own.sub("", known if isinstance(known, str) else entry.default) + tag
    before = config.cache_key_tag  # where this thread has a value of its own
    after = own.sub("", before) + tag
    if after != before and not (tag and f"{tag};" in f"{before};"):  # one text may begin as another does
        config.cache_key_tag = after
