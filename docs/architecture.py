"""Draw docs/pictures/architecture.svg from the imports of the source: layers, folders, files, and five trips.

    python docs/architecture.py            write the picture
    python docs/architecture.py --check    exit 1 where the picture on disk is not the code's

A trip names the files that one call passes through. Each hop must be an import in the code, so that a trip
that goes another way today cannot be drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"

# from the top down; a row's layers do not import each other, and each imports only what stands below it
ROWS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("train",),
    ("integrations",),
    ("launch",),
    ("checkpoint",),
    ("planner",),
    ("pipeline",),
    ("parallel", "models"),
    ("runtime",),
    ("batch",),
    ("options",),
    ("findings",),
    ("schedule",),
    ("yaml_reader",),
    ("reading",),
    ("private",),
    ("shortages",),
    ("errors",),
)

# the files that a call passes through, in order; the number of the trip is its badge in the picture
TRIPS: dict[str, tuple[str, ...]] = {
    "a step": (
        "train/loop",
        "pipeline/pipeline",
        "pipeline/steps/runner",
        "runtime/executor",
        "runtime/stage",
        "runtime/split_backward/backward",
    ),
    "a build plan": (
        "pipeline/auto_pipeline",
        "pipeline/building/planning",
        "models/tracing/chain",
        "models/tracing/probe",
    ),
    "a build": (
        "pipeline/auto_pipeline",
        "pipeline/building/build_stages",
        "models/huggingface/stages",
        "models/huggingface/boundary",
    ),
    "a checkpoint": (
        "checkpoint/save_load",
        "checkpoint/contents",
        "checkpoint/optimizer_state",
    ),
    "a failure": (
        "pipeline/steps/runner",
        "runtime/health/post_mortem",
        "runtime/recorder",
        "errors",
    ),
}


class Folder(NamedTuple):
    """path: below the package, such as ``runtime/transport``; files: their names, without ``.py``"""

    path: str
    files: tuple[str, ...]


def folders(layer: str) -> list[Folder]:
    """The layer's own files first, then each subfolder."""
    top = PACKAGE / layer
    if not top.is_dir():
        return [Folder("", (layer,))]
    found = []
    for folder in [top, *sorted(path for path in top.iterdir() if path.is_dir())]:
        names = tuple(sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"))
        if names:
            found.append(Folder(str(folder.relative_to(PACKAGE)), names))
    return found


def imports(file: str) -> set[str]:
    """The files of the package that a file imports, both as ``runtime/stage``."""
    tree = ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            for name in [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]:
                path = "/".join(name.split(".")[1:])
                if path and (PACKAGE / f"{path}.py").is_file():
                    found.add(path)
    return found


def broken_hops() -> list[str]:
    """Every hop of a trip that the code does not make."""
    wrong = []
    for trip, files in TRIPS.items():
        missing = [file for file in files if not (PACKAGE / f"{file}.py").is_file()]
        wrong += [f"{trip}: there is no {file}.py" for file in missing]
        known = [file for file in files if (PACKAGE / f"{file}.py").is_file()]
        wrong += [f"{trip}: {a} does not import {b}" for a, b in pairwise(known) if b not in imports(a)]
    return wrong


WIDTH, LEFT, PAD, LINE, GAP = 1180, 128, 10, 17, 10
ROWS_A_COLUMN = 5
PER_CHARACTER = 6.6
COLOURS = {
    "a step": "#c2410c",
    "a build plan": "#6d28d9",
    "a build": "#0f766e",
    "a checkpoint": "#1d4ed8",
    "a failure": "#9f1239",
}
STYLE = """
text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #1f2937 }
.layer { font: 600 15px system-ui, sans-serif }
.folder { font-weight: 600; fill: #475569 }
.badge { font: 600 10px system-ui, sans-serif; fill: #fff }
.legend { font: 12px system-ui, sans-serif }
.band { fill: #f1f5f9 }
.box { fill: #fff; stroke: #cbd5e1 }
"""


def draw() -> str:
    """The picture as SVG text."""
    body: list[str] = []
    y = 56.0
    for row in ROWS:
        height = max(_layer_height(layer, _room(row)) for layer in row)
        for at, layer in enumerate(row):
            x = PAD + at * (_room(row) + LEFT + GAP)
            body += _layer(layer, x, y, _room(row), height)
        y += height + GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>',
        '<text class="layer" x="10" y="24">Imports run downwards only</text>',
        *_legend(),
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _legend() -> Iterator[str]:
    x = 260
    for trip, files in TRIPS.items():
        yield f'<circle cx="{x}" cy="20" r="8" fill="{COLOURS[trip]}"/>'
        yield f'<text class="badge" x="{x}" y="23.5" text-anchor="middle">1</text>'
        yield f'<text class="legend" x="{x + 14}" y="24">{trip}: {len(files)} files</text>'
        x += 185


def _room(row: Sequence[str]) -> float:
    return (WIDTH - 2 * PAD - GAP * (len(row) - 1)) / len(row) - LEFT


class _Box(NamedTuple):
    """Of a folder: its place in the layer, its size, and the columns of its files."""

    folder: Folder
    x: float
    y: float
    width: float
    height: float
    columns: int


def _columns(folder: Folder, room: float) -> tuple[int, float]:
    """How many columns the files of a folder take, and the width of one; no more than there is room for."""
    width = max((len(name) for name in folder.files), default=0) * PER_CHARACTER + 40
    most = max(1, int((room - 12) // width))
    return min(most, max(1, -(-len(folder.files) // ROWS_A_COLUMN))), width


def _boxes(layer: str, room: float) -> list[_Box]:
    """The folders' boxes, line by line from the left."""
    placed = []
    x = y = tallest = 0.0
    for folder in folders(layer):
        columns, of_one = _columns(folder, room)
        width = max(columns * of_one, len(folder.path) * 7.4) + 12
        rows = -(-len(folder.files) // columns)
        height = 26 + rows * LINE if folder.path else 34.0
        if x and x + width > room:
            x, y, tallest = 0.0, y + tallest + 8, 0.0
        placed.append(_Box(folder, x, y, width, height, columns))
        x, tallest = x + width + 8, max(tallest, height)
    return placed


def _layer_height(layer: str, room: float) -> float:
    return max(box.y + box.height for box in _boxes(layer, room)) + 2 * 8


def _layer(layer: str, x: float, y: float, room: float, height: float) -> Iterator[str]:
    yield f'<rect class="band" x="{x}" y="{y}" width="{room + LEFT}" height="{height}" rx="8"/>'
    yield f'<text class="layer" x="{x + 12}" y="{y + 28}">{layer}</text>'
    for box in _boxes(layer, room):
        yield from _folder(box._replace(x=x + LEFT - 12 + box.x, y=y + 8 + box.y))


def _folder(box: _Box) -> Iterator[str]:
    folder, x, y, width, height, columns = box
    yield f'<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>'
    yield f'<text class="folder" x="{x + 8}" y="{y + 17}">{escape(folder.path)}</text>'
    rows = -(-len(folder.files) // columns)
    top = y + 34 if folder.path else y + 21
    for number, name in enumerate(folder.files):
        column, row = divmod(number, rows) if rows else (0, 0)
        at = x + 8 + column * (width - 8) / columns, top + row * LINE
        yield f'<text x="{at[0]}" y="{at[1]}">{escape(name)}</text>'
        yield from _badges(f"{folder.path}/{name}".lstrip("/"), at[0] + len(name) * 7.3 + 10, at[1])


def _badges(file: str, x: float, y: float) -> Iterator[str]:
    for trip, files in TRIPS.items():
        if file in files:
            yield f'<circle cx="{x}" cy="{y - 4}" r="7" fill="{COLOURS[trip]}"/>'
            number = files.index(file) + 1
            yield f'<text class="badge" x="{x}" y="{y - 0.5}" text-anchor="middle">{number}</text>'
            x += 16


def problems() -> list[str]:
    """What of the picture is not true of the code."""
    stale = not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != draw()
    return broken_hops() + (
        ["the picture is not the code's: run python docs/architecture.py"] if stale else []
    )


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        print("\n".join(problems()))
        sys.exit(bool(problems()))
    if wrong := broken_hops():
        sys.exit("\n".join(wrong))
    PICTURE.write_text(draw(), encoding="utf-8")
