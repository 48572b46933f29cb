"""Draw a schedule, or what a step really did: as text, a picture, a page to explore, or a trace."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.schedule.files import write_text
from penstock.schedule.ops import Schedule
from penstock.schedule.render.drawing import Drawing, Panel
from penstock.schedule.render.page import page
from penstock.schedule.render.perfetto import perfetto
from penstock.schedule.render.svg import svg
from penstock.schedule.render.text import text
from penstock.schedule.simulation.costs import Costs
from penstock.schedule.simulation.simulate import simulate
from penstock.schedule.simulation.timeline import Timeline

_FORMATS = {".txt": text, ".svg": svg, ".html": page, ".json": perfetto}


def render(
    drawn: Schedule | Timeline,
    path: str | Path | None = None,
    *,
    predicted: Timeline | None = None,
    costs: Costs | None = None,
    title: str | None = None,
    unit: str | None = None,
    width: int = 120,
) -> str:
    """Draw a schedule or a timeline; returns the text of the drawing.

    path: where to write it. Its ending chooses the format: ``.txt`` (also without a path) is a grid of text,
        ``.svg`` a picture, ``.html`` a page to zoom and hover over, ``.json`` a trace for
        https://ui.perfetto.dev
    predicted: a timeline to draw above `drawn`, which is then labelled as measured, on the same time scale
    costs: to simulate a schedule with (None: unit costs); not for a timeline
    unit: of the times; ``"s"`` is shown as s, ms or µs. None: seconds with `predicted`, no unit otherwise
    width: characters in a line of text

    Raises ConfigError for another ending, a path that cannot be written, or costs for a timeline;
    ScheduleError for a schedule that `verify` refuses.
    """
    ending = ".txt" if path is None else Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise ConfigError(
            f"drawing {str(path)!r}",
            f"its ending chooses the format, and {ending or 'no ending'} chooses none",
            f"End the path in one of {', '.join(_FORMATS)}",
        )
    timeline = _timeline(drawn, costs)
    if predicted is None:
        panels: tuple[Panel, ...] = (Panel("", timeline),)
    else:
        panels = (Panel("predicted", predicted), Panel("measured", timeline))
    default_unit = "" if predicted is None else "s"
    drawing = Drawing(
        title=_title(timeline) if title is None else title,
        panels=panels,
        unit=default_unit if unit is None else unit,
        width=width,
    )
    result = _FORMATS[ending](drawing)
    if path is not None:
        write_text(Path(path), result, "drawing")
    return result


def _timeline(drawn: Schedule | Timeline, costs: Costs | None) -> Timeline:
    if isinstance(drawn, Schedule):
        return simulate(drawn, costs)
    if costs is not None:
        raise ConfigError(
            "drawing a timeline with costs",
            "costs say how long a schedule's ops take, and a timeline knows",
            "Leave the costs out, or give the schedule",
        )
    return drawn


def _title(timeline: Timeline) -> str:
    stages = len({span.op.stage for span in timeline.spans})
    counts = [_count(timeline.ranks, "rank"), _count(timeline.microbatches, "microbatch", "es")]
    if stages > timeline.ranks:
        counts.insert(1, _count(stages, "stage"))
    return f"{timeline.name}: {', '.join(counts)}"


def _count(amount: int, noun: str, plural: str = "s") -> str:
    return f"{amount} {noun}{'' if amount == 1 else plural}"


__all__ = ["render"]
