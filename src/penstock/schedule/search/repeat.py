"""From a schedule for few microbatches to one for many: repeat its steady state."""

from __future__ import annotations

from bisect import bisect_left

from penstock.schedule.dispatch import Programs
from penstock.schedule.search.evaluate import Best, times
from penstock.schedule.search.problem import OP_TIMED

_CUTS = 60  # moments that are tried


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
            extended.append(best.problem.in_order(program[:at] + stretch * more + program[at:]))
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
