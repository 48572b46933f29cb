"""A drawing as one HTML page that needs nothing else: zoom, pan, hover, and the numbers as a table.

The page is `page.html` with its style and its scripts put in. The scripts draw on a canvas from the numbers
that stand in the page as JSON; all words and figures outside of the canvas are written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from penstock.schedule.render.colours import REDUCE, Shade, in_order, meaning, shades
from penstock.schedule.render.drawing import GAPS, IDLE, KINDS, REDUCTION, Drawing, Panel, is_shown
from penstock.schedule.render.table import table

_SCRIPTS = ("page_scale.js", "page_canvas.js", "page.js")


def page(drawing: Drawing) -> str:
    used = in_order({shade for panel in drawing.panels for shade in shades(panel)})
    return Template(_read("page.html")).substitute(
        title=escape(drawing.title),
        style=_read("page.css"),
        letters=", ".join(KINDS),
        panels="\n".join(_section(drawing, panel) for panel in drawing.panels),
        legend="\n".join(_legend(drawing, used)),
        held=drawing.held,
        held_button=drawing.held.capitalize(),
        table=table(drawing),
        data=_json(_data(drawing, used)),
        script="\n".join(map(_read, _SCRIPTS)),
    )


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").rstrip()


def _json(data: Any) -> str:
    """As it may stand in a page: no text within ends the script element or begins a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(drawing: Drawing, panel: Panel) -> str:
    name = panel.label or "timeline"
    summary = escape(drawing.summary(panel))
    beside = drawing.panels[0].timeline.makespan
    if panel is not drawing.panels[0] and beside:
        summary += f", {panel.timeline.makespan / beside:.3f} times the predicted step"
    parts = drawing.bubble_parts(panel)
    summary += f" · {parts}" if parts else ""
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
    """The ops column by column, in order of rank, then start; times from the start of the step."""
    timeline, spans = panel.timeline, panel.timeline.spans
    place = {shade: at for at, shade in enumerate(used)}
    curves, peaks = drawing.curves(panel)
    return {
        "label": panel.label,
        "ranks": timeline.ranks,
        "makespan": timeline.makespan,
        "rank": [span.rank for span in spans],
        "stage": [span.op.stage for span in spans],
        "kind": "".join(span.op.kind for span in spans),
        "microbatch": [span.op.microbatch for span in spans],
        "start": [_short(span.start - timeline.start) for span in spans],
        "end": [_short(span.end - timeline.start) for span in spans],
        "shade": [place[shade] for shade in shades(panel)],
        "critical": [panel.place_of[op] for op in timeline.critical_path if op in panel.place_of],
        "beside": [at for at, span in enumerate(spans) if span.op in timeline.side_by_side],
        "pairs": [[panel.place_of[one.op], panel.place_of[other.op]] for one, other in timeline.pairs],
        "waits": [
            [
                panel.place_of[wait.op],
                *(_short(time - timeline.start) for time in (wait.start, wait.turn, wait.end)),
            ]
            for wait in timeline.inner_waits
        ],
        "reductions": [
            [each.rank, each.stage, *(_short(time - timeline.start) for time in (each.start, each.end))]
            for each in timeline.reductions
        ],
        "curves": [[(_short(time - timeline.start), _short(now)) for time, now in c] for c in curves],
        "peaks": [_short(peak) for peak in peaks],
        "bubble": [_short(share) for share in timeline.rank_bubble],
    }


def _short(value: float) -> float:
    """To nine digits, which no screen can show: what rounding left behind only makes the page longer."""
    return float(f"{value:.9g}")
