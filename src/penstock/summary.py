"""A pipeline in one table of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.parts import StageFacts
from penstock.runtime.memory import Held
from penstock.schedule import Schedule, Timeline

_HEAD = ("stage", "rank", "layers", "parameters", "memory", "time")


def summary(
    schedule: Schedule,
    info: Sequence[StageFacts],
    weights: int,
    memory: Sequence[Held] | None = None,
    timeline: Timeline | None = None,
) -> str:
    """A line for each stage. memory, by rank, and timeline: of a step, None before the first.

    weights: how many parameters there are, one that several stages hold (of copies of the model, or tied)
        counted once
    memory: of all of a rank's stages, shown beside its first: weights, gradients and the most that the step
        held; before a step without the last
    time: the stage's share of the time in which all ranks computed
    """
    times = _times(timeline, len(info))
    rows = [_HEAD]
    seen: set[int] = set()
    for stage, facts in enumerate(info):
        held = "" if facts.rank in seen else _memory(facts.rank, info, memory)
        seen.add(facts.rank)
        share = "" if times is None else f"{times[stage] / (sum(times) or 1):.1%}"
        rows.append(
            (str(stage), str(facts.rank), _ranges(facts.layers), f"{facts.parameters:,}", held, share)
        )
    rows.append(("all", str(schedule.ranks), "", f"{weights:,}", "", ""))
    shared = sum(facts.parameters for facts in info) > weights
    return "\n".join([_title(schedule, timeline), *_aligned(rows), *_legend(timeline is not None, shared)])


def _title(schedule: Schedule, timeline: Timeline | None) -> str:
    stages = f"{schedule.stages} stages on {schedule.ranks} ranks"
    said = f"{schedule.name}, {stages}, {schedule.microbatches} microbatches"
    if timeline is None:
        return said
    return f"{said}; last step {timeline.makespan:.3g} s, bubble {timeline.bubble:.1%}"


def _legend(measured: bool, shared: bool) -> list[str]:
    known = "weights, gradients and the most that the last step held"
    unknown = "weights and gradients; more is known after a step"
    lines = [f"memory: a rank's {known if measured else unknown}"]
    return [*lines, "all: a weight that several stages hold is counted once"] if shared else lines


def _times(timeline: Timeline | None, stages: int) -> list[float] | None:
    if timeline is None:
        return None
    times = [0.0] * stages
    for span in timeline.spans:
        times[span.op.stage] += span.end - span.start
    return times


def _memory(rank: int, info: Sequence[StageFacts], memory: Sequence[Held] | None) -> str:
    fixed = sum(facts.bytes + facts.gradient_bytes for facts in info if facts.rank == rank)
    return size(fixed if memory is None else fixed + memory[rank].total)


def size(nbytes: float) -> str:
    """In the largest unit that leaves a whole number: 3.2 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, or 0, 2, 4-6 where there are gaps; - for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Numbers to the right, with a rule under the head and above the sum."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = ["  ".join(row).rstrip() for row in cells]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]
