"""The post-mortem of a failed step: where each rank of this process was, and its timeline so far."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.errors import PeerError, account_of, give_account
from penstock.runtime.executor import Executor
from penstock.runtime.recorder import account, timeline
from penstock.schedule import Timeline
from penstock.schedule.render.drawing import Drawing, Panel
from penstock.schedule.render.perfetto import perfetto


def write_post_mortem(error: BaseException, executors: Sequence[Executor], folder: Path | None) -> None:
    """Attach an account of the failing rank to `error`, and write this process's trace into `folder`.

    Never raises: whatever goes wrong here must not hide `error`.
    """
    struck = next((executor for executor in executors if executor.current is not None), executors[0])
    so_far, trace = None, ""
    try:
        so_far = timeline_so_far(executors)
        if folder is not None:
            path = folder / f"rank-{executors[0].plan.rank}.json"
            schedule = executors[0].plan.schedule
            write_trace(so_far, path, f"{schedule.name} of {schedule.microbatches} microbatches, cut short")
            trace = f"timeline so far in {path}"
    except Exception as trouble:  # e.g. a full disk, or a GPU that no longer answers
        trace = f"no timeline: {type(trouble).__name__}: {trouble}"
    rank_account = (account_of(error) or account(struck.progress))._replace(trace=trace)
    give_account(error, rank_account)
    if isinstance(error, PeerError):
        error.timeline = so_far  # its text gives the account
    else:
        error.add_note(f"penstock: on rank {struck.plan.rank}, {rank_account}")


def timeline_so_far(executors: Sequence[Executor]) -> Timeline:
    """The ops that this process's ranks have completed, on the clock that all processes share.

    On this clock the traces of several processes can be compared.
    """
    schedule = executors[0].plan.schedule
    by_rank = {executor.plan.rank: executor for executor in executors}
    here = [by_rank.get(rank) for rank in range(schedule.ranks)]
    ran = [[] if executor is None else executor.recorder.ended() for executor in here]
    peaks = [0 if executor is None else executor.memory.peak_live for executor in here]
    return timeline(schedule, ran, peaks, zero=0.0)


def write_trace(timeline: Timeline, path: Path, title: str) -> None:
    """A trace for Perfetto, on the shared clock, so that the ranks' traces can be compared."""
    drawing = Drawing(title, (Panel("", timeline),), "s")
    trace = json.loads(perfetto(drawing))
    for event in trace["traceEvents"]:
        if "ts" in event:
            event["ts"] = round(event["ts"] + timeline.start * 1e6, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")
