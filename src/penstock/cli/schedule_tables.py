"""The output of ``penstock schedule``: tables, and data for --json."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from penstock.cli.shared import table
from penstock.schedule import Entry, Found, Op, Proof, Sampled, Schedule, Timeline
from penstock.schedule.render.drawing import percent

_PATH_SHOWN = 8  # ops at each end of a critical path
_STAGES_SHOWN = 8
_FIGURES = ("makespan", "bubble", "inner_bubble")  # of a timeline


def title(schedule: Schedule) -> str:
    placement = schedule.placement
    parts = [f"{schedule.ranks} ranks", f"{schedule.stages} stages", f"{schedule.microbatches} microbatches"]
    if placement.replicas > 1:
        parts.insert(2, f"{placement.replicas} copies of the model")
    return f"{schedule.name}: {', '.join(parts)}"


def programs(schedule: Schedule) -> str:
    """Each rank's ops on a line."""
    width = len(str(max(0, len(schedule.programs) - 1)))
    lines = str(schedule).splitlines()
    return "\n".join(f"rank {rank:>{width}} | {line}" for rank, line in enumerate(lines))


def proven(proof: Proof) -> Iterator[RenderableType]:
    schedule = proof.schedule
    rows = (
        (rank, _stages(schedule.placement.stages_of(rank)), proof.peak_live[rank], proof.peak_deferred[rank])
        for rank in range(schedule.ranks)
    )
    yield table(("rank", "stages", "peak live", "awaiting W at most"), rows, left=["stages"])
    yield "proven: each op is there once, on its rank, in an order that its rank can follow; no deadlock"


def _stages(stages: Sequence[int]) -> str:
    shown = ", ".join(map(str, stages[:_STAGES_SHOWN]))
    return shown if len(stages) <= _STAGES_SHOWN else f"{shown} and {len(stages) - _STAGES_SHOWN} more"


def timeline(simulated: Timeline, memory_limit: float | None) -> Iterator[RenderableType]:
    rows = (
        (rank, number(simulated.busy[rank]), percent(simulated.rank_bubble[rank]),
         percent(simulated.rank_inner_bubble[rank]), *_waited(simulated, rank), simulated.peak_live[rank],
         _memory(simulated.peak_memory[rank], memory_limit))
        for rank in range(simulated.ranks)
    )  # fmt: skip
    heads = ("rank", "busy", "bubble", "inner bubble", "for peers", "for the wire", "peak live",
             "peak memory")  # fmt: skip
    yield table(heads, rows)
    yield f"makespan {number(simulated.makespan)}, most memory {number(max(simulated.peak_memory))}"
    inner = percent(simulated.inner_bubble)
    yield f"bubble {percent(simulated.bubble)}, or {inner} between each rank's first and last op"
    yield f"critical path: {_path(simulated.critical_path)}"


def _waited(simulated: Timeline, rank: int) -> tuple[str, str]:
    """The shares of the step that the rank waited for another rank's compute, and for the wire."""
    idle, makespan = simulated.idle[rank], simulated.makespan or 1.0
    return percent(idle.peer / makespan), percent(idle.wire / makespan)


def _memory(peak: float, limit: float | None) -> Text | str:
    if limit is None or peak <= limit:
        return number(peak)
    return Text(f"{number(peak)}, over {number(limit)}", style="red")


def _path(ops: Sequence[Op]) -> str:
    if len(ops) <= 2 * _PATH_SHOWN:
        return " ".join(map(str, ops))
    ends = (" ".join(map(str, part)) for part in (ops[:_PATH_SHOWN], ops[-_PATH_SHOWN:]))
    return f" ... {len(ops) - 2 * _PATH_SHOWN} more ... ".join(ends)


def timeline_data(schedule: Schedule, simulated: Timeline, memory_limit: float | None) -> dict[str, Any]:
    """The data of `timeline`, with all of the critical path."""
    by_rank = {
        "rank": range(simulated.ranks),
        "busy": simulated.busy,
        "bubble": simulated.rank_bubble,
        "inner_bubble": simulated.rank_inner_bubble,
        "idle": [idle._asdict() for idle in simulated.idle],
        "peak_live": simulated.peak_live,
        "peak_memory": simulated.peak_memory,
    }
    return {
        **{name: getattr(schedule, name) for name in ("name", "ranks", "stages", "microbatches")},
        **{name: getattr(simulated, name) for name in _FIGURES},
        "memory_limit": memory_limit,
        "per_rank": [dict(zip(by_rank, row, strict=True)) for row in zip(*by_rank.values(), strict=True)],
        "critical_path": [str(op) for op in simulated.critical_path],
    }


_PERCENTS = (1, 50, 99)  # of the samples


def sampled(drawn: Sampled) -> Iterator[RenderableType]:
    pipelines = f"{drawn.replicas} replicas, {drawn.ranks * drawn.replicas} ranks in all"
    yield f"{len(drawn.steps)} steps, {pipelines if drawn.replicas > 1 else 'one pipeline'}"
    lost = f"{percent(drawn.loss)} more than the undisturbed {number(drawn.undisturbed)}"
    yield f"mean step {number(drawn.mean)}, {lost}; standard deviation {number(drawn.deviation)}"
    yield ", ".join(f"{share} % of the steps take at most {number(drawn.percentile(share))}"
                    for share in _PERCENTS)  # fmt: skip
    for rank, cost in drawn.by_slow_rank.items():
        yield f"rank {rank} alone, as slow, and no jitter: {_fine_percent(cost)} more"


def sampled_data(schedule: Schedule, drawn: Sampled) -> dict[str, Any]:
    return {
        **{name: getattr(schedule, name) for name in ("name", "ranks", "stages", "microbatches")},
        **{name: getattr(drawn, name) for name in ("replicas", "mean", "deviation", "undisturbed", "loss")},
        "percentiles": {share: drawn.percentile(share) for share in _PERCENTS},
        "steps": drawn.steps,
        "by_slow_rank": drawn.by_slow_rank,
    }


def _fine_percent(share: float) -> str:
    """Of a slow rank: they differ in the second digit."""
    return f"{100 * share:.2f} %"


def comparison(
    entries: Iterable[Entry],
    ranks: int,
    microbatches: int,
    memory_limit: float | None,
    slowed: Mapping[str, Sequence[float]] | None = None,
) -> Iterator[RenderableType]:
    """slowed: by label, how much longer the step takes, as a share of it, with each rank alone slow"""
    limit = "" if memory_limit is None else f", memory limit {number(memory_limit)}"
    entries = tuple(entries)
    yield f"{ranks} ranks, {microbatches} microbatches{limit}"
    heads = ("schedule", "step time", "bubble", "inner", "stages", "live", "memory", "fits")
    yield table(heads, map(_row, entries), left=("schedule", "fits"))
    for entry in entries:
        if entry.also:
            yield f"{entry.label} is also {' and '.join(entry.also)}"
        if not entry.fits:
            why = [] if entry.timeline else [entry.refusal]  # otherwise the advice is enough
            yield f"{entry.label}: {'. '.join([*why, *filter(None, [entry.advice])])}."
        copies = entry.schedule.placement.replicas if entry.schedule else 1
        if copies > 1:
            yield f"{entry.label}: holds the model's weights {copies} times, which is not counted here."
    yield from _slow_ranks(slowed or {})
    yield ""
    yield "Costs are those of one stage per rank: with v stages per rank each takes and holds 1/v, and edges"
    yield "take the same. inner: the bubble between each rank's first and last op. live: the most"
    yield "activations of such stages that a rank holds. memory: the same in the unit of --activation."


def _slow_ranks(slowed: Mapping[str, Sequence[float]]) -> Iterator[RenderableType]:
    if slowed:
        ranks = len(next(iter(slowed.values())))
        heads = ("schedule", *(f"rank {rank}" for rank in range(ranks)))
        yield ""
        yield "how much longer the step takes if this rank alone is slow"
        rows = ((label, *map(_fine_percent, costs)) for label, costs in slowed.items())
        yield table(heads, rows, left=["schedule"])


def _row(entry: Entry) -> tuple[object, ...]:
    verdict = Text("yes") if entry.fits else Text("no", style="red")
    simulated = entry.timeline
    if simulated is None:
        return (entry.label, *("-",) * 6, verdict)
    stages = entry.schedule.stages if entry.schedule else 0
    return (
        entry.label, number(simulated.makespan), percent(simulated.bubble), percent(simulated.inner_bubble),
        stages, max(simulated.peak_live), number(entry.peak_memory), verdict,
    )  # fmt: skip


def comparison_data(
    entries: Iterable[Entry],
    ranks: int,
    microbatches: int,
    memory_limit: float | None,
    slowed: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Any]:
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "memory_limit": memory_limit,
        "schedules": [_entry_data(entry, (slowed or {}).get(entry.label)) for entry in entries],
    }


def _entry_data(entry: Entry, slowed: Sequence[float] | None) -> dict[str, Any]:
    simulated, schedule = entry.timeline, entry.schedule
    return {
        **({} if slowed is None else {"by_slow_rank": slowed}),
        "name": entry.name,
        "options": dict(entry.options),
        "also": list(entry.also),
        "stages": schedule.stages if schedule else None,
        **{name: getattr(simulated, name, None) for name in _FIGURES},
        "peak_live": max(simulated.peak_live) if simulated else None,
        "peak_memory": entry.peak_memory if simulated else None,
        **{name: getattr(entry, name) for name in ("fits", "refusal", "advice")},
    }


def outcome_lines(outcome: Found) -> Iterator[str]:
    """How the search ended, and how good its result is."""
    yield f"found by {outcome.method}"
    if outcome.optimal:
        yield "proven optimal: none with this placement is faster within the limit"
    elif outcome.lower_bound > 0:
        gap = outcome.value / outcome.lower_bound - 1
        yield f"none is faster than {number(outcome.lower_bound)}: at most {percent(gap)} could be gained"
    if outcome.best_builder is None:
        yield "no schedule that is built by name keeps the limit on this placement"
    else:
        assert outcome.builder_value is not None
        value = number(outcome.builder_value)
        yield f"the best built by name that keeps the limit: {outcome.best_builder}, {value}"
    if outcome.cut_short:
        yield "stopped early because this machine is slow or busy: another run may find another one"


def number(value: float) -> str:
    """At most six digits."""
    return f"{value:.6g}"
