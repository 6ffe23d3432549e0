"""The logger ``xamp``: rank 0 only, and to stderr where nobody configured logging. Nothing is ever printed."""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["is_rank_zero", "say"]

_logger = logging.getLogger("xamp")
_stderr = logging.StreamHandler()
_stderr.setFormatter(logging.Formatter("xamp: %(message)s"))


def is_rank_zero() -> bool:
    """Whether this process is the one that logs."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def say(message: str, *args: object, level: int = logging.INFO) -> None:
    """Log ``message % args`` on rank 0.

    Where no handler is configured, Python's own last resort would drop everything below WARNING; an effective setting
    that nobody sees is no setting, so it goes to stderr.
    """
    if not is_rank_zero():
        return
    if _logger.hasHandlers():
        _logger.log(level, message, *args)
    elif not _logger.disabled and level >= (_logger.level or logging.INFO):
        _stderr.handle(_logger.makeRecord(_logger.name, level, "xamp", 0, message, args, None))
