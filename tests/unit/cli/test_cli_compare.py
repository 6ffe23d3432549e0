"""``xamp compare``: exit codes, texts, page, picture and JSON; and what the comparison says of planted differences.

Covers: xamp.cli.compare, xamp.debug.alignment, xamp.debug.comparison, xamp.debug.page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import xamp
from xamp.cli import main
from xamp.debug import compare, read
from xamp.debug.series import Key
from xamp.debug.trace_file import frame, names_frame, rows_frame, sample_frame

MODULES = ("first", "second")


def wave(step: int, seed: float) -> float:
    """A number around 1 that is different at each step, and nearly the same for near seeds."""
    return 1.0 + 0.1 * ((step * 7919 + 13) % 17) / 17 + seed


def write(
    path: Path, change: Callable[[str, str, int, float], float], steps: int = 30, seed: float = 0.0, every: int = 1
) -> Path:
    """Write a trace of two modules; ``change`` gets kind, module, step and number."""
    header = {"what": "xamp trace", "schema": 1, "torch": "2", "xamp": "0", "device": "cpu", "dtype": "float16"}
    content = frame("H", json.dumps({**header, "level": "O1", "note": "<b>&"}).encode())
    content += names_frame(MODULES, [f"{module}.weight" for module in MODULES], MODULES)
    for step in range(steps):
        value = wave(step, seed)
        numbers = []
        for module in MODULES:
            numbers += [change("activation", module, step, value), 3.0, 0.0]
        for module in MODULES:
            numbers += [change("gradient", module, step, value), change("weights", module, step, 5.0)]
            numbers.append(change("update", module, step, value / 100))
        content += sample_frame(step, numbers) if step % every == 0 else b""
        row = [change("loss", "", step, value), 1024.0, change("skipped", "", step, 0.0), value]
        content += rows_frame(step, row)
    path.write_bytes(content + frame("E", b""))
    return path


def same(kind: str, module: str, step: int, value: float) -> float:
    return value


FAULTS: dict[str, tuple[Callable[[str, str, int, float], float], tuple[int, str | None, str], str]] = {
    "update": (lambda k, m, s, v: v * 3 if k == "update" and s >= 9 else v, (9, "first", "update"), "factor, 3"),
    "gradient": (
        lambda k, m, s, v: v * 2 if k in ("gradient", "update") and m == "second" and s >= 4 else v,
        (4, "second", "gradient"),
        "backward parts",
    ),
    "activation": (
        lambda k, m, s, v: v * 0.5 if k in ("activation", "loss") and m != "first" and s >= 12 else v,
        (12, "second", "activation"),
        "forward parts",
    ),
    "loss": (lambda k, m, s, v: v + 1 if k == "loss" and s >= 3 else v, (3, None, "loss"), "between two samples"),
    "nan": (
        lambda k, m, s, v: float("nan") if k == "gradient" and m == "first" and s == 17 else v,
        (17, "first", "gradient"),
        "Only run B has inf or nan",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_step_module_and_kind(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, expected, told = FAULTS[fault]
    a, b = write(tmp_path / "a", same), write(tmp_path / "b", change, seed=1e-4)
    assert main(["compare", str(a), str(b), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["module"], found["kind"]) == expected
    assert told in found["meaning"]
    assert main(["compare", str(a), str(b)]) == 1
    assert f"They part at step {expected[0]}" in capsys.readouterr().out


def test_noise_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", same), write(tmp_path / "b", same, seed=1e-3)
    assert main(["compare", str(a), str(b)]) == 0
    assert "agree within noise over 30 steps" in capsys.readouterr().out


def test_a_third_run_says_what_noise_is(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", same), write(tmp_path / "b", same, seed=0.04)
    c, quiet = write(tmp_path / "c", same, seed=-0.03), write(tmp_path / "q", same, seed=1e-5)
    assert not compare(*map(read, (a, b))).same
    assert compare(*map(read, (a, b, c))).same
    assert not compare(*map(read, (a, b, quiet))).same


# ---------------------------------------------------------------- numbers that cannot be compared

NAN = float("nan")


def from_batch(kind: str, module: str, step: int, value: float) -> float:
    """A batch of step 9 holds nan, and the step takes it into the weights."""
    return NAN if kind != "skipped" and step >= 9 + (kind == "weights") else value


def from_update(kind: str, module: str, step: int, value: float) -> float:
    """The update of step 8 makes the weights of the second module nan."""
    if kind == "update" and (module, step) == ("second", 8):
        return NAN
    return NAN if step >= 9 and kind != "skipped" and (module != "first" or kind in ("gradient", "update")) else value


def between(kind: str, module: str, step: int, value: float) -> float:
    return NAN if step >= 13 and kind != "skipped" else value


def at_once(kind: str, module: str, step: int, value: float) -> float:
    return NAN if kind != "skipped" and step >= (kind == "weights") else value


def skipped(kind: str, module: str, step: int, value: float) -> float:
    """Step 4 overflows, is skipped, and all goes on."""
    return value if step != 4 or kind == "weights" else 1.0 if kind == "skipped" else 0.0 if kind == "update" else NAN


def masks(kind: str, module: str, step: int, value: float) -> float:
    """The first module returns -inf where it masks."""
    return float("inf") if kind == "activation" and module == "first" else value


TURNED = {
    "batch": (
        from_batch,
        1,
        9,
        (9, "activation", "first"),
        "The update of step 9 took it into the weights of first, s",
    ),
    "update": (from_update, 1, 9, (9, "weights", "second"), "The update of step 8, in second, brought it into the"),
    "between": (between, 10, 13, (20, "weights", "first"), "An update after step 10 brought it into the weights of f"),
    "at once": (at_once, 1, 0, (0, "activation", "first"), "The weights were finite before step 0, so it came in ther"),
}


@pytest.mark.parametrize("case", TURNED)
def test_runs_that_both_turn_to_nan_are_not_the_same(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, every, step, (seen, kind, module), origin = TURNED[case]
    a, b = write(tmp_path / "a", change, every=every), write(tmp_path / "b", change, seed=1e-4, every=every)
    page = tmp_path / "page.html"
    assert main(["compare", str(a), str(b), "--json", "-", "--html", str(page), "--png", str(tmp_path / "p.png")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["same"], found["step"], found["partings"]) == (False, None, [])
    turned = found["turned"]
    assert [turned[name] for name in ("step", "seen", "kind", "module")] == [step, seen, kind, module]
    assert origin in turned["origin"]
    assert f"agree within noise over the {step} steps before" in found["meaning"]
    assert turned["run"] == (8 if case == "update" else step)
    assert f"Run step {turned['run']} in xamp.debug.find_nonfinite" in found["meaning"]
    assert any("numbers could not be compared: neither run's is finite" in note for note in found["notes"])
    text = page.read_text(encoding="utf-8")
    assert f"Both have inf or nan from step {step} on" in text
    assert "neither is finite" in text
    assert main(["compare", str(a), str(b)]) == 1
    assert f"Both have inf or nan from step {step} on" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "count"), [(skipped, 3), (masks, 30)], ids=["skipped", "masks"])
def test_nan_that_passes_or_is_meant_is_counted(
    change: Callable[[str, str, int, float], float], count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = write(tmp_path / "a", change), write(tmp_path / "b", change, seed=1e-4)
    assert main(["compare", str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "agree within noise over 30 steps" in text
    assert re.search(rf"note: {count} of \d+ numbers could not be compared", text)


def test_a_loss_that_is_not_given_is_no_nan(tmp_path: Path) -> None:
    """It is given at every fifth step, and the run ends in between."""

    def record(name: str, losses: list[float | None]) -> Path:
        with xamp.trace(tmp_path / name) as recorder:
            for loss in losses:
                recorder.step(loss)
        return tmp_path / name

    some = [1.0 if step % 5 == 0 else None for step in range(40)]
    found = compare(read(record("a", some)), read(record("b", some)))
    assert (found.same, found.notes, list(found.series_a[Key("loss")])) == (True, [], list(range(0, 40, 5)))
    lost = [None if loss is None or step < 20 else NAN for step, loss in enumerate(some)]
    found = compare(read(record("c", lost)), read(record("d", lost)))
    assert found.heading == "Both have inf or nan from step 20 on"
    with pytest.raises(xamp.PolicyError, match="no number of the same step is in both"):
        compare(read(record("e", [None])), read(record("f", [None])))


def test_of_one_run_that_turns_it_is_said_what_brought_it(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", same), write(tmp_path / "b", from_update, seed=1e-4)
    found = compare(read(a), read(b))
    assert found.turned is None
    assert found.first is not None
    assert found.first.step == 8  # the update
    assert found.meaning().startswith("Only run B has inf or nan there")
    late = compare(read(write(tmp_path / "c", same, every=10)), read(write(tmp_path / "d", between, every=10)))
    assert late.first is not None
    assert (late.first.step, late.module, late.heading) == (13, None, "They part at step 13")
    assert "An update after step 10 brought it into the weights" in late.meaning()
    assert "smaller `every`" in late.meaning()


def test_no_noise_is_taken_from_a_run_that_is_nan(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", same), write(tmp_path / "b", FAULTS["update"][0])
    third = write(tmp_path / "c", from_batch, seed=1e-4)
    found = compare(read(a), read(b), read(third))
    assert found.first is not None
    assert (found.first.step, found.first.key.kind) == (9, "update")
    assert any("third run" in note and "from step 9 on" in note for note in found.notes)
    assert compare(read(a), read(write(tmp_path / "d", same, seed=1e-4)), read(third)).same


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.plots = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.plots += tag == "svg"
        self.links += [str(value) for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "path", "rect", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag
        else:
            assert tag in ("path", "rect", "circle")


def test_page_picture_and_json(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a<&", same), write(tmp_path / "b", FAULTS["update"][0])
    files = {option: tmp_path / f"out.{option}" for option in ("html", "png", "json")}
    options = [word for option, path in files.items() for word in (f"--{option}", str(path))]
    assert main(["compare", str(a), str(b), *options]) == 1
    text = files["html"].read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert (page.open, page.links, page.plots) == ([], [], 7)
    assert "prefers-color-scheme:dark" in text
    assert "&lt;b&gt;&amp;" in text
    assert re.search(r"They part at step 9, module first", text)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert json.loads(files["json"].read_text())["factor"] == pytest.approx(3.0)
    healthy = tmp_path / "healthy.html"
    assert main(["compare", str(a), str(a), "--html", str(healthy)]) == 0
    assert "the same, within noise" in healthy.read_text(encoding="utf-8")


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path / "a", same)
    other = write(tmp_path / "other", same, steps=0)
    words = [
        (["compare", str(a), str(tmp_path / "absent")], "cannot be read"),
        (["compare", str(a), __file__], "is no trace"),
        (["compare", str(a), str(other)], "no number of the same step is in both"),
        (["compare", str(a), str(a), "--html", str(tmp_path / "no" / "a.html")], "cannot be written"),
    ]
    for command, told in words:
        assert main(command) == 2
        assert told in capsys.readouterr().err
    assert main(["compare", str(a)]) == 2
