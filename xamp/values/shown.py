"""Shows a value in an error message, whatever its ``repr`` does."""

from __future__ import annotations

__all__ = ["said", "shown"]


def shown(value: object) -> str:
    """Return ``repr(value)``; where that raises or is no text, the name of the value's type and what went wrong."""
    try:
        return f"{value!r}"
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def said(error: BaseException) -> str:
    """Return type and text of ``error``; the type alone where its text cannot be read."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
