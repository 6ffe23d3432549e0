"""Plots as SVG, for the page of ``xamp compare``: lines, and a map of modules over steps. Colours are the page's."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

__all__ = ["heat", "lines"]

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 14, 34
_LEAST = 2e-4  # of a relative difference: below this a map shows its lightest shade
_POINTS = 400  # of a line: more than that many cannot be seen

Line = tuple[str, str, Mapping[int, float]]
"""Name, class for its colour, and the numbers by step."""


def lines(series: Sequence[Line], *, mark: int | None = None, about: str = "") -> str:
    """Return a plot of some series over the steps.

    Args:
        series: the lines. Numbers that are not finite are left out and marked at the upper edge.
        mark: a step to mark by a vertical line.
        about: what the plot shows, for readers that do not see it.
    """
    finite = [v for _, _, points in series for v in points.values() if math.isfinite(v)]
    steps = [step for _, _, points in series for step in points]
    if not finite:
        return '<p class="none">nothing to show</p>'
    logarithmic = min(finite) > 0 and max(finite) / min(finite) > 50
    scale = _Scale(min(steps), max(steps), min(finite), max(finite), logarithmic)
    body = [*_axes(scale)]
    for name, colour, points in series:
        body.append(_line(scale, _thinned(points), f"{colour} line", name))
        lost = [step for step, value in points.items() if not math.isfinite(value)]
        body += [f'<path class="{colour} dot" d="M{scale.x(s):.1f} {_TOP + 2} l-4 -7 h8 z"/>' for s in lost[:50]]
    if mark is not None:
        x = scale.x(mark)
        body.append(f'<path class="mark" d="M{x:.1f} {_TOP} V{HEIGHT - _BOTTOM}"/>')
    return _svg(body, HEIGHT, about)


def heat(rows: Sequence[tuple[str, Mapping[int, float]]], *, mark: int | None = None, about: str = "") -> str:
    """Return a map: a row for each module, a column for each step, the darker the larger the relative difference.

    Args:
        rows: names and relative differences by step; inf where only one run is finite, nan where neither is.
        mark: a step to frame.
        about: as for :func:`lines`.
    """
    steps = sorted({step for _, points in rows for step in points})
    if not steps:
        return '<p class="none">nothing to show</p>'
    steps = steps[:: max(1, math.ceil(len(steps) / 120))]
    left, tall = 150, 15
    wide = (WIDTH - left - _RIGHT) / len(steps)
    body = []
    for index, (name, points) in enumerate(rows):
        y = 6 + tall * index
        shown = name if len(name) <= 22 else "..." + name[-20:]
        body.append(f'<text x="{left - 6}" y="{y + 11}" text-anchor="end">{html.escape(shown)}</text>')
        body.append(f'<rect class="h0" x="{left}" y="{y}" width="{WIDTH - _RIGHT - left}" height="{tall - 2}"/>')
        for column, step in enumerate(steps):
            if not abs(points.get(step, 0.0)) <= _LEAST:
                body.append(_cell(left + wide * column, y, wide, tall - 2, name, step, points[step]))
    height = 6 + tall * len(rows) + 22
    for column in sorted({0, len(steps) - 1}):
        edge, anchor = (left, "start") if column == 0 else (WIDTH - _RIGHT, "end")
        body.append(f'<text x="{edge}" y="{height - 6}" text-anchor="{anchor}">step {steps[column]}</text>')
    if mark in steps:
        x = left + wide * steps.index(mark)
        body.append(f'<path class="mark" d="M{x:.1f} 3 V{height - 20}"/>')
    return _svg(body, height, about)


class _Scale:
    """Where steps and numbers are on a plot."""

    def __init__(self, first: int, last: int, low: float, high: float, logarithmic: bool) -> None:
        self.first, self.last, self.logarithmic = first, max(last, first + 1), logarithmic
        if logarithmic:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        self.low, self.high = low - room, high + room

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        return HEIGHT - _BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - _BOTTOM - _TOP)

    def marks(self) -> list[float]:
        """Numbers for the vertical axis."""
        if not self.logarithmic:
            return _round_numbers(self.low, self.high)
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        stride = max(1, math.ceil(len(powers) / 6))
        return [10.0**power for power in powers][::stride]


def _round_numbers(low: float, high: float, most: int = 5) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(power * k for k in (1, 2, 5, 10) if power * k >= rough)
    first = math.ceil(low / stride)
    return [stride * k for k in range(first, math.floor(high / stride) + 1)]


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for value in scale.marks():
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f} H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for step in sorted({round(s) for s in _round_numbers(scale.first, scale.last)}):
        x = scale.x(step)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    return parts


def _line(scale: _Scale, points: Sequence[tuple[int, float]], colour: str, name: str) -> str:
    way, pen = [], "M"
    for step, value in points:
        if math.isfinite(value):
            way.append(f"{pen}{scale.x(step):.1f} {scale.y(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    if len(way) == 1:
        x, y = way[0][1:].split()
        dot = f'<circle class="{colour.split()[0]} dot" cx="{x}" cy="{y}" r="3">'
        return f"{dot}<title>{html.escape(name)}</title></circle>"
    return f'<path class="{colour}" d="{" ".join(way)}"><title>{html.escape(name)}</title></path>'


def _thinned(points: Mapping[int, float]) -> list[tuple[int, float]]:
    found = sorted(points.items())
    stride = max(1, math.ceil(len(found) / _POINTS))
    kept = found[::stride]
    return kept if not found or kept[-1] == found[-1] else [*kept, found[-1]]


def _cell(x: float, y: float, wide: float, tall: float, name: str, step: int, value: float) -> str:
    # 1 and inf are the darkest: one shade for each factor of 10^0.5.
    if math.isnan(value):
        told, box = f"{name}, step {step}: neither is finite", _box(x, y, wide, tall)
        return f'<rect class="hn" {box}><title>{html.escape(told)}</title></rect>'
    shade = 8 if not math.isfinite(value) else max(0, min(8, round(2 * (math.log10(max(abs(value), 1e-9)) + 4))))
    told = f"{name}, step {step}: {abs(value):.2g}"
    return f'<rect class="h{shade}" {_box(x, y, wide, tall)}><title>{html.escape(told)}</title></rect>'


def _box(x: float, y: float, wide: float, tall: float) -> str:
    return f'x="{x:.1f}" y="{y}" width="{max(wide - 0.6, 0.8):.1f}" height="{tall}"'


def _svg(body: Sequence[str], height: float, about: str) -> str:
    told = html.escape(about, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{told}">{"".join(body)}</svg>'
