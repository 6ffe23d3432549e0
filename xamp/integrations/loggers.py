"""``log_metrics``: writes the numbers of a session, or of a ``GradScaler``, into any logger.

No logger is imported: they are known by their methods. A number that is not known yet (the norm of gradients before
there are any) is left out. A logger that keeps text only gets one line of it. What this cannot do: it does not draw, it
averages nothing over steps or ranks, and it does not choose the rank that logs.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from xamp.errors import PolicyError
from xamp.sessions.session import session_for

__all__ = ["log_metrics", "numbers_of"]


def log_metrics(logger: Any, obj: Any, step: int | None = None, prefix: str = "xamp/") -> dict[str, float]:
    """Write ``session(obj).metrics()`` into ``logger``.

    ::

        log_metrics(writer, optimizer, step)

    Args:
        logger: a TensorBoard ``SummaryWriter`` (anything with ``add_scalar``); a Lightning or MLflow logger (with
            ``log_metrics``); Fabric or a LightningModule (``log_dict``); wandb, a run of it, an ``Accelerator`` or a
            Trainer (``log``, which takes a dict); a ``logging.Logger``, at level INFO; or a function that is called
            with the numbers and the step.
        obj: a model or optimizer that ``initialize`` was given, a session, a ``GradScaler``, or the numbers themselves.
        step: the step to log at. It is left out where the logger takes none.
        prefix: put before each name.

    Returns:
        What was written.

    Raises:
        PolicyError: ``logger`` has none of these methods.
        StateError: ``obj`` has no session.
    """
    numbers = {prefix + name: value for name, value in numbers_of(obj).items() if not math.isnan(value)}
    write = _writer(logger)
    if write is None:
        raise PolicyError(
            f"log_metrics({type(logger).__name__}): it has none of the methods add_scalar, log_metrics, log_dict, log, "
            "and is no function. Pass a function of the numbers, a dict, and the step."
        )
    write(logger, numbers, step)
    return numbers


def numbers_of(obj: Any) -> Mapping[str, float]:
    """Return the numbers of ``obj``: see the argument of :func:`log_metrics`."""
    if isinstance(obj, Mapping):
        return obj
    own = getattr(obj, "metrics", None) if not _is_trained(obj) else None
    if callable(own):
        return own()  # type: ignore[no-any-return]
    return session_for(f"log_metrics({type(obj).__name__})", obj).metrics()


def _is_trained(obj: Any) -> bool:
    """Whether ``obj`` is a model or an optimizer, whose ``metrics`` would be something else."""
    return hasattr(obj, "named_parameters") or hasattr(obj, "param_groups")


_Write = Callable[[Any, Mapping[str, float], "int | None"], None]


def _writer(logger: Any) -> _Write | None:
    """Return the function that writes into ``logger``; None where it has no method that we know."""
    if isinstance(logger, (logging.Logger, logging.LoggerAdapter)):  # its log() takes a level and a text
        return _to_text
    known: tuple[tuple[str, _Write], ...] = (
        ("add_scalar", _one_by_one),
        ("log_metrics", lambda found, numbers, step: _call(found.log_metrics, numbers, step)),
        ("log_dict", lambda found, numbers, step: _call(found.log_dict, numbers, step)),
        ("log", lambda found, numbers, step: _call(found.log, numbers, step)),
    )
    for name, write in known:
        method = getattr(logger, name, None)
        if callable(method) and "split" not in _parameters(method):  # log_metrics of Hugging Face's Trainer prints
            return write
    return (lambda found, numbers, step: found(dict(numbers), step)) if callable(logger) else None


def _one_by_one(writer: Any, numbers: Mapping[str, float], step: int | None) -> None:
    for name, value in numbers.items():
        writer.add_scalar(name, value, step)


def _call(method: Callable[..., Any], numbers: Mapping[str, float], step: int | None) -> None:
    """Call ``method`` with the numbers, and with the step if it takes one."""
    parameters = _parameters(method)
    takes_step = not parameters or "step" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if step is not None and takes_step:
        method(dict(numbers), step=step)
    else:
        method(dict(numbers))


def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``method``; none where they cannot be found out."""
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return {}


def _to_text(logger: Any, numbers: Mapping[str, float], step: int | None) -> None:
    listed = " ".join(f"{name}={value:g}" for name, value in numbers.items())
    logger.info("%s%s", "" if step is None else f"step {step}: ", listed)
