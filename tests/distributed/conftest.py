"""What the tests here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from forked_ranks import Ranks


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[Ranks]:
    with Ranks() as ranks:
        yield ranks
