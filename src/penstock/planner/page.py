"""A page of a search: the best runs, the first one's step and memory over time, and the field of candidates.

It needs no network and no script. Colours have names in the style sheet, for light and for dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import cycle

from penstock.planner.estimate import Estimate
from penstock.planner.hardware import Cluster
from penstock.planner.ranking import HEADS, WORDS, ranked_rows
from penstock.planner.search import Plans
from penstock.schedule.render.drawing import Drawing, Panel
from penstock.schedule.render.svg import svg

_WIDE, _HIGH, _LEFT, _BELOW = 900, 300, 60, 40  # of a picture, and of its axes
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --faint: #5d6474; --line: #d8dbe3; --paper: #ffffff;
  --mark: #d1495b }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ee; --faint: #9aa1b2; --line: #3a3f4b; --paper: #16181d; --mark: #ff8a9a }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
p.about { color: var(--faint); margin-top: 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--faint); font-weight: 500 } td.text, th.text { text-align: left }
tr.first td { font-weight: 600 }
.scroll { overflow-x: auto }
svg { width: 100%; max-width: 1000px; min-width: 640px; height: auto }
svg.chart text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg.chart .axis { stroke: var(--line); fill: none }
svg.chart .limit { stroke: var(--mark); stroke-dasharray: 5 4 }
svg.chart .faint { fill: var(--faint) }
ul.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; font-size: 13px }
ul.legend span { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .4em }
"""


def page(plans: Plans, cluster: Cluster, model: str) -> str:
    """The page as HTML. model: its name"""
    first = plans.best[0]
    candidate = first.candidate
    about = (
        f"{cluster.hosts} x {cluster.host}, {candidate.batch:,} rows of {candidate.length:,} tokens a step. "
        f"{plans.runs:,} runs, of which {len(plans.fitting):,} were drafted and fit. "
        f"No other of them beats the first by over {plans.gap_of_field:.1%}, "
        f"and in another split none by over {plans.gap:.1%}"
    )
    sections = [
        ("The best runs", _table(plans.best)),
        (f"The step of {candidate.mesh}, {candidate.label}", _timeline(first)),
        ("Memory of its ranks over the step, GiB", _memory(first, plans.limit)),
        ("Where its time goes", _spent(first)),
        ("The field: seconds a step, by GiB of the fullest rank", _field(plans)),
    ]
    body = "".join(f"<h2>{escape(title)}</h2>\n{content}\n" for title, content in sections)
    title = escape(f"Plan of {model}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n"
        f'</head>\n<body>\n<h1>{title}</h1>\n<p class="about">{escape(about)}</p>\n{body}</body>\n</html>\n'
    )


def _table(best: Sequence[Estimate]) -> str:
    def marked(tag: str, cells: Sequence[str]) -> str:
        kinds = ("text" if name in WORDS else "" for name in HEADS)
        return "".join(
            f'<{tag} class="{kind}">{escape(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True)
        )

    head = marked("th", HEADS)
    rows = [
        f'<tr class="{"" if place else "first"}">{marked("td", cells)}</tr>'
        for place, cells in enumerate(ranked_rows(best))
    ]
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _timeline(run: Estimate) -> str:
    drawing = Drawing(title="", panels=(Panel("", run.timeline),), unit="s", width=120)
    picture = svg(drawing)
    return f'<div class="scroll">{picture[picture.index("<svg") :]}</div>'


def _memory(run: Estimate, limit: float) -> str:
    """A line a rank: weights and all that does not change, and the activations on top."""
    gib = 2**30
    end = run.timeline.makespan or 1.0
    top = max(limit, run.nbytes) / gib * 1.05
    x, y = _Scale(0, end, _LEFT, _WIDE - 10), _Scale(0, top, _HIGH - _BELOW, 10)
    lines = []
    for (rank, curve), colour in zip(enumerate(run.timeline.memory), cycle(_COLOURS), strict=False):
        fixed = run.memory[rank].fixed
        path, before = [f"M{x(0):.1f},{y(fixed / gib):.1f}"], float(fixed)
        for time, nbytes in curve:
            path.append(f"L{x(time):.1f},{y(before / gib):.1f}L{x(time):.1f},{y((fixed + nbytes) / gib):.1f}")
            before = fixed + nbytes
        title = f"<title>rank {rank}</title>"
        lines.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}">{title}</path>')
    lines.append(f'<path class="limit" d="M{_LEFT},{y(limit / gib):.1f}H{_WIDE - 10}"/>')
    names = (
        (f"rank {rank}", colour)
        for rank, colour in zip(range(len(run.memory)), cycle(_COLOURS), strict=False)
    )
    return _chart(lines, (0, end, "s"), (0, top, "GiB")) + _legend(
        names if len(run.memory) <= len(_COLOURS) else ()
    )


def _spent(run: Estimate) -> str:
    """A bar whose parts are what the ranks' time goes to."""
    here, parts = float(_LEFT), []
    ordered = sorted(run.spent.items(), key=lambda of: -of[1])
    for (name, time), colour in zip(ordered, cycle(_COLOURS), strict=False):
        width = time / run.seconds * (_WIDE - _LEFT - 10)
        title = f"<title>{escape(name)} {time:.3g} s</title>"
        parts.append(
            f'<rect x="{here:.1f}" y="4" width="{width:.1f}" height="30" fill="{colour}">{title}</rect>'
        )
        here += width
    names = (
        (f"{name} {time:.3g} s, {time / run.seconds:.1%}", colour)
        for (name, time), colour in zip(ordered, cycle(_COLOURS), strict=False)
    )
    return _picture(40, "".join(parts)) + _legend(names)


def _field(plans: Plans) -> str:
    """A dot for each run that fits, coloured by its schedule."""
    labels = list(dict.fromkeys(run.candidate.label for run in plans.fitting))
    colours = dict(zip(labels, cycle(_COLOURS), strict=False))
    gib = 2**30
    slowest = min(plans.fitting[-1].seconds, 3 * plans.best[0].seconds)
    shown = [run for run in plans.fitting if run.seconds <= slowest]
    right, bottom = plans.limit / gib * 1.03, 0.95 * min(plans.least, shown[0].seconds)
    x = _Scale(0, right, _LEFT, _WIDE - 10)
    y = _Scale(bottom, slowest * 1.02, _HIGH - _BELOW, 10)
    dots = []
    for run in reversed(shown):
        of = run.candidate
        said = f"{of.mesh}, {of.label}, {of.microbatches} x {of.rows}: {run.seconds:.3g} s, "
        said += f"{run.nbytes / gib:.1f} GiB"
        place = f'cx="{x(run.nbytes / gib):.1f}" cy="{y(run.seconds):.1f}" r="4"'
        dots.append(
            f'<circle {place} fill="{colours[of.label]}" fill-opacity=".75">'
            f"<title>{escape(said)}</title></circle>"
        )
    dots.append(f'<path class="limit" d="M{x(plans.limit / gib):.1f},10V{_HIGH - _BELOW}"/>')
    dots.append(f'<path class="limit" d="M{_LEFT},{y(plans.least):.1f}H{_WIDE - 10}"/>')
    dots.append(f'<text class="faint" x="{_LEFT + 6}" y="{y(plans.least) - 4:.1f}">no run is faster</text>')
    return _chart(dots, (0, right, "GiB"), (bottom, slowest * 1.02, "s")) + _legend(colours.items())


class _Scale:
    """Positions on a picture of values from `low` to `high`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start = low, start
        self._factor = (end - start) / ((high - low) or 1.0)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._factor


def _chart(marks: Iterable[str], across: tuple[float, float, str], up: tuple[float, float, str]) -> str:
    """Marks within axes. across, up: the ends of each axis and its unit"""
    x = _Scale(across[0], across[1], _LEFT, _WIDE - 10)
    y = _Scale(up[0], up[1], _HIGH - _BELOW, 10)
    lines = [f'<path class="axis" d="M{_LEFT},10V{_HIGH - _BELOW}H{_WIDE - 10}"/>']
    lines += [
        f'<text x="{x(value):.1f}" y="{_HIGH - _BELOW + 18}" text-anchor="middle">{value:g}</text>'
        for value in _ticks(*across[:2])
    ]
    for value in _ticks(*up[:2]):
        lines.append(f'<path class="axis" d="M{_LEFT},{y(value):.1f}H{_WIDE - 10}" opacity=".5"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    lines.append(f'<text class="faint" x="{_WIDE - 10}" y="{_HIGH - 4}" text-anchor="end">{across[2]}</text>')
    lines.append(f'<text class="faint" x="4" y="16">{up[2]}</text>')
    return _picture(_HIGH, "".join((*lines, *marks)))


def _picture(high: int, marks: str) -> str:
    """A picture in a box that scrolls in a narrow window, so that its words stay readable. high: in pixels"""
    drawn = f'<svg class="chart" viewBox="0 0 {_WIDE} {high}" role="img">{marks}</svg>'
    return f'<div class="scroll">{drawn}</div>'


def _ticks(low: float, high: float) -> Iterator[float]:
    """Round values between the two, at most eight of them."""
    wide = max(high - low, 1e-12)
    power = 10 ** math.floor(math.log10(wide))
    step = next(power * times for times in (0.1, 0.2, 0.5, 1, 2, 5) if wide / (power * times) <= 8)
    value = math.ceil(low / step) * step
    while value <= high:
        yield float(f"{value:.6g}")
        value += step


def _legend(names: Iterable[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><span style="background:{colour}"></span>{escape(name)}</li>' for name, colour in names
    )
    return f'<ul class="legend">{items}</ul>' if items else ""
