"""The page's table: a row a rank, a column a figure, predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import NamedTuple

from penstock.schedule.render.drawing import IDLE, Drawing, is_shown, number, percent
from penstock.schedule.timeline import Timeline


class _Column(NamedTuple):
    """One figure: of each rank, and of all of them; None where it is not known."""

    name: str
    about: str
    of_rank: Callable[[Timeline, int], float | None]
    of_all: Callable[[Timeline], float | None]
    written: Callable[[float], str]
    bar: bool = False


def table(drawing: Drawing) -> str:
    columns, panels = _columns(drawing), drawing.panels
    timelines = [panel.timeline for panel in panels]
    head = _plain_head(columns) if len(panels) == 1 else _head(columns, [panel.label for panel in panels])
    rows = [
        f'<tr><th scope="row">rank {rank}</th>{"".join(_cells(columns, timelines, rank))}</tr>'
        for rank in range(max(timeline.ranks for timeline in timelines))
    ]
    total = f'<tr><th scope="row">all ranks</th>{"".join(_cells(columns, timelines, None))}</tr>'
    body = ["<tbody>", *rows, "</tbody>", "<tfoot>", total, "</tfoot>"]
    return "\n".join(
        ["<table>", "<caption>By rank</caption>", "<thead>", *head, "</thead>", *body, "</table>"]
    )


def _columns(drawing: Drawing) -> list[_Column]:
    columns = [
        _Column("busy", "time spent computing", lambda t, r: t.busy[r], lambda t: sum(t.busy), drawing.time),
        _Column("bubble", "share of the step that the rank was idle",
                lambda t, r: t.rank_bubble[r], lambda t: t.bubble, percent, bar=True),
        _Column("between first and last op", "share of the rank's own time that it was idle",
                lambda t, r: t.rank_inner_bubble[r], lambda t: t.inner_bubble, percent, bar=True),
        _Column("peak live", "most live activations at once; over all ranks, of the worst",
                lambda t, r: t.peak_live[r], lambda t: max(t.peak_live), number),
    ]  # fmt: skip
    if any(panel.timeline.memory for panel in drawing.panels):
        columns.append(
            _Column("peak memory", "most memory held at once, in the unit of the costs; of the worst rank",
                    lambda t, r: t.peak_memory[r] if t.memory else None,
                    lambda t: max(t.peak_memory) if t.memory else None, number)
        )  # fmt: skip
    columns += [_part(drawing, part) for part in IDLE if is_shown(drawing.panels, part)]
    return columns


def _part(drawing: Drawing, part: str) -> _Column:
    """A part of the bubble."""
    panels = {id(panel.timeline): panel for panel in drawing.panels}

    def of_rank(timeline: Timeline, rank: int) -> float | None:
        idle = panels[id(timeline)].idle
        return getattr(idle[rank], part) if idle else None

    def of_all(timeline: Timeline) -> float | None:
        return getattr(panels[id(timeline)].whole_idle, part, None)

    return _Column(part, f"share of the step: {IDLE[part]}", of_rank, of_all, percent)


def _plain_head(columns: list[_Column]) -> list[str]:
    cells = "".join(f'<th scope="col" title="{escape(c.about)}">{c.name}</th>' for c in columns)
    return [f'<tr><th scope="col">rank</th>{cells}</tr>']


def _head(columns: list[_Column], labels: list[str]) -> list[str]:
    groups = "".join(
        f'<th scope="colgroup" colspan="{len(labels)}" title="{escape(c.about)}">{c.name}</th>'
        for c in columns
    )
    names = "".join(f'<th scope="col">{escape(label)}</th>' for _ in columns for label in labels)
    return [f'<tr><th scope="col" rowspan="2">rank</th>{groups}</tr>', f"<tr>{names}</tr>"]


def _cells(columns: list[_Column], timelines: list[Timeline], rank: int | None) -> Iterator[str]:
    """One cell a column and panel; of all ranks where `rank` is None."""
    for column in columns:
        for timeline in timelines:
            if rank is None:
                value = column.of_all(timeline)
            else:
                value = column.of_rank(timeline, rank) if rank < timeline.ranks else None
            yield f"<td>{_cell(column, value)}</td>"


def _cell(column: _Column, value: float | None) -> str:
    if value is None:
        return "&ndash;"
    written = escape(column.written(value))
    return f'{_bar(value)}<span class="share">{written}</span>' if column.bar else written


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></i></span>'
