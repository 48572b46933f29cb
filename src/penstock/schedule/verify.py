"""The proof that a schedule may run: complete, placed, ordered, free of deadlock, within memory.

Every rule is checked and every violation reported at once. What is proven here is what the executor
relies on: it never checks an order again, and it never holds more than `Proof.peak_live`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

from penstock.errors import ScheduleError
from penstock.schedule.deadlock import deadlocks
from penstock.schedule.ops import Op, Pair, Schedule
from penstock.schedule.order import NOTHING
from penstock.schedule.rendezvous import buffered_sends
from penstock.schedule.standing import Standing
from penstock.schedule.violation import Violation

_COMPARED = 1000  # programs this far from the size they should have are not compared op by op


@dataclass(frozen=True)
class Proof:
    """What `verify` established.

    peak_live[r]: the most live activations that rank r ever holds, from F to the end of B or W
    peak_deferred[r]: how many of its live activations at most await their W, the I being done
    """

    schedule: Schedule
    peak_live: tuple[int, ...]
    peak_deferred: tuple[int, ...]

    @cached_property
    def buffered_sends(self) -> int:
        """How many sent results each channel must hold that are not yet received, for the ranks to go on.

        0: no deadlock even where a send blocks its rank until the receive is posted, which a rank does when
        it begins the op before the one that needs it. The runtime's sends never block.
        """
        return buffered_sends(self.schedule)


def verify(schedule: Schedule, memory_limit: int | None = None) -> Proof:
    """Prove `schedule`, or raise ScheduleError with every violation.

    memory_limit: the most live activations that any rank may hold.
    """
    violations = [*_programs(schedule)]
    if not violations:  # the positions below mean something only where each rank has one program
        violations += _ops(schedule)
    if not all(isinstance(op, Op) for program in schedule.programs for op in program):
        raise ScheduleError(schedule.name, violations)  # nothing can be counted
    peaks = [_peaks(schedule, rank) for rank in range(len(schedule.programs))]
    peak_live = tuple(live for live, _ in peaks)
    violations += _memory(peak_live, memory_limit)
    if violations:
        raise ScheduleError(schedule.name, violations)
    return Proof(schedule, peak_live, tuple(deferred for _, deferred in peaks))


def _programs(schedule: Schedule) -> Iterator[Violation]:
    """There is one program for each rank, made of ops."""
    if type(schedule.microbatches) is not int or schedule.microbatches < 1:
        yield Violation(f"{schedule.microbatches} microbatches; a step has at least one")
        return
    if len(schedule.programs) != schedule.ranks:
        yield Violation(f"{len(schedule.programs)} programs for {schedule.ranks} ranks; each rank has one")
        return
    strange = [
        Violation(f"{op!r} is no op", rank, position)
        for rank, program in enumerate(schedule.programs)
        for position, op in enumerate(program)
        if not isinstance(op, Op) or type(op.stage) is not int or type(op.microbatch) is not int
    ]
    strange += [
        Violation(f"{pair!r} in overlaps is no Pair")
        for pair in schedule.overlaps
        if not isinstance(pair, Pair) or not all(isinstance(op, Op) for op in pair)
    ]
    if strange:
        yield from strange
        return
    found = sum(map(len, schedule.programs))
    least = schedule.microbatches * schedule.placement.depth * (2 if schedule.trains else 1)
    if least > 10 * found + _COMPARED:  # or this would be a list of all that is missing
        yield Violation(
            f"{found} ops; {schedule.microbatches} microbatches on {schedule.placement.depth} stages "
            f"are {least} at least"
        )


def _ops(schedule: Schedule) -> Iterator[Violation]:
    """The ops are those of a step, each in its place."""
    standing = Standing(schedule)
    yield from standing.violations
    yield from _missing(standing)
    order = list(_local_order(standing))
    yield from order
    yield from _pairs(schedule)
    late = {standing.numbers.of(violation.missing) for violation in order if violation.missing}
    yield from deadlocks(standing, late)


def _missing(standing: Standing) -> Iterator[Violation]:
    """Each microbatch goes through all stages of one copy of the model, and back where they train."""
    schedule, row, rank_at = standing.schedule, standing.numbers.row, standing.rank_at
    placement, trains = schedule.placement, schedule.trains
    depth = placement.depth
    for microbatch in range(schedule.microbatches):
        used = standing.copies_used(microbatch) if placement.replicas > 1 else [0]
        if len(used) > 1:
            yield Violation(f"microbatch {microbatch} runs on {len(used)} copies of the model; it takes one")
        for stage in chain.from_iterable(range(depth * copy, depth * (copy + 1)) for copy in used):
            forward = stage * row + 3 * microbatch
            slots = 1 + (trains and 1 + standing.is_split(stage, microbatch))
            for number in range(forward, forward + slots):
                if rank_at[number] == NOTHING:
                    op = standing.op(number)
                    yield Violation("it is in no program", placement.rank_of[stage], None, op, op)


def _local_order(standing: Standing) -> Iterator[Violation]:
    """No op stands before a predecessor of its own rank, and no W beside a backward that is whole."""
    programs, needed_by = standing.schedule.programs, standing.numbers.needed
    rank_at, position_at = standing.rank_at, standing.position_at
    for number, rank in enumerate(rank_at):
        if rank == NOTHING:
            continue
        position, slot = position_at[number], number % 3
        for needed in (needed_by(number), number - 1 if slot else NOTHING):
            if needed != NOTHING and rank_at[needed] == rank and position_at[needed] > position:
                op = standing.op(needed)
                rule = f"it needs {op}, which stands later, at position {position_at[needed]}"
                yield Violation(rule, rank, position, standing.op(number), op)
        if slot == 2 and rank_at[number - 1] != NOTHING:
            before = programs[rank_at[number - 1]][position_at[number - 1]]
            if before.kind == "B":
                yield Violation(f"{before} has computed it already", rank, position, standing.op(number))


def _pairs(schedule: Schedule) -> Iterator[Violation]:
    """Each overlapped pair is a forward and a backward next to each other."""
    if not schedule.overlaps:
        return
    neighbours = {Pair(*two) for program in schedule.programs for two in pairwise(program)}
    taken: set[Op] = set()
    for pair in sorted(schedule.overlaps):
        kinds = (pair.forward.kind, pair.backward.kind)
        if pair not in neighbours:
            yield Violation(f"{pair} overlaps two ops that do not follow each other")
        elif kinds not in (("F", "B"), ("F", "I")):
            yield Violation(f"{pair} overlaps other kinds than a forward and then a backward")
        elif pair.forward == Op(pair.backward.stage, "F", pair.backward.microbatch):
            yield Violation(f"{pair} overlaps a backward with the forward that it needs")
        elif taken.intersection(pair):
            yield Violation(f"{pair} overlaps an op that overlaps another one")
        taken.update(pair)


_LIVE = {"F": 1, "B": -1, "W": -1}
_DEFERRED = {"I": 1, "W": -1}


def _peaks(schedule: Schedule, rank: int) -> tuple[int, int]:
    if not schedule.trains:
        return 0, 0  # nothing is held for a backward that never comes
    live = deferred = peak_live = peak_deferred = 0
    for op in schedule.programs[rank]:
        live += _LIVE.get(op.kind, 0)
        deferred += _DEFERRED.get(op.kind, 0)
        peak_live, peak_deferred = max(peak_live, live), max(peak_deferred, deferred)
    return peak_live, peak_deferred


def _memory(peak_live: tuple[int, ...], limit: int | None) -> Iterator[Violation]:
    for rank, peak in enumerate(peak_live):
        if limit is not None and peak > limit:
            yield Violation(f"it holds {peak} live activations at its peak, and {limit} are allowed", rank)
