"""How many ranks a test of several processes has."""

from __future__ import annotations

import pytest

HOW_MANY = [pytest.param(2, marks=pytest.mark.sample), pytest.param(4, marks=pytest.mark.thorough)]
"""For a test whose cases are the same with any number of ranks: four take the place of two with --all."""
