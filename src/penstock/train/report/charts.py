"""A chart: lines over steps, as HTML that fits any width without a script.

The lines are an SVG that is stretched to the frame; the width of its strokes is not. The numbers at the axes
are HTML, so they keep their size. Lines differ in colour and dashes; the legend has each line's last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from penstock.schedule.render.drawing import nice, number
from penstock.train.report.recorded import Points

STYLES = 6  # in report.css: .s0 to .s5
_POINTS = 400  # of a line; if there are more, the least and the most of each group of neighbours stay
_SIDE = 1000.0  # of the SVG's square
_DECADES = 2  # a chart that may be logarithmic is so above this many


class Line(NamedTuple):
    """style: its colour and dashes; dots: a mark at each point, for values that are far apart"""

    label: str
    points: Points
    style: int = 0
    dots: bool = False


class Chart(NamedTuple):
    """written: a value as text; from_zero: the axis begins at 0; log: it may be logarithmic"""

    title: str
    unit: str
    lines: Sequence[Line]
    written: Callable[[float], str] = number
    from_zero: bool = False
    log: bool = False


def draw(chart: Chart) -> str:
    """The chart as a figure; empty if no line has a finite value."""
    lines = [line for line in chart.lines if any(value is not None for _, value in line.points)]
    if not lines:
        return ""
    axes = _Axes(chart, lines)
    grid = "".join(f"M0 {_short(axes.y(tick))}H{_SIDE:g}" for tick in axes.y_ticks)
    unit = ", ".join(filter(None, (chart.unit, "logarithmic" if axes.log else "")))
    head = f"<b>{escape(chart.title)}</b> <span>{escape(unit)}</span>"
    scale = f' data-log="{int(axes.log)}" data-x="{axes.left} {axes.right}" data-y="{axes.low} {axes.high}"'
    return "\n".join([
        f'<figure class="chart"><figcaption>{head}</figcaption>',
        f'<div class="frame" role="img" aria-label="{escape(_in_words(chart, lines))}"{scale}>',
        *_labels(chart, axes),
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">',
        f'<path class="grid" d="{grid}"/>',
        *(path for line in lines for path in _paths(line, axes)),
        "</svg></div>",
        f'<ul class="key">{"".join(_entry(chart, line) for line in lines)}</ul></figure>',
    ])  # fmt: skip


class _Axes:
    """From step and value to the SVG's square, and the ticks."""

    def __init__(self, chart: Chart, lines: Sequence[Line]) -> None:
        steps = [step for line in lines for step, _ in line.points]
        values = [value for line in lines for _, value in line.points if value is not None]
        self.left, self.right = min(steps), max(steps)
        self.low: float
        self.high: float
        low, high = min(values), max(values)
        self.log = chart.log and low > 0 and math.log10(high / low) > _DECADES
        if self.log:
            first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
            every = max(1, round((last - first) / 5))
            self.low, self.high = first, last
            self.y_ticks = [10.0**power for power in range(first, last + 1, every)]
        else:
            low = min(low, 0.0) if chart.from_zero else low
            spread = high - low if high - low > 1e-9 * max(abs(low), abs(high)) else abs(high) or 1.0
            step = nice(spread / 4)
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            if first == last:
                first, last = first - (not chart.from_zero), last + 1
            self.low, self.high = first * step, last * step
            self.y_ticks = [at * step for at in range(first, last + 1)]
        every = max(1, round(nice((self.right - self.left) / 5 or 1.0)))
        self.x_ticks = range(-(-self.left // every) * every, self.right + 1, every)

    def x(self, step: float) -> float:
        width = self.right - self.left
        return _SIDE * (step - self.left) / width if width else _SIDE / 2

    def y(self, value: float) -> float:
        height = math.log10(value) if self.log else value
        return _SIDE * (self.high - height) / (self.high - self.low)

    def point(self, step: float, value: float) -> str:
        return f"{_short(self.x(step))} {_short(self.y(value))}"


def _labels(chart: Chart, axes: _Axes) -> Iterator[str]:
    for tick in axes.y_ticks:
        text = f"{tick:g}" if axes.log else chart.written(tick)
        yield f'<span class="y" style="top:{axes.y(tick) / 10:.2f}%">{escape(text)}</span>'
    for step in axes.x_ticks:
        yield f'<span class="x" style="left:{axes.x(step) / 10:.2f}%">{step:,}</span>'


def _paths(line: Line, axes: _Axes) -> Iterator[str]:
    """The line, with a gap where a value is not finite, and its dots. A point between two gaps is a dot."""
    points = _thinned(line.points)
    runs = [[*group] for known, group in groupby(points, lambda point: point[1] is not None) if known]
    drawn_runs = [[axes.point(step, value or 0.0) for step, value in run] for run in runs]
    style = f"s{line.style % STYLES}"
    drawn = "".join("M" + "L".join(run) for run in drawn_runs)
    yield f'<path class="line {style}" data-label="{escape(line.label)}" d="{drawn}"/>'
    dots = [point for run in drawn_runs if line.dots or len(run) == 1 for point in run]
    if dots:  # a line of no length has round ends: a dot, however the SVG is stretched
        yield f'<path class="dots {style}" d="{"".join(f"M{point}h0" for point in dots)}"/>'


def _thinned(points: Points) -> Points:
    """About _POINTS at most: the least and the most of each group of neighbours, and one without a value."""
    if len(points) <= _POINTS:
        return points
    size = math.ceil(2 * len(points) / _POINTS)
    kept: list[tuple[int, float | None]] = []
    for at in range(0, len(points), size):
        group = points[at : at + size]
        known = sorted((value, step) for step, value in group if value is not None)
        missing = [(step, None) for step, value in group if value is None][:1]
        ends = {(step, value) for value, step in (known[:1] + known[-1:])}
        kept += sorted([*ends, *missing], key=lambda point: point[0])
    return kept


def _entry(chart: Chart, line: Line) -> str:
    style = f"s{line.style % STYLES}"
    dots = f'<path class="dots {style}" d="M13 6h0"/>' if line.dots else ""
    last = next(value for _, value in reversed(line.points) if value is not None)
    swatch = f'<path class="line {style}" d="M1 6H25"/>{dots}'
    said = f"{escape(line.label)} <b>{escape(chart.written(last))}</b>"
    return f'<li><svg width="26" height="12" aria-hidden="true">{swatch}</svg>{said}</li>'


def _in_words(chart: Chart, lines: Sequence[Line]) -> str:
    """The chart for readers who do not see it: the first, last, least and largest value of each line."""
    said = [f"{chart.title}, {chart.unit}" if chart.unit else chart.title]
    for line in lines:
        known = [(value, step) for step, value in line.points if value is not None]
        ends = (("from", known[0]), ("to", known[-1]), ("least", min(known)), ("most", max(known)))
        words = ", ".join(f"{word} {chart.written(value)} at step {step}" for word, (value, step) in ends)
        missing = len(line.points) - len(known)
        said.append(f"{line.label}: {words}" + (f", {missing} not finite" if missing else ""))
    return ". ".join(said)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
