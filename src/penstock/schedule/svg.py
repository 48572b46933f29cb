"""A drawing as a self-contained SVG picture: one row a rank, one rectangle an op, idle time left faint.

Blue and orange stay apart for every common kind of colour blindness, and in grey. The picture draws its own
background, and a second set of colours where the reader's system is dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from penstock.schedule.drawing import Drawing, Panel, number, percent
from penstock.schedule.ops import Kind
from penstock.schedule.timeline import Span

_WIDTH = 1000
_LEFT, _RIGHT = 84, 832  # of the time axis; the figures of each rank stand to the right of it
_BUBBLE_AT, _PEAK_AT = 898, 976
_TITLE_AT = 40
_LABEL_SIZES = {11: "", 9: " small"}  # in pixels, the one to take where both fit first
_DIGIT = 0.57  # width of a digit, in heights

_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward"}
_RANGES: dict[Kind, tuple[str, str]] = {"F": ("#a5cdf0", "#1c5a9c"), "B": ("#fbd9a0", "#d97b16")}
_ALTERNATING = (0.80, 0.62)  # places in the ranges above, for even and odd microbatches
_INK, _PAPER = "#1f2328", "#ffffff"

_STYLE = f"""
text {{ font: 12px -apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; fill: {_INK}; }}
.title {{ font-size: 18px; font-weight: 600; }}
.strong {{ font-weight: 600; }}
.faint {{ fill: #59636e; }}
.end {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }}
.card {{ fill: {_PAPER}; stroke: #d1d9e0; }}
.idle {{ fill: #eff2f5; }}
.tick {{ stroke: #d1d9e0; }}
.op {{ font-size: 11px; text-anchor: middle; pointer-events: none; }}
.small {{ font-size: 9px; }}
"""
_DARK = """
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc; }
.faint { fill: #9198a1; }
.card { fill: #0d1117; stroke: #3d444d; }
.idle { fill: #1c222a; }
.tick { stroke: #3d444d; }
}
"""


def svg(drawing: Drawing) -> str:
    body: list[str] = []
    below = _TITLE_AT + 8
    for panel in drawing.panels:
        sketch = _Sketch(drawing, panel, below)
        body += sketch.lines()
        below = sketch.bottom
    shades = sorted({shade for panel in drawing.panels for shade in _shades(panel).values()})
    body += _legend(shades, below + 26)
    height = below + 48
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">',
        f"<title>{escape(drawing.title)}</title>",
        f"<style>{_STYLE}{_DARK}{_shade_styles(shades)}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="24" y="{_TITLE_AT}">{escape(drawing.title)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


class _Sketch:
    """One panel, from `top` to `bottom`: a heading, the rows, and the time axis below them."""

    def __init__(self, drawing: Drawing, panel: Panel, top: int) -> None:
        self.drawing, self.panel, self.timeline = drawing, panel, panel.timeline
        self.shades = _shades(panel)
        self.digits = max((len(str(span.op.microbatch)) for span in self.timeline.spans), default=1)
        self.pixels = (_RIGHT - _LEFT) / (drawing.makespan or 1.0)  # a unit of time
        self.row = max(10, min(28, 420 // self.timeline.ranks))
        self.pitch = self.row + (6 if self.row > 20 else 3)
        self.heading, self.rows = top + 24, top + 36
        self.axis = self.rows + self.pitch * self.timeline.ranks
        self.bottom = self.axis + 24

    def lines(self) -> Iterator[str]:
        yield from self._heading()
        for rank in range(self.timeline.ranks):
            y = self.rows + rank * self.pitch
            yield f'<rect class="idle" {self._box(0, self.timeline.makespan, y)} rx="2"/>'
        yield from self._ticks()
        for rank in range(self.timeline.ranks):
            yield from self._rank(rank, self.rows + rank * self.pitch)

    def _heading(self) -> Iterator[str]:
        label = f'<tspan class="strong">{escape(self.panel.label)}</tspan>  ' if self.panel.label else ""
        summary = escape(self.drawing.summary(self.panel))
        yield f'<text x="24" y="{self.heading}" xml:space="preserve">{label}{summary}</text>'
        yield f'<text class="faint end" x="{_BUBBLE_AT}" y="{self.heading}">bubble</text>'
        yield f'<text class="faint end" x="{_PEAK_AT}" y="{self.heading}">peak live</text>'

    def _ticks(self) -> Iterator[str]:
        size, name = self.drawing.scale
        step = _nice(self.drawing.makespan / size / 10)
        unit = f"time, {name}" if name else "time"
        yield f'<text class="faint end" x="{_LEFT - 12}" y="{self.axis + 16}">{escape(unit)}</text>'
        for count in range(int(self.drawing.makespan / size / step + 1e-6) + 1):
            x = _pixel(_LEFT + count * step * size * self.pixels)
            yield f'<path class="tick" d="M{x} {self.rows - 4}V{self.axis + 2}"/>'
            yield f'<text class="faint middle" x="{x}" y="{self.axis + 16}">{number(count * step)}</text>'

    def _rank(self, rank: int, y: int) -> Iterator[str]:
        base = y + self.row // 2 + 4
        timeline = self.timeline
        yield f'<text class="end" x="{_LEFT - 12}" y="{base}">rank {rank}</text>'
        for span in timeline.of_rank(rank):
            yield self._op(span, y)
        yield f'<text class="end" x="{_BUBBLE_AT}" y="{base}">{percent(timeline.rank_bubble[rank])}</text>'
        yield f'<text class="end" x="{_PEAK_AT}" y="{base}">{timeline.peak_live[rank]}</text>'

    def _op(self, span: Span, y: int) -> str:
        start, end = span.start - self.timeline.start, span.end - self.timeline.start
        width = (end - start) * self.pixels
        kind, shade = self.shades[span]
        times = f"{self.drawing.time(start)} to {self.drawing.time(end)}"
        corner = ' rx="2"' if width > 6 else ""
        box = f'<rect class="{_class(kind, shade)}" {self._box(start, end, y)}{corner}>'
        drawn = f"{box}<title>{escape(f'{span.op}, {times}')}</title></rect>"
        size = self._label_size(width)
        if size is None:
            return drawn
        x = _pixel(_LEFT + (start + end) / 2 * self.pixels)
        style = f"op{_LABEL_SIZES[size]} {_ink(kind, shade)}"
        return f'{drawn}<text class="{style}" x="{x}" y="{y + self.row // 2 + 4}">{span.op.microbatch}</text>'

    def _label_size(self, width: float) -> int | None:
        """The size at which any microbatch's number fits: like ops are then labelled all or none."""
        for size in _LABEL_SIZES:
            if size * _DIGIT * self.digits + 2 <= width and size + 2 <= self.row:
                return size
        return None

    def _box(self, start: float, end: float, y: int) -> str:
        width = (end - start) * self.pixels
        gap = 1.0 if width > 5 else 0.0
        return (
            f'x="{_pixel(_LEFT + start * self.pixels + gap / 2)}" y="{y}" '
            f'width="{_pixel(width - gap)}" height="{self.row}"'
        )


def _shades(panel: Panel) -> dict[Span, tuple[Kind, float]]:
    """Each op's hue and place in its range: by stage where a rank hosts several, else by microbatch."""
    timeline = panel.timeline
    hosted = [sorted({span.op.stage for span in timeline.of_rank(rank)}) for rank in range(timeline.ranks)]
    most = max(len(stages) for stages in hosted)

    def place(span: Span) -> float:
        if most == 1:
            return _ALTERNATING[span.op.microbatch % 2]
        return hosted[span.rank].index(span.op.stage) / (most - 1)

    return {span: (span.op.kind, round(place(span), 3)) for span in timeline.spans}


def _class(kind: Kind, place: float) -> str:
    return f"{kind}{round(1000 * place)}"


def _colour(kind: Kind, place: float) -> tuple[int, int, int]:
    light, dark = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in _RANGES[kind])
    red, green, blue = (round(a + place * (b - a)) for a, b in zip(light, dark, strict=True))
    return red, green, blue


def _ink(kind: Kind, place: float) -> str:
    """The class of the text that reads best on this shade."""
    red, green, blue = _colour(kind, place)
    return "on-dark" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "on-light"


def _shade_styles(shades: list[tuple[Kind, float]]) -> str:
    rules = [f".{_class(*shade)} {{ fill: #{bytes(_colour(*shade)).hex()}; }}" for shade in shades]
    return "\n".join([*rules, f".on-dark {{ fill: {_PAPER}; }}", f".on-light {{ fill: {_INK}; }}\n"])


def _legend(shades: list[tuple[Kind, float]], y: int) -> Iterator[str]:
    x = _LEFT
    by_stage = any(place not in _ALTERNATING for _, place in shades)
    for kind, name in _NAMES.items():
        own = [place for shade_kind, place in shades if shade_kind == kind]
        if not own:
            continue
        for place in own:
            yield f'<rect class="{_class(kind, place)}" x="{x}" y="{y - 11}" width="14" height="14" rx="2"/>'
            x += 16
        label = f"{name}, first to last stage of the rank" if by_stage else name
        yield f'<text x="{x + 4}" y="{y}">{label}</text>'
        x += 28 + 6 * len(label)
    yield f'<rect class="idle" x="{x}" y="{y - 11}" width="14" height="14" rx="2"/>'
    yield f'<text x="{x + 20}" y="{y}">idle</text>'


def _nice(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _pixel(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
