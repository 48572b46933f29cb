"""A drawing as a trace for https://ui.perfetto.dev, in Chrome's trace event format.

A panel is a process and a rank is a thread of it, with a second thread for backwards that ran next to
forwards. An op is a slice, and so are waits and reductions. What a rank holds is a counter, and an arrow goes
from each op to the one on another rank that takes its result. Perfetto colours slices by name without
numbers, so each kind has a colour.

Times are in microseconds. One unit of a timeline that is not in seconds becomes a millisecond.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.schedule.ops import SOURCE, Op
from penstock.schedule.render.drawing import KINDS, Drawing, Panel
from penstock.schedule.simulation.timeline import Span

Event = dict[str, Any]

_MICROSECONDS = {"s": 1e6}
_OTHERWISE = 1e3
_SECOND = 2**20  # from a rank's thread to its second one; more than ranks and panels
_NANOSECOND = 1e-3  # Perfetto's resolution


def perfetto(drawing: Drawing) -> str:
    events: list[Event] = []
    for position, panel in enumerate(drawing.panels):
        events += _Process(drawing, panel, position).events()
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    about = json.dumps({"title": drawing.title, "unit": drawing.unit}, ensure_ascii=False)
    return f'{{"displayTimeUnit": "ms",\n"otherData": {about},\n"traceEvents": [\n{lines}\n]}}\n'


class _Process:
    """One panel's events."""

    def __init__(self, drawing: Drawing, panel: Panel, position: int) -> None:
        self.drawing, self.panel, self.timeline = drawing, panel, panel.timeline
        self.name = panel.label or drawing.title
        self.position = position
        # no number of a rank: Perfetto shows a thread numbered as its process first, as the main one
        self.process = max(shown.timeline.ranks for shown in drawing.panels) + 1 + position
        self.microseconds = _MICROSECONDS.get(drawing.unit, _OTHERWISE)

    def events(self) -> Iterator[Event]:
        yield from self._names()
        for span in self.timeline.spans:
            stage, kind, microbatch = span.op
            about = {"stage": stage, "microbatch": microbatch, "kind": KINDS[kind]}
            yield self._slice(self._row(span), str(span.op), KINDS[kind], (span.start, span.end), about)
        for wait in self.timeline.inner_waits:
            for reason, times in (("peer", (wait.start, wait.turn)), ("wire", (wait.turn, wait.end))):
                event = self._slice(wait.rank, f"wait {reason}", "wait", times, {"for": str(wait.op)})
                if event["dur"] > 0:
                    yield event
        for rank, stage, start, end in self.timeline.reductions:
            yield self._slice(rank, f"reduce {stage}", "reduction", (start, end), {"stage": stage})
        yield from self._arrows()
        for rank in range(self.timeline.ranks):
            yield from self._counter(rank)

    def _names(self) -> Iterator[Event]:
        yield self._event("M", name="process_name", args={"name": self.name})
        yield self._event("M", name="process_sort_index", args={"sort_index": self.position})
        rows = {rank: f"rank {rank}" for rank in range(self.timeline.ranks)}
        second = (span.rank for span in self.timeline.spans if self._is_second(span))
        rows |= {_SECOND + rank: f"rank {rank}, overlapped" for rank in second}
        for row, name in rows.items():
            yield self._event("M", row, name="thread_name", args={"name": name})
            yield self._event("M", row, name="thread_sort_index", args={"sort_index": row % _SECOND})

    def _is_second(self, span: Span) -> bool:
        return span.op.kind != "F" and span.op in self.timeline.side_by_side

    def _row(self, span: Span) -> int:
        return span.rank + (_SECOND if self._is_second(span) else 0)

    def _slice(self, row: int, name: str, category: str, times: tuple[float, float], about: Event) -> Event:
        start, end = map(self._time, times)
        return self._event("X", row, name=name, cat=category, ts=start, dur=round(end - start, 3), args=about)

    def _arrows(self) -> Iterator[Event]:
        """The two ends of a flow share an id. It leaves at the end of a slice and binds to the next."""
        spans, place_of = self.timeline.spans, self.panel.place_of
        for index, span in enumerate(spans):
            at = next((place_of[op] for op in _users(span.op) if op in place_of), None)
            if at is None or spans[at].rank == span.rank:
                continue
            leaves = max(self._time(span.start), round(self._time(span.end) - _NANOSECOND, 3))
            flow = {"name": "result", "cat": "result", "id": f"{self.process}.{index}"}
            yield self._event("s", self._row(span), ts=leaves, **flow)
            yield self._event("f", self._row(spans[at]), ts=self._time(spans[at].start), bp="e", **flow)

    def _counter(self, rank: int) -> Iterator[Event]:
        noun, (curves, _) = self.drawing.held, self.drawing.curves(self.panel)
        for time, amount in curves[rank]:
            yield self._event(
                "C", rank, name=f"rank {rank}: {noun}", ts=self._time(time), args={noun: amount}
            )

    def _event(self, phase: str, rank: int | None = None, **fields: Any) -> Event:
        thread = {} if rank is None else {"tid": rank + 1}  # thread 0 is the kernel's idle one to Perfetto
        return {"ph": phase, "pid": self.process, **thread, **fields}

    def _time(self, time: float) -> float:
        """Microseconds, to the nanosecond."""
        return round(time * self.microseconds, 3)


def _users(op: Op) -> Iterator[Op]:
    """The ops that may take the result of `op` on another rank."""
    if step := SOURCE[op.kind]:
        for kind in KINDS:
            if SOURCE[kind] == step:
                yield Op(op.stage - step, kind, op.microbatch)
