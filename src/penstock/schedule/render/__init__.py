"""Draw a schedule, or what a step really did: as text, a picture, a page to explore, or a trace."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ConfigError
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Schedule
from penstock.schedule.render.drawing import Drawing, Panel
from penstock.schedule.render.page import page
from penstock.schedule.render.perfetto import perfetto
from penstock.schedule.render.svg import svg
from penstock.schedule.render.text import text
from penstock.schedule.simulate import simulate
from penstock.schedule.timeline import Timeline

_FORMATS = {".txt": text, ".svg": svg, ".html": page, ".json": perfetto}


def render(
    drawn: Schedule | Timeline,
    path: str | Path | None = None,
    *,
    predicted: Timeline | None = None,
    costs: Costs | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> str:
    """The drawing of `drawn`, written to `path` where one is given.

    path: its ending chooses the format: ``.txt`` a grid of text (also without a path), ``.svg`` a picture,
        ``.html`` one page to zoom and hover over, ``.json`` a trace for https://ui.perfetto.dev
    predicted: drawn above `drawn`, which then counts as measured, on the same time scale
    costs: what a schedule is simulated with, unit costs unless given; a timeline has its times already
    unit: of the timelines' times; ``"s"`` is shown as s, ms or µs. Unless given: seconds where there is a
        prediction to compare with, and none otherwise

    Raises ConfigError for another ending, a path that cannot be written, or costs beside a timeline;
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
    )
    result = _FORMATS[ending](drawing)
    if path is not None:
        _write(Path(path), result)
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
    microbatches = len({span.op.microbatch for span in timeline.spans})
    stages = len({span.op.stage for span in timeline.spans})
    parts = [_count(timeline.ranks, "rank"), _count(microbatches, "microbatch", "es")]
    if stages > timeline.ranks:
        parts.insert(1, _count(stages, "stage"))
    return f"{timeline.name}: {', '.join(parts)}"


def _count(amount: int, noun: str, plural: str = "s") -> str:
    return f"{amount} {noun}{'' if amount == 1 else plural}"


def _write(path: Path, result: str) -> None:
    try:
        path.write_text(result, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"drawing {str(path)!r}",
            f"it cannot be written: {getattr(error, 'strerror', None) or error}",
            "Give a path in a folder that exists and may be written to",
        ) from error


__all__ = ["render"]
