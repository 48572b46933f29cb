"""From a schedule for few microbatches to one for many: repeat its steady state."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace

from penstock.schedule.search.evaluate import Best, times
from penstock.schedule.search.problem import OP_TIMED, Problem, Programs

_CUTS = 60  # moments that are tried


def fewer(problem: Problem, microbatches: int) -> Problem:
    """The same problem with fewer microbatches; all microbatches cost the same."""

    def of_each_stage(values: list[int]) -> list[int]:
        starts = range(0, problem.count, problem.row)
        return [value for start in starts for value in values[start : start + 3 * microbatches]]

    gone = 3 * (problem.microbatches - microbatches)  # between an op and the same one of the next stage

    def renumbered(op: int) -> int:
        return op if op < 0 else op - gone * (op // problem.row)

    return replace(
        problem,
        microbatches=microbatches,
        copies=problem.copies[:microbatches],
        duration=of_each_stage(problem.duration),
        need=[renumbered(op) for op in of_each_stage(problem.need)],
        delay=of_each_stage(problem.delay),
        take=of_each_stage(problem.take),
        give=of_each_stage(problem.give),
    )


def extend(best: Best, small: Best) -> None:
    """Offer the programs of `small`, which has fewer microbatches, with a stretch of them repeated.

    Each rank repeats a stretch of its program that has every line once. It holds the same before and after
    the stretch, so the limit is kept.
    """
    few, ends = small.problem, times(small.problem, small.programs)
    assert ends is not None
    starts = [[ends[n] - few.duration[n] for n in program] for program in small.programs]
    lines = [[few.line_of[n] for n in program] for program in small.programs]
    makespan, more = max(ends), best.problem.microbatches - few.microbatches
    for cut in range(_CUTS):
        extended: Programs = []
        for rank, program in enumerate(lines):
            near, length = bisect_left(starts[rank], makespan * (cut + 0.5) / _CUTS), len(few.lines_of[rank])
            at = _once(program, near, length)
            if at is None:
                break
            stretch = program[at : at + length]
            extended.append(_numbered(best.problem, program[:at] + stretch * more + program[at:]))
        if len(extended) == few.ranks:
            best.budget.spend(2 * OP_TIMED * best.problem.size)
            best.offer(extended, f"{small.method}, its steady state repeated")


def _once(program: list[int], near: int, count: int) -> int | None:
    """The position closest to `near` from which the next `count` ops are of different lines."""
    for at in sorted(range(max(0, near - count), min(len(program) - count, near + count) + 1),
                     key=lambda at: abs(at - near)):  # fmt: skip
        if len(set(program[at : at + count])) == count:
            return at
    return None


def _numbered(problem: Problem, lines: list[int]) -> list[int]:
    """The ops of these lines, each line in order."""
    seen: Counter[int] = Counter()
    ops = []
    for line in lines:
        ops.append(problem.lines[line][seen[line]])
        seen[line] += 1
    return ops
