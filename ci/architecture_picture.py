"""Draws docs/architecture.svg from the imports: each box of the core and each package around it, above all it imports.

    python ci/architecture_picture.py            # writes the picture
    python ci/architecture_picture.py --check    # fails where the picture is not that of the code

An arrow that a longer way implies is left out. Line counts and dates are left out too, so that the picture changes only
when a module comes, goes or moves, or when a box or package imports another one for the first or the last time.
"""

from __future__ import annotations

import ast
import html
import pathlib
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence

import grimp

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, MARGIN, GAP, FLOOR_GAP = 1120, 24, 16, 44
TITLE, LINE, CHARACTER = 20, 15, 6.1  # heights of a title and a line of modules, width of a character, in pixels
BOXES = {  # of the core, with their packages from the top down; every other package is drawn by itself
    "face": ("sessions",),
    "step": ("scaling",),
    "casting": ("casting",),
    "kernels": ("updates", "plans", "onepass"),
    "devices": ("backend_kit", "registry", "contract"),
    "ranks": ("distributed",),
    "policy": ("policy",),
    "values": ("values", "errors"),
    "torch": ("torch_compat",),
}
SHOWN_WITH = {"__main__": "cli"} | {package: box for box, packages in BOXES.items() for package in packages}
TOOLS = ("cli", "debug", "doctor", "port", "run", "op_dtypes", "testing")  # all others are the core: see pyproject.toml


def wing_of(module: str) -> str:
    """The box, else the package or the single module at the top, that ``module`` is in; empty for xamp itself."""
    name = module.split(".")[1] if "." in module else ""
    return SHOWN_WITH.get(name, name)


def imports() -> dict[str, set[str]]:
    """Each box or package -> those that it imports."""
    graph = grimp.build_graph("xamp", include_external_packages=False, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        above = wing_of(module)
        below = {wing_of(name) for name in graph.find_modules_directly_imported_by(module)}
        if above:
            found.setdefault(above, set()).update(below - {above, ""})
    return found


def floors(arrows: Mapping[str, set[str]]) -> dict[str, int]:
    """Each package -> its floor: 0 on the ground, else one above the highest that it imports."""
    known: dict[str, int] = {}

    def floor(package: str) -> int:
        if package not in known:
            known[package] = 1 + max((floor(below) for below in arrows[package]), default=-1)
        return known[package]

    return {package: floor(package) for package in arrows}


def direct(arrows: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no longer way implies."""

    def reach(package: str) -> set[str]:
        return {below for step in arrows[package] for below in (step, *reach(step))}

    return [
        (above, below)
        for above, steps in sorted(arrows.items())
        for below in sorted(steps)
        if not any(below in reach(other) for other in steps - {below})
    ]


def file_of(package: str) -> pathlib.Path:
    """The folder of a package, or the file of a single module."""
    path = ROOT / "xamp" / package
    return path if path.is_dir() else path.with_suffix(".py")


def modules_of(package: str) -> list[str]:
    """The modules of a package, folders with a slash; none for a single module."""
    folder = file_of(package)
    if not folder.is_dir():
        return []
    inside = (path for path in folder.iterdir() if not path.name.startswith("__"))
    names = [
        f"{path.name}/" if path.is_dir() else path.stem for path in inside if path.is_dir() or path.suffix == ".py"
    ]
    return sorted(name for name in names if name != "ledger/")


def says(package: str) -> str:
    """The first sentence of a package's docstring."""
    file = file_of(package)
    file = file / "__init__.py" if file.is_dir() else file
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.sub(r":\w+:`~?([\w.]+)`", r"\1", text.partition("\n")[0]).replace("``", "")
    return re.split(r"(?<=\.) |; ", first)[0].rstrip(".") + "."


def called(package: str) -> str:
    """A package as it is named in the picture: folders with a slash."""
    return package + "/" if file_of(package).is_dir() else package + ".py"


class Box:
    """One box or package as it is drawn.

    Attributes:
        x, y: its upper left corner, in pixels.
        lines: the text below its title, each line with its class in the style sheet.
    """

    def __init__(self, name: str, width: float) -> None:
        characters = int((width - 20) / CHARACTER)
        self.name = name
        self.title = name if name in BOXES else called(name)
        self.width = width
        self.x = self.y = 0.0
        self.lines: list[tuple[str, str]] = []
        for package in BOXES.get(name, (name,)):
            said = f"{called(package)}: {says(package)}" if name in BOXES else says(package)
            self.lines += [("s", line) for line in textwrap.wrap(said, characters)]
            self.lines += [("m", line) for line in textwrap.wrap(",  ".join(modules_of(package)), characters)]
        self.height = TITLE + 12 + LINE * len(self.lines)

    def svg(self) -> str:
        """The box."""
        kind = "box" if self.name in BOXES else "tool" if self.name in TOOLS else "core"
        parts = [
            f'<rect class="{kind}" x="{self.x:.0f}" y="{self.y:.0f}" rx="6" '
            f'width="{self.width:.0f}" height="{self.height:.0f}"/>',
            f'<text class="t" x="{self.x + 10:.0f}" y="{self.y + TITLE:.0f}">{html.escape(self.title)}</text>',
        ]
        for number, (kind, line) in enumerate(self.lines, 1):
            y = self.y + TITLE + LINE * number
            parts.append(f'<text class="{kind}" x="{self.x + 10:.0f}" y="{y:.0f}">{html.escape(line)}</text>')
        return "\n".join(parts)


def lay_out(rows: Sequence[Sequence[str]]) -> tuple[dict[str, Box], float]:
    """Places each row's boxes side by side, the first row at the top; returns them and the height of the whole."""
    boxes: dict[str, Box] = {}
    y = float(MARGIN) + LINE + GAP
    for row in rows:
        share = [max(12, 3 + sum(len(modules_of(package)) for package in BOXES.get(name, (name,)))) for name in row]
        free = WIDTH - 2 * MARGIN - GAP * (len(row) - 1)
        x = float(MARGIN)
        for package, part in zip(row, share, strict=True):
            width = free * part / sum(share) if len(row) > 1 else min(free, 720)
            box = boxes[package] = Box(package, width)
            box.x, box.y = x if len(row) > 1 else (WIDTH - width) / 2, y
            x += width + GAP
        y += max(boxes[package].height for package in row) + FLOOR_GAP
    return boxes, y - FLOOR_GAP + MARGIN


STYLE = """
svg { font-family: ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif }
.box { fill: #dfeaf8; stroke: #55779f; stroke-width: 1.6 }
.core { fill: #eef2f6; stroke: #a3b3c6 } .tool { fill: #fbf7ee; stroke: #cdbb92 } .page { fill: #ffffff; stroke: none }
.t { font-size: 14px; font-weight: 600; fill: #14263d } .s { font-size: 11.5px; fill: #3d4f66 }
.m { font-size: 11px; fill: #5d7391 } path { fill: none; stroke: #7d92ad; stroke-width: 1.3 }
"""


def _legend(kind: str, x: float, text: str) -> str:
    square = f'<rect class="{kind}" x="{x}" y="{MARGIN}" width="{LINE}" height="{LINE}" rx="3"/>'
    return f'{square}<text class="s" x="{x + LINE + 8}" y="{MARGIN + 12}">{text}</text>'


def draw() -> str:
    """The whole picture."""
    arrows = imports()
    storey = floors(arrows)
    rows = [sorted(w for w in arrows if storey[w] == floor) for floor in sorted(set(storey.values()), reverse=True)]
    boxes, height = lay_out(rows)
    ways = []
    for above, below in direct(arrows):
        a, b = boxes[above], boxes[below]
        x1, y1, x2, y2 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y - 3
        bend = (y2 - y1) / 2
        ways.append(
            f'<path d="M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}" '
            'marker-end="url(#head)"/>'
        )
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head += '<path d="M0 0 L8 4 L0 8 z" style="fill: #7d92ad; stroke: none"/></marker>'
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    title = "The boxes of xamp and the packages around them: an arrow leads to what is imported"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
            f"<title>{title}</title><style>{STYLE}</style><defs>{head}</defs>",
            '<rect class="page" width="100%" height="100%"/>',
            _legend("box", MARGIN, "the core: what a training process loads"),
            _legend("core", MARGIN + 290, "above it: loaded where a script asks for it"),
            _legend("tool", MARGIN + 590, "tools around it; nothing else imports one"),
            *ways,
            *(box.svg() for box in boxes.values()),
            "</svg>\n",
        ]
    )


def main(arguments: Sequence[str]) -> int:
    """Writes the picture, or compares it; returns the exit status."""
    made = draw()
    if "--check" not in arguments:
        PICTURE.write_text(made, encoding="utf-8")
        return 0
    if PICTURE.is_file() and PICTURE.read_text(encoding="utf-8") == made:
        return 0
    print(f"{PICTURE.relative_to(ROOT)} is not that of the code; draw it anew: python ci/architecture_picture.py")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
