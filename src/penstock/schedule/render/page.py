"""A drawing as one HTML page that needs nothing else: zoom, pan, hover, and the numbers as a table.

The page is `page.html` with its parts inserted; the report of a run has the same ones. The scripts draw on a
canvas from numbers in the page, as JSON; everything outside of the canvas is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from penstock.schedule.render.drawing import (
    GAPS,
    IDLE,
    KINDS,
    REDUCE,
    REDUCTION,
    Drawing,
    Panel,
    Shade,
    is_shown,
    meaning,
    number,
    percent,
    shades,
    used_shades,
)
from penstock.schedule.simulation.timeline import Timeline

# ---- The table: a row per rank, a column per figure, predicted next to measured


class _Column(NamedTuple):
    """One figure, of a rank or (None) of all ranks; None if it is not known."""

    name: str
    about: str
    value: Callable[[Panel, int | None], float | None]
    written: Callable[[float], str]
    bar: bool = False


def _table(drawing: Drawing) -> str:
    columns, panels = _columns(drawing), drawing.panels
    head = _head(columns, [panel.label for panel in panels])
    ranks = range(max(panel.timeline.ranks for panel in panels))
    rows = [_row(f"rank {rank}", columns, panels, rank) for rank in ranks]
    total = _row("all ranks", columns, panels, None)
    body = ["<tbody>", *rows, "</tbody>", "<tfoot>", total, "</tfoot>"]
    return "\n".join(
        ["<table>", "<caption>By rank</caption>", "<thead>", *head, "</thead>", *body, "</table>"]
    )


def _columns(drawing: Drawing) -> list[_Column]:
    def of(
        by_rank: Callable[[Timeline], Sequence[float]], over_all: Callable[[Timeline], float]
    ) -> Callable[[Panel, int | None], float]:
        return lambda panel, rank: over_all(panel.timeline) if rank is None else by_rank(panel.timeline)[rank]

    peak = of(lambda t: t.peak_memory, lambda t: max(t.peak_memory))

    def memory(panel: Panel, rank: int | None) -> float | None:
        return peak(panel, rank) if panel.timeline.memory else None

    def idle(part: str) -> Callable[[Panel, int | None], float | None]:
        return lambda panel, rank: getattr(
            panel.mean_idle if rank is None else panel.idle[rank] if panel.idle else None, part, None
        )

    def host(value: Callable[[Panel, int | None], float]) -> Callable[[Panel, int | None], float | None]:
        return lambda panel, rank: value(panel, rank) if panel.timeline.host_bound else None

    columns = [
        _Column("busy", "time spent in ops", of(lambda t: t.busy, lambda t: sum(t.busy)), drawing.time),
        _Column("bubble", "share of the step that the rank was idle",
                of(lambda t: t.rank_bubble, lambda t: t.bubble), percent, bar=True),
        _Column("between first and last op", "share of the rank's own time that it was idle",
                of(lambda t: t.rank_inner_bubble, lambda t: t.inner_bubble), percent, bar=True),
        _Column("peak live", "most live activations at once; over all ranks, of the worst",
                of(lambda t: t.peak_live, lambda t: max(t.peak_live)), number),
    ]  # fmt: skip
    if any(panel.timeline.host_bound for panel in drawing.panels):
        busy = host(of(lambda t: t.device_busy, lambda t: sum(t.device_busy)))
        share = host(of(lambda t: t.rank_host_share, lambda t: t.host_share or 0.0))
        about = (
            "share of the step that the device waited, within ops, for its host to launch the rest of them"
        )
        columns[1:1] = [
            _Column("device busy", "the part of it in which the device computed", busy, drawing.time),
            _Column("host-bound", about, share, percent, bar=True),
        ]
    if any(panel.timeline.memory for panel in drawing.panels):
        about = "most memory held at once, in the unit of the costs; of the worst rank"
        columns.append(_Column("peak memory", about, memory, number))
    shown = [part for part in IDLE if is_shown(drawing.panels, part)]
    return columns + [
        _Column(part, f"share of the step: {IDLE[part]}", idle(part), percent) for part in shown
    ]


def _head(columns: list[_Column], labels: list[str]) -> list[str]:
    """A row of the columns' names; with several panels a second one of their labels."""
    several = len(labels) > 1
    scope = f'scope="colgroup" colspan="{len(labels)}"' if several else 'scope="col"'
    names = "".join(f'<th {scope} title="{escape(c.about)}">{c.name}</th>' for c in columns)
    tall = ' rowspan="2"' if several else ""
    rows = [f'<tr><th scope="col"{tall}>rank</th>{names}</tr>']
    if several:
        cells = "".join(f'<th scope="col">{escape(label)}</th>' for _ in columns for label in labels)
        rows.append(f"<tr>{cells}</tr>")
    return rows


def _row(head: str, columns: list[_Column], panels: Sequence[Panel], rank: int | None) -> str:
    """One cell per column and panel; of all ranks if `rank` is None."""
    cells = ""
    for column in columns:
        for panel in panels:
            exists = rank is None or rank < panel.timeline.ranks
            cells += f"<td>{_cell(column, column.value(panel, rank) if exists else None)}</td>"
    return f'<tr><th scope="row">{head}</th>{cells}</tr>'


def _cell(column: _Column, value: float | None) -> str:
    if value is None:
        return "&ndash;"
    written = escape(column.written(value))
    if not column.bar:
        return written
    width = 100 * min(1.0, max(0.0, value))
    return f'<span class="bar"><i style="width:{width:.1f}%"></i></span><span class="share">{written}</span>'


_SCRIPTS = ("page_scale.js", "page_canvas.js", "page.js")


def page(drawing: Drawing) -> str:
    return filled("page.html", title=escape(drawing.title), **parts(drawing))


def parts(drawing: Drawing, *, embedded: bool = False) -> dict[str, str]:
    """The parts of a page that shows the drawing: head, style, toolbar and timeline, as HTML.

    embedded: in a longer page, which scrolls where the pointer is over the ops
    """
    used = used_shades(drawing.panels)
    return {
        "head": read("page_head.html"),
        "style": read("page.css"),
        "toolbar": filled(
            "page_toolbar.html", letters=", ".join(KINDS), held_button=drawing.held.capitalize()
        ),
        "timeline": filled(
            "page_timeline.html",
            panels="\n".join(_section(drawing, panel) for panel in drawing.panels),
            legend="\n".join(_legend(drawing, used)),
            held=drawing.held,
            zoom="Pinch, or scroll with Ctrl," if embedded else "Scroll or pinch",
            table=_table(drawing),
            data=_json({**_data(drawing, used), "embedded": embedded}),
            script="\n".join(map(read, _SCRIPTS)),
        ),
    }


def filled(name: str, **texts: str) -> str:
    """A file of this folder with its $names filled in."""
    return Template(read(name)).substitute(texts)


def read(name: str) -> str:
    """A file of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip()


def _json(data: Any) -> str:
    """JSON that is safe in a page: no text in it ends the script element or begins a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(drawing: Drawing, panel: Panel) -> str:
    name = panel.label or "timeline"
    summary = escape(drawing.summary(panel))
    first = drawing.panels[0]
    if panel is not first and first.label == "predicted" and first.timeline.makespan:
        summary += f", {panel.timeline.makespan / first.timeline.makespan:.3f} times the predicted step"
    for said in filter(None, (drawing.host_limit(panel), drawing.bubble_parts(panel))):
        summary += f" · {said}"
    heading = f"<h2>{escape(panel.label)}</h2>" if panel.label else ""
    label = escape(f"{drawing.title}, {name}: {drawing.summary(panel)}. The table below has the figures.")
    return (
        f'<section class="panel" aria-label="{escape(name)}">\n'
        f'{heading}<span class="summary">{summary}</span>\n'
        f'<div class="plot"><canvas tabindex="0" role="img" aria-label="{label}"></canvas>'
        f'<div class="hair" hidden></div></div>\n</section>'
    )


def _legend(drawing: Drawing, used: list[Shade]) -> Iterator[str]:
    for kind, name in KINDS.items():
        swatches = [f'<i style="background:{shade.fill}"></i>' for shade in used if shade.kind == kind]
        if swatches:
            yield f"<span>{''.join(swatches)}{name}</span>"
    yield "<span><i></i>idle</span>"
    for part in GAPS:
        if is_shown(drawing.panels, part):
            fill = f' style="background:{REDUCE}"' if part == "reduce" else ""
            yield f'<span><i class="{part}"{fill}></i>{IDLE[part]}</span>'
    if any(panel.timeline.overlaps for panel in drawing.panels):
        yield '<span><i class="pair"></i>to overlap</span>'
    if any(any(drawing.curves(panel)[0]) for panel in drawing.panels):
        yield f'<span><i class="held"></i>{drawing.held}</span>'
    said = meaning(drawing.panels)
    if said:
        yield f'<span class="meaning">{said}</span>'


def _data(drawing: Drawing, used: list[Shade]) -> dict[str, Any]:
    size, name = drawing.scale
    return {
        "title": drawing.title,
        "unit": {"size": size, "name": name},
        "makespan": drawing.makespan,
        "held": drawing.held,
        "kinds": KINDS,
        "reduction": {"letter": REDUCTION, "name": IDLE["reduce"], "fill": REDUCE},
        "shades": [{"fill": shade.fill, "onDark": shade.on_dark} for shade in used],
        "panels": [_panel_data(drawing, panel, used) for panel in drawing.panels],
    }


def _panel_data(drawing: Drawing, panel: Panel, used: list[Shade]) -> dict[str, Any]:
    """The ops column by column, in order of rank, then start."""
    timeline, spans = panel.timeline, panel.timeline.spans
    index_of = {shade: at for at, shade in enumerate(used)}
    curves, peaks = drawing.curves(panel)
    return {
        "label": panel.label,
        "ranks": timeline.ranks,
        "makespan": timeline.makespan,
        "rank": [span.rank for span in spans],
        "stage": [span.op.stage for span in spans],
        "kind": "".join(span.op.kind for span in spans),
        "microbatch": [span.op.microbatch for span in spans],
        "start": [_short(span.start) for span in spans],
        "end": [_short(span.end) for span in spans],
        "shade": [index_of[shade] for shade in shades(panel)],
        "critical": [panel.place_of[op] for op in timeline.critical_path if op in panel.place_of],
        "sideBySide": [at for at, span in enumerate(spans) if span.op in timeline.side_by_side],
        "pairs": [[panel.place_of[one.op], panel.place_of[other.op]] for one, other in timeline.pairs],
        "waits": [
            [panel.place_of[wait.op], *map(_short, (wait.start, wait.turn, wait.end))]
            for wait in timeline.inner_waits
        ],
        "reductions": [[rank, stage, *map(_short, times)] for rank, stage, *times in timeline.reductions],
        "curves": [[(_short(time), _short(now)) for time, now in c] for c in curves],
        "peaks": [*map(_short, peaks)],
        "bubble": [*map(_short, timeline.rank_bubble)],
    }


def _short(value: float) -> float:
    """Nine digits: more only make the page longer."""
    return float(f"{value:.9g}")
