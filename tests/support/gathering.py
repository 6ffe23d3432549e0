"""Many small cases in one test, which says all that is wrong with them and does not stop at the first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

__all__ = ["cases"]


@contextlib.contextmanager
def cases() -> Iterator[Callable[[object], contextlib.AbstractContextManager[None]]]:
    """Gives a context manager for each case, which takes its name; fails at the end with those that failed."""
    wrong: list[str] = []

    @contextlib.contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")

    yield case
    if wrong:
        pytest.fail(f"{len(wrong)} wrong:\n" + "\n".join(wrong), pytrace=False)
