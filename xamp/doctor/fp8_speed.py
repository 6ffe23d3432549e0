"""``xamp doctor --fp8``: how fast linear layers are in each recipe of fp8, over bf16, on the device at hand.

A square layer without a bias, forward and backward, from weights in fp32 as training has them; eager and compiled. On a
CPU, whose hardware has no fp8, this rehearses the command and is no forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.benchmark import Timer

import xamp
from xamp.contract import Backend

__all__ = ["FORMS", "Row", "gains", "lines", "measure"]

FORMS = ("compiled", "eager")
_WIDTHS, _ON_A_HOST = (1024, 2048, 4096, 8192, 16384), (512, 1024)
_ROWS, _ROWS_ON_A_HOST = 4096, 256  # of the input
_SECONDS = 0.3  # each
_BF16 = "bf16"


class Row(NamedTuple):
    """What one width took.

    Attributes:
        form: one of :data:`FORMS`.
        width: inputs and outputs of the layer.
        milliseconds: a forward and a backward, median, by recipe, and of bf16.
        errors: by name, why the others did not run.
    """

    form: str
    width: int
    milliseconds: Mapping[str, float]
    errors: Mapping[str, str]

    def speed(self, recipe: str) -> float | None:
        """Return how many times as fast as bf16 a recipe is; None: one of both did not run."""
        if recipe not in self.milliseconds or _BF16 not in self.milliseconds:
            return None
        return self.milliseconds[_BF16] / self.milliseconds[recipe]


def measure(
    backend: Backend, device: torch.device, say: Callable[[str], None], widths: Sequence[int] = ()
) -> Iterator[Row]:
    """Measure ``widths``, by default those that tell, on ``device``; ``say`` is told what is measured."""
    can = backend.capabilities(device)
    recipes, rehearses = can.fp8 or can.fp8_rehearsed, not can.fp8
    for form in FORMS:
        for width in widths or (_ON_A_HOST if rehearses else _WIDTHS):
            found, errors = {}, {}
            for recipe in (_BF16, *recipes):
                say(f"{form}, {width} x {width}, {recipe}")
                try:
                    found[recipe] = _milliseconds(form, width, recipe, device, _ROWS_ON_A_HOST if rehearses else _ROWS)
                except Exception as error:  # no compiler, no memory: others may run
                    errors[recipe] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            yield Row(form, width, found, errors)


def _milliseconds(form: str, width: int, recipe: str, device: torch.device, rows: int) -> float:
    layer: Any = nn.Linear(width, width, bias=False, device=device)
    level: dict[str, Any] = {"level": "O4"} if recipe == _BF16 else {"level": "fp8", "fp8": recipe, "keep_bf16": ()}
    xamp.initialize(layer, **level, cast_model_outputs=False, verbosity=0)
    if form == "compiled":
        torch.compiler.reset()  # each width is a shape of its own
        layer = torch.compile(layer, dynamic=False)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    weight = next(layer.parameters())

    def step() -> None:
        torch.autograd.grad(layer(x), (x, weight), gradient)

    step()
    timer: Any = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=_SECONDS).median) * 1e3


def gains(rows: Sequence[Row]) -> dict[str, int | None]:
    """Return by recipe the width from which it was faster than bf16, compiled, there and at each larger that ran."""
    compiled = sorted((row for row in rows if row.form == "compiled"), key=lambda row: -row.width)
    recipes = {recipe for row in compiled for recipe in row.milliseconds} - {_BF16}
    found: dict[str, int | None] = {}
    for recipe in sorted(recipes):
        found[recipe] = None
        for row in compiled:
            speed = row.speed(recipe)
            if speed is not None and speed <= 1.0:
                break
            if speed is not None:
                found[recipe] = row.width
    return found


def lines(rows: Sequence[Row], device: str, rehearses: bool) -> Iterator[str]:
    """Yield the table, as lines of text."""
    recipes = list(dict.fromkeys(name for row in rows for name in row.milliseconds if name != _BF16))
    yield f"fp8 on {device}: forward and backward of a linear layer, how many times as fast as bf16"
    if rehearses:
        yield "a rehearsal: this hardware has no fp8, and these figures are no forecast of one that has"
    yield f"  {'':8}  {'width':>6}  {'bf16':>10}" + "".join(f"  {name:>14}" for name in recipes)
    for row in rows:
        own = f"{row.milliseconds[_BF16]:.2f} ms" if _BF16 in row.milliseconds else "-"
        speeds = (row.speed(name) for name in recipes)
        shown = "".join(f"  {'-' if speed is None else format(speed, '.2f'):>14}" for speed in speeds)
        yield f"  {row.form:8}  {row.width:6}  {own:>10}{shown}"
    widths = gains(rows)
    shown = "".join(f"  {widths.get(name) or 'none'!s:>14}" for name in recipes)
    yield f"  {'gains from':8}  {'':>4}  {'':>10}{shown}"
    for row in rows:
        yield from (f"  {row.form}, {row.width}, {name} did not run: {why}" for name, why in row.errors.items())
