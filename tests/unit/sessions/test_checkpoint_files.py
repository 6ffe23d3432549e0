"""Files of every schema are read, broken and hostile ones end in an error, and the page about them runs.

Covers: xamp.sessions.checkpoint, xamp.sessions.formats.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_blocks
import pytest
import torch
from checkpoints import Run, everything, load, save, start, train
from faults import flipped, truncated
from lanes import Lane
from stepping import assert_same
from torch import nn
from torch.optim import SGD

import xamp
from xamp.errors import CheckpointError
from xamp.sessions import formats

DATA = Path(__file__).parents[2] / "data" / "checkpoints"
LEVELS = ("O1", "O2")


def read(name: str) -> Any:
    return torch.load(DATA / name, weights_only=True)


def test_each_schema_has_its_files() -> None:
    expected = {f"schema{schema}-{level}.pt" for schema in range(1, formats.SCHEMA + 1) for level in LEVELS}
    assert {path.name for path in DATA.glob("*.pt")} == expected, (
        "run tests/data/checkpoints/make.py, and test them here"
    )


def test_schema_1_at_o1() -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    xamp.initialize(model, optimizer, "O1", verbosity=0)
    xamp.load_state_dict(read("schema1-O1.pt"), optimizer)
    assert xamp.state_dict(optimizer) == {
        "format": "xamp",
        "schema": 1,
        "level": "O1",
        "dtype": "float16",
        "steps": {"applied": 3, "skipped": 6},
        "scalers": [{"dynamic": True, "scale": 1.0, "growth_tracker": 0}],
        "optimizers": [{"overflow_run": 5, "masters": {}}],
        "masters": [{}],
    }


def test_schema_1_at_o2() -> None:
    models: list[Any] = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    xamp.initialize(models, optimizers, "O2", num_losses=2, verbosity=0)
    extra = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    optimizers[1].add_param_group({"params": [extra]})
    xamp.load_state_dict(read("schema1-O2.pt"), models[0])
    stats = xamp.session(models[0]).stats
    assert (stats.applied, stats.skipped) == (7, 1)
    assert [xamp.loss_scale(models[0], i) for i in range(2)] == [128.0, 32.0]
    assert [s["growth_tracker"] for s in xamp.state_dict(models[0])["scalers"]] == [1, 1]
    exact = [[p.flatten().tolist() for p in xamp.master_params(optimizer)] for optimizer in optimizers]
    assert exact == [
        [[0.4998779296875] * 2, [0.4998779296875]],
        [[0.249908447265625] * 2, [0.249908447265625], [3.000244140625] * 2],
    ]
    assert models[0].weight.flatten().tolist() == [0.5, 0.5]
    assert models[1].bias.tolist() == [0.25 - 2.0**-13]
    assert extra.tolist() == [3.0, 3.0]
    assert models[0].state_dict()["bias"].tolist() == [0.4998779296875]


@pytest.mark.parametrize("name", [f"schema1-{level}.pt" for level in LEVELS])
def test_what_is_read_is_written_again(name: str) -> None:
    saved = read(name)
    assert_same(formats.read("call", saved), saved)


# ---------------------------------------------------------------- broken files


class Resumed:
    """A run, and what it takes to see that a load which failed left it as it was."""

    def __init__(self, lane: Lane) -> None:
        self.run = start(lane, "O2")
        train(self.run, lane, range(3))
        self.state, self.before = save(self.run), everything(self.run)
        self._load: Callable[[Any], Any] = docs_blocks.recipe()["load_checkpoint"]

    def refuses(self, path: Any) -> Exception | None:
        """The error with which loading it ends; None where it loaded."""
        try:
            state = self._load(path)["xamp"]
        except Exception as error:  # torch has no class of its own for a file that is broken
            return error
        try:
            xamp.load_state_dict(state, self.run.optimizer)
        except CheckpointError as error:
            assert_same(everything(self.run), self.before)
            return error
        return None


def written(run: Run) -> bytes:
    file = io.BytesIO()
    torch.save(save(run), file)
    return file.getvalue()


def test_a_truncated_file_is_refused(lane: Lane) -> None:
    resumed = Resumed(lane)
    for data in truncated(written(resumed.run), every=13):
        assert resumed.refuses(io.BytesIO(data)) is not None, len(data)
    assert resumed.refuses(io.BytesIO(written(resumed.run))) is None


def test_a_file_with_a_byte_flipped_is_found_by_its_checksums(lane: Lane) -> None:
    """As the docs say, torch does not look at them, and may load other numbers."""
    resumed = Resumed(lane)
    found = 0
    for data in flipped(written(resumed.run), 400, random.Random(0)):
        error = resumed.refuses(io.BytesIO(data))
        if error is None and whole(data):
            assert_same(everything(resumed.run), resumed.before)
        elif error is None:
            load(resumed.run, resumed.state)
        found += not whole(data)
    assert found > 200


def whole(data: bytes) -> bool:
    """What ``python -m zipfile -t`` tells."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            return file.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError):
        return False


class Hostile:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("wrap", ["itself", "value", "key", "master"])
@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_pickle_that_would_execute_does_not(lane: Lane, tmp_path: Path, wrap: str, how: str) -> None:
    resumed = Resumed(lane)
    touched, path = tmp_path / "touched", tmp_path / "checkpoint.pt"
    state: Any = save(resumed.run)
    bad = Hostile(touched)
    if wrap == "itself":
        state = bad
    elif wrap == "value":
        state["xamp"]["level"] = bad
    elif wrap == "key":
        state["xamp"][bad] = 1
    else:
        state["xamp"]["masters"][0]["inner.weight"] = bad
    if how == "torch.save":
        torch.save(state, path)
    else:
        path.write_bytes(pickle.dumps(state, protocol=2))
    assert isinstance(resumed.refuses(path), pickle.UnpicklingError)
    assert_same(everything(resumed.run), resumed.before)
    assert not touched.exists()
    if how == "torch.save":
        torch.load(path, weights_only=False)
        assert touched.exists(), "it would have"


def test_keys_in_another_order_mean_the_same(lane: Lane) -> None:
    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reverse(item) for key, item in reversed(value.items())}
        return [reverse(item) for item in value] if isinstance(value, list) else value

    source = start(lane, "O2", num_losses=2)
    train(source, lane, range(5), overflows=[4])
    state = xamp.state_dict(source.optimizer)
    run = start(lane, "O2", seed=2, num_losses=2)
    xamp.load_state_dict(reverse(state), run.optimizer)
    assert_same(xamp.state_dict(run.optimizer), state)


# ---------------------------------------------------------------- the page


def test_the_page_runs_as_it_stands(lane: Lane, tmp_path: Path) -> None:
    run = start(lane, "O2", optimizer="Adam")
    train(run, lane, range(4), overflows=[2])
    names = docs_blocks.recipe()
    names.update(model=run.model, optimizer=run.optimizer, step=4, path=tmp_path / "checkpoint.pt")
    docs_blocks.run("checkpoints.md", names, 'xamp.state_dict(optimizer),\n        "step": step')
    expected = everything(run)
    assert not (tmp_path / "checkpoint.pt.tmp").exists()
    other = start(lane, "O2", seed=2, optimizer="Adam")
    names.update(model=other.model, optimizer=other.optimizer, step=None)
    docs_blocks.run("checkpoints.md", names, 'step = state["step"]')
    assert names["step"] == 4
    assert_same(everything(other), expected)


def test_the_page_on_scalers_runs_as_it_stands(lane: Lane, tmp_path: Path) -> None:
    run = start(lane, "O1")
    train(run, lane, range(3))
    names = docs_blocks.recipe()
    names.update(model=run.model, optimizer=run.optimizer, old_path=tmp_path / "old.pt")
    state = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 1}
    old = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "scaler": state}
    names["save_checkpoint"](tmp_path / "old.pt", old)
    docs_blocks.run("checkpoints.md", names, 'old["scaler"]')
    assert run.scale == 8.0
    docs_blocks.run("checkpoints.md", names, 'format="torch"))')
    assert names["scaler"].state_dict() == {**state, "growth_interval": 3}


def test_the_page_s_average(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    xamp.initialize(model, level="O5", verbosity=0)
    names = {**docs_blocks.recipe(), "xamp": xamp, "model": model, "average_path": str(tmp_path / "average.pt")}
    average = docs_blocks.run("checkpoints.md", names, "xamp.ema(")["average"]
    plain = torch.nn.Linear(2, 2)
    plain.load_state_dict(average.state_dict()["weights"])
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in plain.named_parameters())


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_page_s_part_by_hand(level: str) -> None:
    model = torch.nn.Linear(2, 2)
    xamp.initialize(model, level=level, verbosity=0)
    state = {"model": {"weight": torch.full((2, 2), 0.5), "bias": torch.ones(3)}}
    bias = model.state_dict()["bias"].clone()
    kept = docs_blocks.run("checkpoints.md", {"model": model, "state": state}, "own[name].copy_(value)")
    model(torch.ones(1, 2))
    assert torch.equal(model.state_dict()["weight"], state["model"]["weight"])
    assert torch.equal(model.state_dict()["bias"], bias)
    assert "own" in kept


def test_no_block_of_the_page_is_left_out() -> None:
    tested = ["def save_checkpoint", '"step": step', 'step = state["step"]', 'old["scaler"]', 'format="torch"))']
    tested += ["class Whole", "dcp.save", "dcp.load(parts", "dcp.load(others"]  # in tests/distributed/test_dcp.py
    tested += ["xamp.ema(", "own[name].copy_(value)"]
    tested += ["of_model, of_optimizer = get_state_dict", "save(sharded,", "load(sharded,"]  # test_resumed.py there
    found = docs_blocks.blocks("checkpoints.md")
    assert len(found) == len(tested)
    assert all(any(word in block for block in found) for word in tested)
