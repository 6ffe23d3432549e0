"""Tests of real libraries: they run where these are installed, as ``ci/test.sh --libraries`` does."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import warnings
from collections.abc import Iterator

import pytest
import torch
import vision_operators

INSTALLED = importlib.util.find_spec("pytorch_optimizer") is not None  # all of them together, or none
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if INSTALLED:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vision_operators.prepare()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("xamp").addoption("--libraries-json", help="write what the tests of libraries found to this file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # libraries warn of what is theirs


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models are tiny, and sums are to be in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Trainers write RANK's like into the environment, which another library then takes for a launcher's."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--libraries-json", default=None)
    if path:
        from library_loop import buffers, rows

        found = {
            name: sorted((dataclasses.asdict(row) for row in of), key=lambda row: [str(v) for v in row.values()])
            for name, of in (("rows", rows), ("buffers", buffers))
        }
        pathlib.Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
