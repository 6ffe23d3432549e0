"""From which width of a linear layer fp8 gains on a device: as measured there, else by a table that comes with xamp.

``xamp doctor --fp8`` measures, and keeps what it found in a file of the user's cache, by the device's name and torch's
release. Loaded only where fp8 is asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xamp.values.recipes import GAINS_FROM

__all__ = ["cache_file", "gains_from", "keep", "name_of"]


def cache_file() -> Path:
    """Return the path of the file: ``fp8-widths.json`` in ``$XAMP_CACHE``, by default ``~/.cache/xamp``."""
    folder = os.environ.get("XAMP_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xamp"
    return Path(folder) / "fp8-widths.json"


def name_of(device: torch.device) -> str:
    """Return the name under which measurements of ``device`` are kept: another torch has other kernels."""
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda _: device.type)(device)
    return f"{name}, torch {torch.__version__}"


def keep(device: torch.device, widths: Mapping[str, int | None]) -> Path:
    """Write the widths that were measured on ``device``, by recipe, and return the file. None: no width gained."""
    file = cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    kept, name = _kept(), name_of(device)
    found = {**kept, name: {**kept.get(name, {}), **widths}}
    new = file.with_suffix(f".{os.getpid()}")  # another process may read it now
    new.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    new.replace(file)
    return file


def gains_from(recipe: str, device: torch.device) -> float:
    """Return the width of a square layer from which ``recipe`` is faster than bf16 on ``device``; inf: none is."""
    width = _kept().get(name_of(device), {}).get(recipe, GAINS_FROM[recipe])
    return math.inf if width is None else float(width)


def _kept() -> dict[str, dict[str, int | None]]:
    """Return what the file holds that can be read as widths."""
    try:
        found = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # there is none, or no home
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    return {name: {key: row[key] for key in row if _is_width(row[key])} for name, row in rows if isinstance(row, dict)}


def _is_width(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0)
