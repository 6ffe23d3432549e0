"""A compiler that knows nothing yet, for the tests of casts that compile."""

from __future__ import annotations

from collections.abc import Iterator

import compiling
import pytest
import torch._functorch.config


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """And without its cache of graphs: what an entry does may have changed since."""
    compiling.forget()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    compiling.forget()
