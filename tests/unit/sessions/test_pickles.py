"""Pickles of managed models: what they name stays, and those of earlier versions load."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from ci_scripts import module_at
from torch import nn

import xamp
from xamp import pickled
from xamp.casting.forward import region_of

FOLDER = Path(__file__).parents[2] / "data" / "pickles"
FILES = sorted(FOLDER.glob("*/*.pkl"))
LOWER = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}


class _Noting(pickle.Unpickler):
    """Loads a pickle, and notes what of xamp's it finds by name."""

    def __init__(self, text: bytes) -> None:
        super().__init__(io.BytesIO(text))
        self.names: set[tuple[str, str]] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "xamp":
            self.names.add((module, name))
        return super().find_class(module, name)


def names_in(text: bytes) -> set[tuple[str, str]]:
    noting = _Noting(text)
    noting.load()
    return noting.names


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_pickles_of_earlier_versions_load(path: Path) -> None:
    saved: dict[str, Any] = pickle.loads(path.read_bytes())
    model, x, output = saved["model"], saved["input"], saved["output"]
    found = region_of(model)
    assert found is not None
    assert model[0].weight.dtype is LOWER.get(path.stem, torch.float32)
    with torch.no_grad():
        assert torch.allclose(model(x), output, rtol=0.0, atol=2.0**-7)  # kernels differ between processors
    assert model(x).dtype is torch.float32
    assert copy.deepcopy(model)(x).dtype is torch.float32


def test_there_are_files_of_every_level() -> None:
    assert {path.stem for path in FILES if path.parent.name == "0.1.0"} == {"O0", "O1", "O2", "O3", "O4", "O5"}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_pickles_name_only_what_stays(level: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.forward = model.forward  # type: ignore[method-assign]  # an instance attribute hides the class's method
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, level, verbosity=0)
    names = names_in(pickle.dumps(model, protocol=4))
    assert ("xamp.pickled", "rebuild") in names
    assert {module for module, _ in names} == {"xamp.pickled"}
    assert {name for _, name in names} <= set(pickled.__all__)


def test_what_a_session_tells_of_its_steps_is_pickled_under_names_that_stay() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O2", loss_scale=8.0, verbosity=0)
    session = xamp.session(optimizer)
    with xamp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    text = pickle.dumps((session.last_step, session.stats), protocol=4)
    assert names_in(text) == {("xamp.pickled", "StepOutcome"), ("xamp.pickled", "Stats")}
    last_step, stats = pickle.loads(text)
    assert last_step is session.last_step
    assert (stats.applied, stats.skipped) == (1, 0)


def test_an_older_pickle_keeps_the_inputs_that_it_excludes() -> None:
    model = nn.Linear(2, 2)
    xamp.initialize(model, level="O2", cast_model_inputs=("input",), verbosity=0)
    region = region_of(model)
    assert region is not None
    state = dict(vars(region))
    state["spared"] = state.pop("excluded")
    restored = type(region).__new__(type(region))
    restored.__setstate__(state)
    assert restored.excluded == ("input",)
    assert "spared" not in vars(restored)


@pytest.mark.parametrize("name", pickled.__all__)
def test_each_name_leads_back_to_itself(name: str) -> None:
    found = getattr(pickled, name)
    assert (found.__module__, found.__qualname__) == ("xamp.pickled", name)
    assert pickle.loads(pickle.dumps(found)) is found


def test_what_writes_the_files_still_runs() -> None:
    module = module_at(FOLDER / "make.py")
    assert set(module.trained("O2")) == {"model", "input", "output"}
