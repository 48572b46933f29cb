"""A run on a terminal: how far it is, its last numbers, two curves, and memory and bubble of each rank.

A curve is a square of braille letters, each of which has two by four dots. A notebook shows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.schedule.render.drawing import number, percent
from penstock.train.report.lost_time import duration
from penstock.train.report.page import Fact, facts, in_bytes, notes
from penstock.train.report.recorded import Points, RecordedRun

ROWS = 8  # of a table: of more processes those with the most
_WIDE, _HIGH = 34, 6  # letters of a curve
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille letter, by row and column
_BLANK = 0x2800
_RECENT = 20  # steps, whose median says how long the others will take
_COLOURS = {"running": "cyan", "finished": "green"}


class Bubbles(NamedTuple):
    """The bubble of each rank in the recorded step with this number."""

    step: int
    shares: Sequence[float] = ()


def view(run: RecordedRun, word: str, sentence: str, bubbles: Bubbles) -> RenderableType:
    """The run in a frame. word: its state, and a sentence on it"""
    parts = [_progress(run, sentence), _numbers(facts(run)), *_curves(run), *_tables(run, bubbles)]
    parts += [Text(note, style="yellow") for note in notes(run)]
    colour = _COLOURS.get(word, "red")
    title = Text.assemble((run.name, "bold"), "  ", (word, f"bold {colour}"))
    spaced = [part for pair in ((part, Text()) for part in parts) for part in pair][:-1]
    return Panel(Group(*spaced), title=title, title_align="left", border_style=colour, padding=(1, 2))


def _progress(run: RecordedRun, sentence: str) -> RenderableType:
    """A bar, and in words how far the run is and how long the rest will take."""
    words = [sentence]
    left = 0 if run.asked is None else run.asked - run.done
    recent = [seconds for _, seconds in run.points("seconds")[-_RECENT:] if seconds is not None]
    if left > 0 and recent and "ended" not in sentence:
        words.append(f"about {duration(left * median(recent))} of steps left")
    bar = ProgressBar(total=max(run.asked or run.done, 1), completed=run.done, width=_WIDE)
    return Columns([bar, Text("  ".join(words))], padding=(0, 2))


def _numbers(shown: Iterable[Fact]) -> RenderableType:
    return Columns([_named(fact) for fact in shown if fact.name != "Time"], padding=(0, 3))


def _named(fact: Fact) -> Text:
    remark = " median" if fact.more == "median" else ""
    return Text.assemble((f"{fact.name}\n", "dim"), (fact.value, "bold"), (remark, "dim"))


# ---- Curves


def _curves(run: RecordedRun) -> list[RenderableType]:
    curves = [
        _curve("loss", run.points("loss"), number),
        _curve("tokens a second", run.points("tokens_per_second"), lambda value: f"{value:,.0f}"),
    ]
    shown = [curve for curve in curves if curve is not None]
    return [Columns(shown, padding=(0, 3))] if shown else []


def _curve(title: str, points: Points, written: Callable[[float], str]) -> RenderableType | None:
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    means = _means(known, 2 * _WIDE)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", style="dim", min_width=8)
    labels = [written(max(means.values())), *[""] * (_HIGH - 2), written(min(means.values()))]
    for label, line in zip(labels, dots(means, _WIDE, _HIGH), strict=True):
        grid.add_row(label, Text(line, style="cyan"))
    first, last = f"{known[0][0]:,}", f"{known[-1][0]:,}"
    grid.add_row("", Text(first + last.rjust(_WIDE - len(first)), style="dim"))
    return Group(Text(title, style="bold"), grid)


def _means(points: Sequence[tuple[int, float]], columns: int) -> dict[int, float]:
    """The mean of the values in each column, if the steps of the points fill all `columns`."""
    first, last = points[0][0], points[-1][0]
    groups: dict[int, list[float]] = {}
    for step, value in points:
        groups.setdefault(round((columns - 1) * (step - first) / max(last - first, 1)), []).append(value)
    return {column: fmean(values) for column, values in groups.items()}


def dots(values: Mapping[int, float], width: int, height: int) -> list[str]:
    """The line through the values, by column of dots, as `height` lines of `width` braille letters each."""
    low, rows = min(values.values()), 4 * height
    spread = (max(values.values()) - low) or 1.0
    levels = {column: round((rows - 1) * (value - low) / spread) for column, value in values.items()}
    letters = [[_BLANK] * width for _ in range(height)]
    for column, level in _connected(sorted(levels.items())):
        row = rows - 1 - level
        letters[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    return ["".join(map(chr, line)) for line in letters]


def _connected(points: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Column and level of each dot of the line, without gaps in either direction."""
    yield points[0]
    for (left, start), (right, end) in pairwise(points):
        before = start
        for column in range(left + 1, right + 1):
            level = start + round((end - start) * (column - left) / (right - left))
            step = 1 if level >= before else -1
            yield from ((column, between) for between in range(before + step, level, step))
            yield column, level
            before = level


# ---- Memory and bubble


def _tables(run: RecordedRun, bubbles: Bubbles) -> list[RenderableType]:
    key = run.memory_key
    peaks = run.by_process(key)
    tables = []
    if any(peaks):
        kind = "GPU" if key == "peak_allocated" else "host"
        tables.append(_bars(f"peak {kind} memory", "process", peaks, max(peaks), in_bytes))
    if bubbles.shares:
        tables.append(_bars(f"bubble in step {bubbles.step:,}", "rank", bubbles.shares, 1.0, percent))
    return [Columns(tables, padding=(0, 6))] if tables else []


def _bars(
    title: str, name: str, values: Sequence[float], most: float, written: Callable[[float], str]
) -> RenderableType:
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:ROWS]
    grid = Table.grid(padding=(0, 1))
    grid.add_column()
    grid.add_column(width=_WIDE - 16)
    grid.add_column(justify="right")
    for at in sorted(order):
        bar = ProgressBar(total=most, completed=values[at], complete_style="cyan", finished_style="cyan")
        grid.add_row(f"{name} {at}", bar, written(values[at]))
    if len(values) > ROWS:
        grid.add_row("others", "", f"least {written(min(values))}", style="dim")
    return Group(Text(title, style="bold"), grid)
