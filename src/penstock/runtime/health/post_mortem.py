"""What a process leaves behind when a step fails: where each of its ranks was, and the timeline so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import PeerError, account_of, give_account
from penstock.runtime.executor import Executor
from penstock.runtime.health.progress import account
from penstock.schedule import Span, Timeline
from penstock.schedule.render.drawing import Drawing, Panel
from penstock.schedule.render.perfetto import perfetto


def write_post_mortem(error: BaseException, executors: Sequence[Executor], folder: Path | None) -> None:
    """Give `error` an account of the rank that it befell, and write this process's trace into `folder`.

    Never raises: whatever goes wrong here must not hide `error`.
    """
    struck = next((executor for executor in executors if executor.current is not None), executors[0])
    so_far, trace = None, ""
    try:
        so_far = timeline_so_far(executors)
        if folder is not None:
            path = folder / f"rank-{executors[0].plan.rank}.json"
            write_trace(so_far, path)
            trace = f"timeline so far in {path}"
    except Exception as trouble:  # such as a full disk, or a GPU that answers nothing any more
        trace = f"no timeline: {type(trouble).__name__}: {trouble}"
    told = (account_of(error) or account(struck.progress))._replace(trace=trace)
    give_account(error, told)
    if isinstance(error, PeerError):
        error.timeline = so_far  # its text gives the account
    else:
        error.add_note(f"penstock: on rank {struck.plan.rank}, {told}")


def timeline_so_far(executors: Sequence[Executor]) -> Timeline:
    """What this process's ranks have done of their step.

    Times are those of the clock that all processes share, so that their spans may be put together.
    """
    schedule = executors[0].plan.schedule
    ended = {executor.plan.rank: executor.recorder.ended() for executor in executors}
    spans = [Span(rank, op, of.start, of.end) for rank, marks in sorted(ended.items()) for op, of in marks]
    live = {executor.plan.rank: executor.ops.peak_live for executor in executors}
    peaks = tuple(live.get(rank, 0) for rank in range(schedule.ranks))
    return Timeline(schedule.name, schedule.ranks, tuple(spans), peaks, overlaps=schedule.overlaps)


def write_trace(timeline: Timeline, path: Path) -> None:
    """A trace for Perfetto, on the shared clock and not from 0 on, so that the ranks' traces fit together."""
    drawing = Drawing(f"{timeline.name}, cut short", (Panel("", timeline),), "s")
    trace = json.loads(perfetto(drawing))
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] = round(event["ts"] + timeline.start * 1e6, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")
