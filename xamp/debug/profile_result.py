"""What :func:`xamp.debug.profile` found: rows, advice, a table, JSON and a picture."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xamp.debug.measured import Row

__all__ = ["Advice", "Profile"]

_SCHEMA = 1
_WORTH = 0.05  # an advice that takes less than this share of the error away is not shown


@dataclasses.dataclass(frozen=True)
class Advice:
    """What keeping one module in fp32 would change, found by trying.

    Attributes:
        module: qualified name, for ``keep_fp32=[module]``.
        before: the error of the level: the relative errors of the output and of all parameters' gradients, added.
        after: the same with the module in fp32.
        beside: modules that were in fp32 too in this try.

    A part that is not finite counts 1, and besides the mean share that is not finite in the modules' results or
    gradients.
    """

    module: str
    before: float
    after: float
    beside: tuple[str, ...] = ()

    @property
    def modules(self) -> list[str]:
        """All modules of this try, for ``keep_fp32``."""
        return [*self.beside, self.module]

    @property
    def gain(self) -> float:
        """The share of the error that goes away: 1 is all of it; below 0 it grows."""
        return 1.0 - self.after / self.before if self.before > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """A batch at a level against the same batch in full precision.

    Attributes:
        level: the level.
        reference: ``"fp64"`` or ``"fp32"``.
        loss_scale: the loss scale of the run: where it is dynamic, the largest at which the gradients are finite.
        loss, loss_reference: the two losses.
        output_error: relative error of the model's output.
        gradient_error: relative error of all parameters' gradients.
        rows: one for each module, in the order of the forward.
        advice: for each module that was tried in fp32, what it would change; the one that helps most first. Before them
            modules that help only together, with :attr:`Advice.beside`: the largest set first.
        dynamic: the loss scale moves.
    """

    level: str
    reference: str
    loss_scale: float
    loss: float
    loss_reference: float
    output_error: float
    gradient_error: float
    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    dynamic: bool = False

    @property
    def keep_fp32(self) -> list[str]:
        """The modules worth keeping in fp32, the one that helps most first; those that help only together as found."""
        worth = self._worth()
        if worth and worth[0].beside:
            return worth[0].modules
        return [each.module for each in worth]

    def _worth(self) -> list[Advice]:
        return [each for each in self.advice if each.gain >= _WORTH]

    def __str__(self) -> str:
        return self.table()

    def table(self, rows: int | None = None) -> str:
        """Return the result as plain text.

        Args:
            rows: show so many modules, those with the largest error of their own; None: all.
        """
        shown: Sequence[Row] = self.rows
        if rows is not None:
            best = sorted(self.rows, key=lambda row: -row.own)[:rows]
            shown = [row for row in self.rows if row in best]
        heads = ("module", "dtype", "error", "fp32", "to zero", "to inf", "gradient: error", "to zero", "to inf")
        cells = [heads, *(_cells(row) for row in shown)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in cells
        ]
        return "\n".join([*self._head(), "", *(line.rstrip() for line in lines), "", *self._advice()])

    def _head(self) -> list[str]:
        scale = f", loss scale {self.loss_scale:g}" if self.loss_scale != 1.0 else ""
        return [
            f"level {self.level} against {self.reference}{scale}",
            f"loss {self.loss:.6g}, exact {self.loss_reference:.6g}; relative error of the output "
            f"{_short(self.output_error)}, of the gradients {_short(self.gradient_error)}",
            *self._no_scale_helps(),
        ]

    def _no_scale_helps(self) -> list[str]:
        if math.isinf(self.output_error) or (math.isfinite(self.loss_reference) and not math.isfinite(self.loss)):
            return ["The forward gives inf or nan, which no loss scale changes."]
        if self.dynamic and math.isinf(self.gradient_error):
            return [f"No loss scale helps: at {self.loss_scale:g}, the smallest, gradients are still inf or nan."]
        return []

    def _advice(self) -> list[str]:
        if not self.advice:
            return ["No module was tried in fp32."]
        worth, tried = self._worth(), len({name for each in self.advice for name in each.modules})
        if not worth:
            return [f"Of {tried} modules tried in fp32, none takes {_WORTH:.0%} of the error away."]
        lines = [f"Tried in fp32, {tried} modules; what is taken away of the error:"]
        return lines + [f"  {each.gain:4.0%}  keep_fp32={each.modules}" for each in worth]

    def to_json(self) -> str:
        """Return the result as JSON. Numbers that are not finite are texts: "inf", "nan"."""
        return json.dumps(
            {
                "what": "xamp profile",
                "schema": _SCHEMA,
                **{name: _plain(getattr(self, name)) for name in _NUMBERS},
                "no_scale_helps": bool(self._no_scale_helps()),
                "keep_fp32": self.keep_fp32,
                "rows": [{name: _plain(value) for name, value in vars(row).items()} for row in self.rows],
                "advice": [
                    {name: _plain(v) for name, v in {**vars(each), "gain": each.gain, "modules": each.modules}.items()}
                    for each in self.advice
                ],
            },
            indent=1,
        )

    def plot(self, path: str | Path) -> None:
        """Draw errors, losses and advice, into a file whose ending says the format: ``.png``, ``.svg``, ``.pdf``.

        Args:
            path: the file.

        Raises:
            PolicyError: matplotlib is not installed (``pip install 'xamp[debug]'``), or the file cannot be written.
        """
        from xamp.debug.picture import figure, save  # 3 ms with the page it draws beside, for those who draw

        call = f"profile.plot({str(path)!r})"
        rows = [row for row in self.rows if row.module] or list(self.rows)
        rows = sorted(sorted(rows, key=lambda row: -row.own)[:30], key=self.rows.index)
        made, axes = figure(1, 3, (14, max(3.4, 1.8 + 0.3 * len(rows))), call)
        names = [row.module[-30:] or "(model)" for row in rows]
        self._draw_errors(axes[0][0], rows, names)
        self._draw_losses(axes[0][1], rows, names)
        self._draw_advice(axes[0][2])
        made.suptitle(f"{self.level} against {self.reference}", fontsize=13, fontweight="bold")
        save(made, path, call)

    def _draw_errors(self, axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
        places = range(len(rows))
        least, most = 1e-9, 2.0
        for values, colour, label, shift in (
            ([row.error for row in rows], "#1f6feb", "results", -0.2),
            ([row.gradient_error for row in rows], "#c2570c", "gradients", 0.2),
        ):
            shown = [min(max(value, least), most) if not math.isnan(value) else least for value in values]
            axis.barh([place + shift for place in places], shown, height=0.36, color=colour, label=label)
        axis.set_xscale("log")
        axis.set_yticks(list(places), list(names), fontsize=8)
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_title("relative error", fontsize=11, loc="left")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False)

    def _draw_losses(self, axis: Any, rows: Sequence[Row], names: Sequence[str]) -> None:
        grid = [
            [100 * _known(v) for v in (r.underflow, r.overflow, r.gradient_underflow, r.gradient_overflow)]
            for r in rows
        ]
        axis.imshow(grid, aspect="auto", vmin=0, vmax=100, cmap="Oranges", interpolation="nearest")
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                if value > 0:
                    colour = "white" if value > 60 else "black"
                    axis.text(x, y, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)
        axis.set_xticks(
            range(4), ["results\nto zero", "results\nto inf", "gradients\nto zero", "gradients\nto inf"], fontsize=8
        )
        axis.set_yticks(range(len(rows)), list(names), fontsize=8)
        axis.set_title("lost elements, %", fontsize=11)

    def _draw_advice(self, axis: Any) -> None:
        best = self.advice[:15]
        axis.set_title("error that goes away in fp32, %", fontsize=11)
        if not best:
            axis.set_axis_off()
            axis.text(0.5, 0.5, "no module was tried", ha="center", transform=axis.transAxes)
            return
        axis.barh(range(len(best)), [100 * max(each.gain, 0.0) for each in best], color="#116b3c", height=0.6)
        axis.set_yticks(range(len(best)), [" + ".join(each.modules)[-30:] for each in best], fontsize=8)
        axis.set_ylim(len(best) - 0.4, -0.6)
        axis.set_xlim(0, 100)
        axis.grid(axis="x", alpha=0.3)


_NUMBERS = ("level", "reference", "loss_scale", "loss", "loss_reference", "output_error", "gradient_error")


def _cells(row: Row) -> tuple[str, ...]:
    name = (row.module or "(model)") + f" ({row.kind})" + (f" x{row.calls}" if row.calls > 1 else "")
    forward = (_short(row.error), _short(row.fp32_error), _share(row.underflow), _share(row.overflow))
    backward = (_short(row.gradient_error), _share(row.gradient_underflow), _share(row.gradient_overflow))
    return (name, row.dtype, *forward, *backward)


def _short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1e}" if math.isfinite(value) else "inf"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else "0" if value == 0 else f"{100 * value:.3g} %"


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
