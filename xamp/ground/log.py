"""The logger ``xamp``: it logs on rank 0 only, and to stderr if logging is not configured. xamp never prints."""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["is_rank_zero", "say"]

_logger = logging.getLogger("xamp")
_stderr = logging.StreamHandler()
_stderr.setFormatter(logging.Formatter("xamp: %(message)s"))


def is_rank_zero() -> bool:
    """Tell whether this process is the one that logs."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def say(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log ``message % args`` on rank 0.

    Without a configured handler, Python would drop all messages below WARNING. Users must see the settings that are in
    force, so this function then writes to stderr.
    """
    if not is_rank_zero():
        return
    if _logger.hasHandlers():
        _logger.log(level, message, *args)
    elif not _logger.disabled and level >= (_logger.level or logging.INFO):
        _stderr.handle(_logger.makeRecord(_logger.name, level, "xamp", 0, message, args, None))
