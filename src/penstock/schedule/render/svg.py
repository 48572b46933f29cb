"""A drawing as a self-contained SVG picture: a row per rank, a rectangle per op, and faint idle time.

It has its own background, and a second set of colours for systems in dark mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from penstock.schedule.render.drawing import (
    GAPS,
    IDLE,
    INK,
    KINDS,
    PAPER,
    REDUCE,
    REDUCTION,
    Drawing,
    Panel,
    Shade,
    is_shown,
    meaning,
    nice,
    number,
    percent,
    shades,
    used_shades,
)
from penstock.schedule.simulation.timeline import Reduction, Span, Wait

_WIDTH = 1000
_LEFT, _RIGHT = 84, 832  # of the time axis; to the right of it are the figures of each rank
_BUBBLE_AT, _PEAK_AT = 898, 976
_TITLE_AT = 40
_LABEL_SIZES = {11: "", 9: " small"}  # in pixels; the first that fits
_DIGIT = 0.57  # width of a digit, in heights
_NARROW, _WIDE = 3.7, 6.8  # letters of the legend, in pixels
_LEGEND_PITCH, _LINE = 22, 18
_PAIR_BEYOND = 1.5  # how far the outline of a pair extends above and below

_STYLE = f"""
text {{ font: 12px -apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif;
  font-variant-numeric: tabular-nums; fill: {INK}; }}
.title {{ font-size: 18px; font-weight: 600; }}
.strong {{ font-weight: 600; }}
.faint {{ fill: #59636e; }}
.end {{ text-anchor: end; }}
.middle {{ text-anchor: middle; }}
.card {{ fill: {PAPER}; stroke: #d1d9e0; }}
.idle {{ fill: #eff2f5; }}
.peer {{ fill: #d3dae2; }}
.wire {{ fill: #8792a0; }}
.reduce {{ fill: {REDUCE}; }}
.tick {{ stroke: #d1d9e0; }}
.pair {{ fill: none; stroke: {INK}; stroke-width: 1.2; pointer-events: none; }}
.op {{ font-size: 11px; text-anchor: middle; pointer-events: none; }}
.small {{ font-size: 9px; }}
.on-dark {{ fill: {PAPER}; }}
.on-light {{ fill: {INK}; }}
"""
_DARK = f"""
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc; }}
.faint {{ fill: #9198a1; }}
.card {{ fill: #0d1117; stroke: #3d444d; }}
.idle {{ fill: #1c222a; }}
.peer {{ fill: #323b46; }}
.wire {{ fill: #76818e; }}
.tick {{ stroke: #3d444d; }}
.pair {{ stroke: #f0f6fc; }}
.on-dark {{ fill: {PAPER}; }}
.on-light {{ fill: {INK}; }}
}}
"""


def svg(drawing: Drawing) -> str:
    body: list[str] = []
    below, title, heading = 0, list[str](), list[str]()
    if drawing.title:
        below, text = _TITLE_AT + 8, escape(drawing.title)
        title = [f"<title>{text}</title>"]
        heading = [f'<text class="title" x="24" y="{_TITLE_AT}">{text}</text>']
    for panel in drawing.panels:
        sketch = _Sketch(drawing, panel, below)
        body += sketch.lines()
        below = sketch.bottom
    used = used_shades(drawing.panels)
    body += _legend(drawing, used, below + 26)
    height = below + 48 + _LEGEND_PITCH
    colours = "\n".join(f".{shade.name} {{ fill: {shade.fill}; }}" for shade in used)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">',
        *title,
        f"<style>{_STYLE}{_DARK}{colours}\n</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *heading,
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


class _Sketch:
    """One panel, from `top` to `bottom`: a heading, the rows, and the time axis below them."""

    def __init__(self, drawing: Drawing, panel: Panel, top: int) -> None:
        self.drawing, self.panel, self.timeline = drawing, panel, panel.timeline
        self.shades = dict(zip(self.timeline.spans, shades(panel), strict=True))
        self.digits = max((len(str(span.op.microbatch)) for span in self.timeline.spans), default=1)
        self.pixels = (_RIGHT - _LEFT) / (drawing.makespan or 1.0)  # a unit of time
        self.row = max(10, min(28, 420 // self.timeline.ranks))
        self.pitch = self.row + (6 if self.row > 20 else 4)
        self.host_limit = drawing.host_limit(panel)  # in a line of its own: the heading has no room for more
        self.heading = top + 24
        self.rows = self.heading + 12 + (_LINE if self.host_limit else 0)
        self.axis = self.rows + self.pitch * self.timeline.ranks
        self.bottom = self.axis + 24

    def lines(self) -> Iterator[str]:
        yield from self._heading()
        for rank in range(self.timeline.ranks):
            yield f'<rect class="idle" {self._box(0, self.timeline.makespan, self._y(rank))} rx="2"/>'
        for wait in self.timeline.inner_waits:
            for reason, start, end in (("peer", wait.start, wait.turn), ("wire", wait.turn, wait.end)):
                yield from self._stood(reason, wait, start, end)
        yield from self._ticks()
        for reduction in self.timeline.reductions:
            yield self._reduction(reduction)
        for rank in range(self.timeline.ranks):
            yield from self._rank(rank, self._y(rank))
        for pair in self.timeline.pairs:
            yield self._pair(*pair)

    def _heading(self) -> Iterator[str]:
        label = f'<tspan class="strong">{escape(self.panel.label)}</tspan>  ' if self.panel.label else ""
        summary = escape(self.drawing.summary(self.panel))
        idle = self.drawing.bubble_parts(self.panel)
        faint = f'<tspan class="faint"> · {idle}</tspan>' if idle else ""
        yield f'<text x="24" y="{self.heading}" xml:space="preserve">{label}{summary}{faint}</text>'
        if self.host_limit:
            yield f'<text x="24" y="{self.heading + _LINE}">{self.host_limit}</text>'
        yield f'<text class="faint end" x="{_BUBBLE_AT}" y="{self.heading}">bubble</text>'
        yield f'<text class="faint end" x="{_PEAK_AT}" y="{self.heading}">peak live</text>'

    def _ticks(self) -> Iterator[str]:
        size, name = self.drawing.scale
        step = nice(self.drawing.makespan / size / 10)
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

    def _stood(self, reason: str, wait: Wait, start: float, end: float) -> Iterator[str]:
        if end > start:
            said = f"{self.drawing.time(end - start)} {IDLE[reason]}, for {wait.op}"
            box = f'<rect class="{reason}" {self._box(start, end, self._y(wait.rank))}>'
            yield f"{box}<title>{escape(said)}</title></rect>"

    def _reduction(self, reduction: Reduction) -> str:
        times = f"{self.drawing.time(reduction.start)} to {self.drawing.time(reduction.end)}"
        said = f"{IDLE['reduce']}, those of stage {reduction.stage}, {times}"
        box = (reduction.start, reduction.end, self._y(reduction.rank), self.row)
        return self._labelled("reduce", box, "", said, REDUCTION, on_dark=True)

    def _op(self, span: Span, y: int) -> str:
        shade, height = self.shades[span], self.row
        if span.op in self.timeline.side_by_side:  # the forward above, the backward below
            height = self.row // 2
            y += 0 if span.op.kind == "F" else self.row - height
        corner = ' rx="2"' if (span.end - span.start) * self.pixels > 6 else ""
        said = f"{span.op}, {self.drawing.time(span.start)} to {self.drawing.time(span.end)}"
        box, label = (span.start, span.end, y, height), str(span.op.microbatch)
        return self._labelled(shade.name, box, corner, said, label, shade.on_dark)

    def _labelled(
        self,
        style: str,
        box: tuple[float, float, int, int],
        corner: str,
        said: str,
        label: str,
        on_dark: bool,
    ) -> str:
        """A box (start, end, y, height) with a tooltip, and with a label if it fits."""
        start, end, y, height = box
        drawn = f'<rect class="{style}" {self._box(*box)}{corner}><title>{escape(said)}</title></rect>'
        size = self._label_size((end - start) * self.pixels, height)
        if size is None:
            return drawn
        x = _pixel(_LEFT + (start + end) / 2 * self.pixels)
        style = f"op{_LABEL_SIZES[size]} {'on-dark' if on_dark else 'on-light'}"
        return f'{drawn}<text class="{style}" x="{x}" y="{y + height // 2 + 4}">{label}</text>'

    def _pair(self, one: Span, other: Span) -> str:
        """An outline around both ops and the time between them."""
        start = min(one.start, other.start) * self.pixels
        end = max(one.end, other.end) * self.pixels
        width = max(0.5, end - start - 1.2)  # neighbours' outlines do not touch
        return (
            f'<rect class="pair" x="{_pixel(_LEFT + start + 0.6)}" y="{self._y(one.rank) - _PAIR_BEYOND}" '
            f'width="{_pixel(width)}" height="{self.row + 2 * _PAIR_BEYOND}" rx="3"/>'
        )

    def _label_size(self, width: float, height: int) -> int | None:
        """The size at which the number of any microbatch fits, so that like ops are all labelled, or none."""
        for size in _LABEL_SIZES:
            if size * _DIGIT * self.digits + 2 <= width and size + 2 <= height:
                return size
        return None

    def _y(self, rank: int) -> int:
        return self.rows + rank * self.pitch

    def _box(self, start: float, end: float, y: int, height: int | None = None) -> str:
        width = (end - start) * self.pixels
        gap = 1.0 if width > 5 else 0.0
        return (
            f'x="{_pixel(_LEFT + start * self.pixels + gap / 2)}" y="{y}" '
            f'width="{_pixel(width - gap)}" height="{height or self.row}"'
        )


def _legend(drawing: Drawing, used: list[Shade], y: int) -> Iterator[str]:
    x = float(_LEFT)
    for kind, name in KINDS.items():
        own = [shade for shade in used if shade.kind == kind]
        if own:
            for shade in own:
                yield _swatch(shade.name, x, y)
                x += 16
            yield f'<text x="{_pixel(x + 4)}" y="{y}">{name}</text>'
            x += 22 + _length(name)
    said = meaning(drawing.panels)
    if said:
        yield f'<text class="faint end" x="{_PEAK_AT}" y="{y}">{said}</text>'
    yield from _legend_of_gaps(drawing, y + _LEGEND_PITCH)


def _legend_of_gaps(drawing: Drawing, y: int) -> Iterator[str]:
    x = float(_LEFT)
    names = {"idle": "idle"} | {part: IDLE[part] for part in GAPS if is_shown(drawing.panels, part)}
    for style, name in names.items():
        yield _swatch(style, x, y)
        yield f'<text x="{_pixel(x + 20)}" y="{y}">{name}</text>'
        x += 38 + _length(name)
    if any(panel.timeline.overlaps for panel in drawing.panels):
        yield f'<rect class="pair" x="{_pixel(x)}" y="{y - 11}" width="22" height="14" rx="3"/>'
        yield f'<text x="{_pixel(x + 28)}" y="{y}">to overlap</text>'


def _swatch(style: str, x: float, y: int) -> str:
    return f'<rect class="{style}" x="{_pixel(x)}" y="{y - 11}" width="14" height="14" rx="2"/>'


def _length(text: str) -> float:
    return sum(_NARROW if letter in "fijlrt " else _WIDE for letter in text)


def _pixel(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
