"""A drawing as a grid of text: one row a rank, one column a slice of time.

    rank 0 | F0 F1 .  B0 B0 B1 B1
    rank 1 | .  F0 B0 B0 F1 B1 B1

A column shows the op that runs at its middle, or R for a reduction of gradients over data-parallel ranks.
Long rows continue in further blocks below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from penstock.schedule.render.drawing import IDLE, REDUCTION, Drawing, Panel, is_shown, percent
from penstock.schedule.simulation.timeline import Span

_BLOCKS = 4  # with more, the middle is left out: warm-up and drain are at the ends
_BLOCKS_AT_START = 2
_MOST_COLUMNS = 20_000  # a step with one long stall must not fill the memory with dots
_NUMBER = 7  # characters for a rank in a table


def text(drawing: Drawing) -> str:
    column = _column(drawing)
    full_text = any(panel.several_stages for panel in drawing.panels)
    labels = [len(_label(span, full_text)) for panel in drawing.panels for span in panel.timeline.spans]
    width = max(labels, default=1)
    blocks = [drawing.title]
    for panel in drawing.panels:
        rows = _rows(panel, column, full_text)
        said = filter(None, (drawing.summary(panel), drawing.host_limit(panel)))
        footer = f"{', '.join(said)}; a column is {drawing.time(column)}"
        if panel.timeline.reductions:
            footer += f"; {REDUCTION}: {IDLE['reduce']}"
        grid = "\n\n".join(_blocks(drawing, rows, column, width))
        blocks += [f"{panel.label}\n{grid}".lstrip(), "\n".join([footer, *_tables(panel, drawing.width)])]
    return "\n\n".join(blocks) + "\n"


def _label(span: Span, full_text: bool) -> str:
    return str(span.op) if full_text else f"{span.op.kind}{span.op.microbatch}"


def _column(drawing: Drawing) -> float:
    """The time of one column: one that divides all times evenly, if there is a simple one.

    Otherwise it is that of the shortest op, so that each op covers the middle of a column; ops far shorter
    than the median may be missing.
    """
    times, lengths = [], []
    for panel in drawing.panels:
        for span in panel.timeline.spans:
            times += [span.start, span.end]
            lengths.append(span.end - span.start)
    lengths = [length for length in lengths if length > 0]
    if not lengths:
        return 1.0
    shortest = max(min(lengths), median(lengths) / 4, drawing.makespan / _MOST_COLUMNS)
    for divisor in (1, 2, 3, 4):
        column = shortest / divisor
        if all(abs(time / column - round(time / column)) < 1e-3 for time in times):
            return column
    return shortest


def _rows(panel: Panel, column: float, full_text: bool) -> list[list[str]]:
    timeline = panel.timeline
    columns = math.ceil(timeline.makespan / column - 1e-3)
    rows = [["."] * columns for _ in range(timeline.ranks)]
    for span in timeline.spans:
        first, beyond = (math.ceil(time / column - 0.5) for time in (span.start, span.end))
        for at in range(first, min(beyond, columns)):
            if at % 2 or rows[span.rank][at] == ".":  # ops side by side alternate
                rows[span.rank][at] = _label(span, full_text)
    for reduction in timeline.reductions:
        first, beyond = (math.ceil(time / column - 0.5) for time in (reduction.start, reduction.end))
        for at in range(min(first, columns - 1), min(max(beyond, first + 1), columns)):  # at least one column
            if rows[reduction.rank][at] == ".":
                rows[reduction.rank][at] = f"{reduction.stage}{REDUCTION}" if full_text else REDUCTION
    return rows


def _blocks(drawing: Drawing, rows: list[list[str]], column: float, width: int) -> Iterator[str]:
    heads = [f"rank {rank:>{len(str(len(rows) - 1))}} |" for rank in range(len(rows))]
    a_block = max(drawing.width - len(heads[0]), width + 1) // (width + 1)
    starts = list(range(0, max(1, len(rows[0])), a_block))
    left_out = ""
    if len(starts) > _BLOCKS:
        starts = [*starts[:_BLOCKS_AT_START], len(rows[0]) - a_block]
        hidden = range(_BLOCKS_AT_START * a_block, starts[-1])
        left_out = (
            f"... {len(hidden)} columns are left out here, from time {drawing.time(hidden.start * column)} "
            f"to {drawing.time(hidden.stop * column)}; a drawing that ends in .html shows all"
        )
    for start in starts:
        if left_out and start == starts[-1]:
            yield left_out
        cells = [" ".join(f"{cell:<{width}}" for cell in row[start : start + a_block]) for row in rows]
        lines = [f"{head} {line}".rstrip() for head, line in zip(heads, cells, strict=True)]
        if len(starts) > 1:
            lines.insert(0, f"from time {drawing.time(start * column)}")
        yield "\n".join(lines)


def _tables(panel: Panel, width: int) -> Iterator[str]:
    timeline = panel.timeline
    parts = [part for part in IDLE if is_shown([panel], part)]
    together = max((width - len("peak live")) // _NUMBER, 1)
    for start in range(0, timeline.ranks, together):
        ranks = range(start, min(start + together, timeline.ranks))
        yield "rank     " + "".join(f"{rank:>{_NUMBER}}" for rank in ranks)
        yield "bubble   " + "".join(f"{percent(timeline.rank_bubble[rank]):>{_NUMBER}}" for rank in ranks)
        for part in parts:
            shares = "".join(f"{percent(getattr(panel.idle[rank], part)):>{_NUMBER}}" for rank in ranks)
            yield f"  {part:<7}{shares}"
        if timeline.host_bound:
            shares = "".join(f"{percent(timeline.rank_host_share[rank]):>{_NUMBER}}" for rank in ranks)
            yield f"host     {shares}"
        yield "peak live" + "".join(f"{timeline.peak_live[rank]:>{_NUMBER}}" for rank in ranks)
