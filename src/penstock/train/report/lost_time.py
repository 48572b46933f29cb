"""The share of a run's time in which it made progress, over all its starts, and what cost the rest.

    start    began ... at  first step ... last  end      killed      began ... at  first step ...
             start-up      steps, evaluations,             waiting     start-up
                           checkpoints

Read from run.json (the moments of each start) and metrics.jsonl (the seconds of what ran between them). The
time from a stop that somebody asked for to the next start is no time of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from penstock.schedule.render.drawing import number, percent
from penstock.train.records.metrics import kind_of, seconds_of
from penstock.train.report.recorded import WRONG, RecordedRun, finite

CAUSES = {
    "start-up": "from the command, or the restart, to the first step",
    "waiting": "from the last row before a fault to the restart",
    "steps again": "steps that were done before, as no checkpoint had them",
    "checkpoints": "waiting for checkpoints",
    "evaluation": "held-out loss, and samples",
}
_ASKED = ("interrupted", "finished")  # ends after which a run may stand still


class LostTime(NamedTuple):
    """Seconds of a run: in all, and lost by cause. The keys are those of `CAUSES`."""

    seconds: float
    lost: Mapping[str, float]

    @property
    def effective(self) -> float:
        """The share of the time that was not lost."""
        return max(0.0, 1 - sum(self.lost.values()) / self.seconds) if self.seconds > 0 else 1.0

    def __str__(self) -> str:
        causes = [f"{cause} {duration(seconds)}" for cause, seconds in self.lost.items() if seconds >= 0.05]
        lost = f" (lost: {', '.join(causes)})" if causes else ""
        return f"{duration(self.seconds)}, of which {percent(self.effective)} were effective{lost}"


class _Span(NamedTuple):
    """The moments of one start, in seconds, and how it ended."""

    began: float
    at: float
    end: float
    how: str


def lost_time(run: RecordedRun) -> LostTime | None:
    """Account for the time of a run; None if its record has no start that can be read."""
    try:
        spans = _spans(run)
    except WRONG:
        return None
    if not spans:
        return None
    gaps = [max(0.0, later.began - span.end) for span, later in pairwise(spans) if span.how not in _ASKED]
    again = [finite(start.get("again")) or 0.0 for start in run.starts]
    in_memory = [finite(row.get("memory_checkpoint_seconds")) or 0.0 for row in run.rows]
    lost = {
        "start-up": sum(max(0.0, span.at - span.began) for span in spans),
        "waiting": sum(gaps),
        "steps again": run.again + sum(again),
        "checkpoints": _spent(run, "checkpoint") + sum(in_memory),
        "evaluation": _spent(run, "evaluation", "sample"),
    }
    between = sum(max(0.0, span.end - span.at) for span in spans)
    return LostTime(lost["start-up"] + lost["waiting"] + between, lost)


def _spans(run: RecordedRun) -> list[_Span]:
    """Of each start. One that has recorded no end lasts to the next start, or to the last row.

    Raises one of WRONG.
    """
    spans, later = list[_Span](), run.written
    for start in reversed(run.starts):
        at, end = _seconds(start["at"]), start.get("end") or {}
        last = _seconds(end["at"]) if end else max(at, later)
        later = _seconds(start.get("began", start["at"]))
        spans.insert(0, _Span(later, at, last, str(end.get("how", ""))))
    return spans


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


def _spent(run: RecordedRun, *kinds: str) -> float:
    return seconds_of(row for row in run.rows if kind_of(row) in kinds)


def duration(seconds: float) -> str:
    """In words, as 12 s, 3 min 05 s or 2 h 10 min."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
