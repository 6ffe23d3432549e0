"""The page of ``xamp compare``: one HTML file that needs no other, light or dark as the reader's system is."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from xamp.debug.alignment import Comparison
from xamp.debug.plots import heat, lines
from xamp.debug.series import Key, Series, module_order
from xamp.debug.trace_file import Run

__all__ = ["differences", "page"]

_ROWS = 40  # of a map or a table


def page(found: Comparison) -> str:
    """Return the page."""
    mark = found.first.step if found.first is not None else found.turned.step if found.turned is not None else None
    parts = [
        "<header><h1>xamp compare</h1>",
        f'<p class="verdict {"good" if found.same else "bad"}">{html.escape(_verdict(found))}</p>',
        f"<p>{html.escape(found.meaning())}</p></header>",
        '<section class="pair">',
        _card("A", found.a),
        _card("B", found.b),
        "</section>",
        '<section class="grid2">',
        _figure("Loss", lines([*_both(found, Key("loss"))], mark=mark, about="loss of both runs over the steps")),
    ]
    shown = next((p.key for p in found.partings if p.key.kind != "loss"), None)
    if shown is not None:
        parts.append(_figure(str(shown).capitalize(), lines(_both(found, shown), mark=mark, about=str(shown))))
    parts.append(_figure("Loss scale", lines(_rows_of(found, "scale"), mark=mark, about="loss scale of both runs")))
    parts.append(_figure("Norm of all gradients", lines(_norms(found), mark=mark, about="norm of the gradients")))
    for kind, title in (("activation", "Results of modules"), ("gradient", "Gradients"), ("update", "Updates")):
        rows = differences(found, kind)
        if rows:
            cut = "" if len(rows) <= _ROWS else f", the first {_ROWS} of {len(rows)}"
            parts.append(
                _figure(f"{title}: relative difference{cut}", heat(rows[:_ROWS], mark=mark, about=title), "map")
            )
    parts += ["</section>", _table(found), _notes(found)]
    parts.append(f"<footer>Noise: {html.escape(found.noise)}. {found.steps} steps are in both runs.</footer>")
    title = "xamp compare: " + ("the same" if found.same else "they part" if found.partings else "both not finite")
    return _DOCUMENT.format(title=html.escape(title), style=_STYLE, body="\n".join(parts))


def differences(found: Comparison, kind: str) -> list[tuple[str, dict[int, float]]]:
    """Return for each module, in the order of the forward, the relative differences by step; nan: neither is finite."""
    order = module_order(found.a, found.b)
    rows = []
    for key in sorted((k for k in found.series_a if k.kind == kind), key=lambda k: order.get(k.module, 0)):
        a, b = found.series_a[key], found.series_b.get(key, {})
        both = {step: _relative(a[step], b[step]) for step in sorted(a.keys() & b.keys())}
        if both:
            rows.append((key.module or "(model)", both))
    return rows


def _relative(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(b - a) / max(abs(a), abs(b), 1e-30)


def _verdict(found: Comparison) -> str:
    if found.same:
        return "The runs are the same, within noise."
    return found.heading + ("." if found.first is None else f": {found.first}.")


def _both(found: Comparison, key: Key) -> list[tuple[str, str, Series]]:
    return [("A", "a", found.series_a.get(key, {})), ("B", "b", found.series_b.get(key, {}))]


def _rows_of(found: Comparison, name: str) -> list[tuple[str, str, Series]]:
    def series(run: Run) -> dict[int, float]:
        return {s: v for s, row in sorted(run.rows.items()) if not math.isnan(v := getattr(row, name))}

    return [("A", "a", series(found.a)), ("B", "b", series(found.b))]


def _norms(found: Comparison) -> list[tuple[str, str, Series]]:
    def total(series: Mapping[Key, Series]) -> dict[int, float]:
        squares: dict[int, float] = {}
        for key, values in series.items():
            if key.kind == "gradient":
                for step, value in values.items():
                    squares[step] = squares.get(step, 0.0) + value * value
        return {step: math.sqrt(value) for step, value in sorted(squares.items())}

    return [("A", "a", total(found.series_a)), ("B", "b", total(found.series_b))]


def _card(name: str, run: Run) -> str:
    told = {
        "level": run.header.get("level") or "not managed by xamp",
        "lower dtype": run.header.get("dtype"),
        "device": run.header.get("device_name") or run.header.get("device"),
        "torch": run.header.get("torch"),
        "xamp": run.header.get("xamp"),
        "steps": f"{len(run.rows)}, {len(run.samples)} sampled",
        "note": run.header.get("note"),
    }
    rows = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd>" for key, value in told.items() if value
    )
    path = html.escape(run.path)
    title = f'<h2><i class="swatch {name.lower()}"></i>{name} <small>{path}</small></h2>'
    return f'<article class="card">{title}<dl>{rows}</dl></article>'


def _figure(title: str, plot: str, kind: str = "") -> str:
    keys = '<i class="swatch a"></i>A <i class="swatch b"></i>B' if not kind else _shades()
    caption = f'<figcaption>{html.escape(title)} <span class="key">{keys}</span></figcaption>'
    return f'<figure class="{kind}">{caption}{plot}</figure>'


def _shades() -> str:
    boxes = "".join(f'<i class="swatch s{shade}"></i>' for shade in range(9))
    return f"0.0001 {boxes} 1"


def _table(found: Comparison) -> str:
    if not found.partings:
        return ""
    rows = "".join(
        f"<tr><td>{p.step}</td><td>{html.escape(p.key.kind)}</td><td>{html.escape(p.key.module or '(model)')}</td>"
        f"<td>{p.a:.5g}</td><td>{p.b:.5g}</td><td>{abs(p.difference):.2g}</td><td>{p.tolerance:.2g}</td></tr>"
        for p in found.partings[:_ROWS]
    )
    more = "" if len(found.partings) <= _ROWS else f"<p>and {len(found.partings) - _ROWS} more</p>"
    heads = "".join(f"<th>{head}</th>" for head in ("step", "what", "module", "A", "B", "difference", "noise"))
    return (
        f'<section><h2>Where each series parts</h2><div class="scroll"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}</section>"
    )


def _notes(found: Comparison) -> str:
    notes: Sequence[str] = found.notes
    told = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<section><h2>Notes</h2><ul>{told}</ul></section>" if notes else ""


_DOCUMENT = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""

_LIGHT = (
    "--page:#f6f7f9;--card:#ffffff;--ink:#16202e;--soft:#5a6778;--line:#dde3ea;--a:#1f6feb;--b:#c2570c;"
    "--good:#116b3c;--bad:#b3261e;"
    "--h0:#eef2f6;--h1:#dfe7f0;--h2:#c6d7ec;--h3:#a5c3e8;--h4:#f3d9a4;--h5:#f0b35f;--h6:#e2803a;--h7:#c94a25;--h8:#96180f;"
)
_DARK = (
    "--page:#10151c;--card:#18202a;--ink:#e7edf4;--soft:#9aa8b8;--line:#2b3644;--a:#6cb0ff;--b:#ffa45c;"
    "--good:#5fd694;--bad:#ff8a80;"
    "--h0:#1d2733;--h1:#223347;--h2:#29435f;--h3:#32587f;--h4:#6b5a2c;--h5:#96702a;--h6:#c07a2a;--h7:#e2662f;--h8:#ff5340;"
)
_STYLE = (
    ":root{" + _LIGHT + "}@media (prefers-color-scheme:dark){:root{" + _DARK + "}}"
    "*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);"
    "font:16px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    "main{max-width:1100px;margin:0 auto;padding:24px 16px 48px}h1{font-size:1.05rem;color:var(--soft);margin:0 0 4px}"
    "h2{font-size:1.05rem;margin:0 0 8px}h2 small{font-weight:400;color:var(--soft);overflow-wrap:anywhere}"
    ".verdict{font-size:1.3rem;font-weight:650;line-height:1.3;margin:0 0 8px;overflow-wrap:anywhere}"
    ".good{color:var(--good)}.bad{color:var(--bad)}"
    ".pair,.grid2{display:grid;gap:16px;margin:16px 0;"
    "grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}"
    ".card,figure{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;margin:0}"
    "dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}dt{color:var(--soft)}"
    "dd{margin:0;overflow-wrap:anywhere}"
    "figcaption{font-weight:600;margin-bottom:6px;display:flex;flex-wrap:wrap;justify-content:space-between;"
    "gap:4px 12px}"
    ".key{font-weight:400;font-size:.82rem;color:var(--soft);white-space:nowrap}"
    "svg{display:block;width:100%;height:auto}"
    "svg text{font-size:11px;fill:var(--soft)}.swatch{display:inline-block;width:.75em;height:.75em;border-radius:2px;"
    "margin:0 4px 0 6px}.map .swatch{margin:0}.grid{stroke:var(--line);fill:none}"
    ".line{fill:none;stroke-width:1.8;stroke-linejoin:round}.mark{stroke:var(--bad);stroke-dasharray:4 3;fill:none}"
    ".swatch.a{background:var(--a)}.swatch.b{background:var(--b)}path.a.line{stroke:var(--a)}"
    "path.b.line{stroke:var(--b);stroke-dasharray:5 2}.a.dot{fill:var(--a)}.b.dot{fill:var(--b)}"
    "rect.hn{fill:var(--soft);opacity:.35}"
    + "".join(f"rect.h{n}{{fill:var(--h{n})}}.swatch.s{n}{{background:var(--h{n})}}" for n in range(9))
    + ".scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;"
    "font-size:.92rem;background:var(--card)}th,td{text-align:right;padding:5px 10px;"
    "border-bottom:1px solid var(--line)}"
    "th{color:var(--soft);font-weight:500}:is(td,th):is(:nth-child(2),:nth-child(3)){text-align:left}"
    "section{margin:20px 0}ul{margin:0;padding-left:20px}footer,.none{color:var(--soft);font-size:.9rem}"
)
