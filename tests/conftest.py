"""Lanes for the tests marked ``device``, and a guard that no test leaves something behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from lanes import Lane, usable_lanes

import xamp


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("xamp")
    group.addoption("--device", action="append", default=[], help="run device tests on this lane only (repeatable)")
    group.addoption("--require", action="append", default=[], help="fail unless this lane is there (repeatable)")


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = [f"torch {torch.__version__}"]
    for report in xamp.available_backends():
        state = "usable: " + ", ".join(report.devices) if report.usable else f"not usable: {report.reason}"
        lines.append(f"lane {report.name}: {state}")
    return lines


def _lanes(config: pytest.Config) -> list[Lane]:
    lanes = usable_lanes()
    names = {str(lane) for lane in lanes}
    missing = [name for name in (*config.getoption("--require"), *config.getoption("--device")) if name not in names]
    if missing:
        raise pytest.UsageError(f"lanes asked for and not usable: {', '.join(missing)} (usable: {', '.join(names)})")
    chosen = config.getoption("--device")
    return [lane for lane in lanes if not chosen or str(lane) in chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lane" in metafunc.fixturenames:
        metafunc.parametrize("lane", _lanes(metafunc.config), ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lane" in getattr(item, "fixturenames", ()):
            item.add_marker("device")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Seed; and fail a test after which autocast, the default dtype or a session is other than before."""
    torch.manual_seed(0)
    before = (torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled())
    yield
    assert (torch.get_default_dtype(), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()) == before
    assert not torch.is_autocast_enabled("cpu"), "autocast was left on"
