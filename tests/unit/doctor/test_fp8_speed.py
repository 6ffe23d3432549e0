"""``xamp doctor --fp8``: what it measures, how it is told, and who reads it.

Covers: xamp.doctor.fp8_speed, xamp.registry.fp8_widths.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import xamp
from xamp.cli import main
from xamp.contract import Capabilities
from xamp.doctor import fp8_speed
from xamp.doctor.fp8_speed import Row, gains, lines
from xamp.registry import fp8_widths
from xamp.values.recipes import GAINS_FROM, RECIPES

CPU = torch.device("cpu")
SLOW = {"compiled": {1024: 0.9, 2048: 1.1, 4096: 1.3}, "eager": {1024: 2.0}}


def rows(speeds: Any = SLOW, recipe: str = "tensorwise") -> list[Row]:
    """What a device would give on which fp8 is so many times as fast."""
    return [
        Row(form, width, {"bf16": 2.0, recipe: 2.0 / speed}, {})
        for form, found in speeds.items()
        for width, speed in found.items()
    ]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XAMP_CACHE", str(tmp_path / "xamp"))
    return tmp_path / "xamp" / "fp8-widths.json"


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    assert fp8_widths.cache_file() == cache
    monkeypatch.delenv("XAMP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fp8_widths.cache_file() == cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert fp8_widths.cache_file() == tmp_path / ".cache" / "xamp" / "fp8-widths.json"


@pytest.mark.parametrize(
    ("speeds", "wanted"),
    [
        ({1024: 0.9, 2048: 1.1, 4096: 1.3}, 2048),
        ({1024: 1.1, 2048: 0.9, 4096: 1.3}, 4096),  # one that gains below one that does not is chance
        ({1024: 1.1, 2048: 1.1, 4096: 1.0}, None),
        ({1024: 1.1}, 1024),
    ],
)
def test_it_gains_from_where_all_larger_ones_do(speeds: dict[int, float], wanted: int | None) -> None:
    assert gains(rows({"compiled": speeds, "eager": {4096: 9.0}})) == {"tensorwise": wanted}


def test_what_did_not_run_says_nothing_and_is_told() -> None:
    found = [*rows(), Row("compiled", 8192, {"bf16": 2.0}, {"tensorwise": "OutOfMemoryError: no memory"})]
    assert gains(found) == {"tensorwise": 2048}
    text = "\n".join(lines(found, "a card", False))
    assert "compiled, 8192, tensorwise did not run: OutOfMemoryError: no memory" in text
    assert "rehearsal" not in text


def test_the_table() -> None:
    made = [*lines(rows(), "a card, torch 2.13.0", True)]
    assert made[0].startswith("fp8 on a card, torch 2.13.0")
    assert "no forecast" in made[1]
    assert made[3].split() == ["compiled", "1024", "2.00", "ms", "0.90"]
    assert made[-1].split() == ["gains", "from", "2048"]


def test_each_recipe_is_measured_eager_and_compiled_on_this_device(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8_speed, "_ROWS_ON_A_HOST", 32)
    monkeypatch.setattr(fp8_speed, "_SECONDS", 1e-3)
    monkeypatch.setattr(torch, "compile", lambda layer, **_: layer)  # of which other tests are
    assert main(["doctor", "--json", "--fp8", "64"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rehearsal"]
    assert [(row["form"], row["width"]) for row in found["rows"]] == [("compiled", 64), ("eager", 64)]
    for row in found["rows"]:
        assert [*row["milliseconds"]] == ["bf16", *RECIPES]
        assert all(value > 0 for value in row["milliseconds"].values())
        assert not row["errors"]
    assert not cache.exists()  # figures of a rehearsal choose nothing


def test_hardware_with_fp8_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    can = Capabilities(fp8=("tensorwise",))
    monkeypatch.setattr("xamp.backends.cpu.CpuBackend.capabilities", lambda *_: can)
    monkeypatch.setattr(fp8_speed, "measure", lambda *_: iter(rows()))
    assert main(["doctor", "--fp8", "1024"]) == 0  # of larger ones that says nothing
    assert not cache.exists()
    assert main(["doctor", "--fp8"]) == 0
    assert str(cache) in capsys.readouterr().err
    assert fp8_widths.gains_from("tensorwise", CPU) == 2048
    assert fp8_widths.gains_from("rowwise", CPU) == GAINS_FROM["rowwise"]


def test_other_devices_and_releases_keep_theirs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_widths.keep(CPU, {"tensorwise": 512})
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert fp8_widths.gains_from("tensorwise", CPU) == GAINS_FROM["tensorwise"]
    fp8_widths.keep(CPU, {"tensorwise": None})
    assert fp8_widths.gains_from("tensorwise", CPU) == math.inf
    assert len(json.loads(cache.read_text(encoding="utf-8"))) == 2


def test_a_later_run_keeps_what_it_has_not_measured() -> None:
    fp8_widths.keep(CPU, {"tensorwise": 512, "rowwise": 1024})
    fp8_widths.keep(CPU, {"tensorwise": 2048})
    assert [fp8_widths.gains_from(recipe, CPU) for recipe in ("tensorwise", "rowwise")] == [2048, 1024]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cpu": 3}', '{"NAME": {"tensorwise": "wide"}}'])
def test_a_file_that_cannot_be_read_is_none(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text.replace("NAME", fp8_widths.name_of(CPU)), encoding="utf-8")
    assert fp8_widths.gains_from("tensorwise", CPU) == GAINS_FROM["tensorwise"]


def start(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(128, 128), nn.Linear(16, 16))
    return xamp.initialize(model, level="fp8", verbosity=0, **options)


def test_initialize_chooses_by_it() -> None:
    assert [layer.in_fp8 for layer in xamp.session(start()).fp8] == [False] * 3
    fp8_widths.keep(CPU, {"tensorwise": 128})
    session = xamp.session(start())
    assert [layer.in_fp8 for layer in session.fp8] == [False, True, False]
    assert session.policy.fp8_gains_from == 128
    assert session.fp8[0].why == "too small to gain: below 128 x 128"
    fp8_widths.keep(CPU, {"tensorwise": None})
    assert "no width gained" in xamp.session(start()).fp8[1].why
    assert xamp.session(start(keep_bf16=())).policy.fp8_gains_from is None


def test_a_checkpoint_says_it(caplog: pytest.LogCaptureFixture) -> None:
    fp8_widths.keep(CPU, {"tensorwise": 128})
    model = start()
    saved = xamp.state_dict(model)
    assert saved["fp8"] == "tensorwise from a width of 128"
    fp8_widths.keep(CPU, {"tensorwise": 64})
    with caplog.at_level(logging.WARNING):
        xamp.load_state_dict(saved, model)
        assert not caplog.records
        xamp.load_state_dict(saved, start())
        assert "tensorwise from a width of 64" in caplog.text
    plain = xamp.initialize(nn.Linear(4, 4), level="O4", verbosity=0)
    assert "fp8" not in xamp.state_dict(plain)
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        xamp.load_state_dict(saved, plain)
        xamp.load_state_dict(xamp.state_dict(plain), start())
        assert not caplog.records
