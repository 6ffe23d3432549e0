"""The logger ``xamp``: it logs on rank 0 only, and to stderr if logging is not configured. xamp never prints."""

from __future__ import annotations

import logging

import torch.distributed as dist

__all__ = ["Once", "is_rank_zero", "say", "say_again"]

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


_generation = [0]


def say_again() -> None:
    """Let each :class:`Once` begin anew: a model was put under a policy, and its user has not been told yet."""
    _generation[0] += 1


class Once:
    """Remembers what was said since a model was last put under a policy."""

    __slots__ = ("_generation", "_said")

    def __init__(self) -> None:
        self._generation = _generation[0]
        self._said: set[str] = set()

    def begin_anew(self) -> bool:
        """Begin anew if a model was put under a policy since; return whether one was."""
        if self._generation == _generation[0]:
            return False
        self._generation = _generation[0]
        self._said.clear()
        return True

    def has(self, what: str) -> bool:
        """Tell whether ``what`` was said."""
        return self._generation == _generation[0] and what in self._said

    def first(self, what: str) -> bool:
        """Tell whether ``what`` is said for the first time, and remember it."""
        self.begin_anew()
        if what in self._said:
            return False
        self._said.add(what)
        return True
