"""Each line of the table of what releases of torch do differently, asked of the torch that runs.

Covers: xamp.torch_compat.torch_features.
"""

from __future__ import annotations

import pytest
import torch

from xamp.torch_compat.torch_features import FEATURES, Feature, missing


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_what_is_asked_is_what_the_table_says(feature: Feature) -> None:
    assert feature.is_there() == (torch.__version__ >= feature.since)


@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_each_line_says_what_it_is_and_what_happens_without_it(feature: Feature) -> None:
    assert feature.what.endswith(".")
    assert "\n" not in feature.what
    assert len(feature.without) > 20
    assert not feature.without.endswith(".")


def test_the_table_stays_short() -> None:
    assert len(FEATURES) <= 60


def test_what_is_missing_is_what_came_later() -> None:
    assert [feature.since for feature in missing()] == [
        f.since for f in FEATURES.values() if torch.__version__ < f.since
    ]
