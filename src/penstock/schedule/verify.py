"""The proof that a schedule may run: complete, placed, ordered, free of deadlock, within memory.

Every rule is checked and every violation reported at once. What is proven here is what the executor
relies on: it never checks an order again, and it never holds more than `Proof.peak_live`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import get_args

from penstock.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Pair, Schedule, Violation
from penstock.schedule.order import NOTHING, Numbers, Walk, buffered_sends

# ---- Where each op of a schedule stands, whether it belongs there or not.


_KINDS: tuple[Kind, ...] = get_args(Kind)


class OpIndex:
    """The rank and position of each op, by its number (order.py); rank NOTHING where no program holds it.

    programs: those of the ranks, in numbers
    violations: ops that do not exist, stand astray, or stand twice
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.numbers = schedule, Numbers(schedule)
        self.programs: list[list[int]] = []
        self.rank_at, self.position_at = [NOTHING] * self.numbers.count, [0] * self.numbers.count
        self.violations = list(self._read())

    def op(self, number: int) -> Op:
        """The op of this number that the schedule holds, or else should hold."""
        stage, microbatch, slot = self.numbers.places(number)
        if slot == 1:
            return Op(stage, "I" if self.is_split(stage, microbatch) else "B", microbatch)
        return Op(stage, "W" if slot else "F", microbatch)

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Also where W stands and neither B nor I does."""
        if (stage, microbatch) in self.schedule.split:
            return True
        forward = stage * self.numbers.row + 3 * microbatch
        return self.rank_at[forward + 2] != NOTHING and self.rank_at[forward + 1] == NOTHING

    def copies_used(self, microbatch: int) -> list[int]:
        """The copies of the model that hold an op of this microbatch; the first where none does."""
        depth, row = self.schedule.placement.depth, self.numbers.row
        found = {
            stage // depth
            for stage in range(self.schedule.stages)
            for slot in range(3)
            if self.rank_at[stage * row + 3 * microbatch + slot] != NOTHING
        }
        return sorted(found) or [0]

    def _read(self) -> Iterator[Violation]:
        hosts = self.schedule.placement.rank_of
        astray: list[tuple[int, int, int]] = []
        for rank, program in enumerate(self.schedule.programs):
            row: list[int] = []
            for position, op in enumerate(program):
                if unknown := self._unknown(op):
                    yield Violation(unknown, rank, position, op)
                    continue
                number = self.numbers.of(op)
                if hosts[op.stage] != rank:
                    yield Violation(
                        f"stage {op.stage} is placed on rank {hosts[op.stage]}", rank, position, op
                    )
                    astray.append((number, rank, position))
                elif self.rank_at[number] != NOTHING:
                    yield Violation(self._again(op, number), rank, position, op)
                else:
                    self.rank_at[number], self.position_at[number] = rank, position
                row.append(number)
            self.programs.append(row if len(row) == len(program) else self._gaps(program))
        for number, rank, position in astray:
            if self.rank_at[number] == NOTHING:
                self.rank_at[number], self.position_at[number] = rank, position

    def _unknown(self, op: Op) -> str:
        """Why this is no op of the schedule; empty where it is one."""
        if not 0 <= op.stage < len(self.schedule.placement.rank_of):
            return f"there are only stages 0 to {self.schedule.stages - 1}"
        if op.kind not in _KINDS:
            return f"there are only the kinds {', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
        if not 0 <= op.microbatch < self.schedule.microbatches:
            return f"there are only microbatches 0 to {self.schedule.microbatches - 1}"
        return ""

    def _again(self, op: Op, number: int) -> str:
        """What is wrong with an op whose place is taken."""
        position = self.position_at[number]
        other = self.schedule.programs[self.rank_at[number]][position]
        if other == op:
            return f"it stands already at position {position}"
        return f"a backward is whole or split, and {other} stands at position {position}"

    def _gaps(self, program: tuple[Op, ...]) -> list[int]:
        """As numbers, with NOTHING for what is no op, so that positions stay right."""
        return [NOTHING if self._unknown(op) else self.numbers.of(op) for op in program]


# ---- Cycles of ops that wait for one another across ranks.


def deadlocks(standing: OpIndex, late: set[int]) -> Iterator[Violation]:
    """One violation for each cycle; overlapped ops wait together.

    late: ops (by number) that stand behind an op of their own rank that needs them

    These, and ops that are missing, have been reported. They count as done here, so that what is reported now
    is a deadlock of its own.
    """
    numbers, rank_at = standing.numbers, standing.rank_at
    needs = [numbers.needs(program) for program in standing.programs]
    absent = {n for n in chain.from_iterable(needs) if n != NOTHING and rank_at[n] == NOTHING}
    walk = Walk(numbers, standing.programs, needs, absent | late, _together(standing))
    for _ in walk:
        pass
    seen: set[int] = set()
    for start in sorted(walk.blocked):
        path: list[int] = []  # follow who waits for whom until a rank comes up again
        rank = start
        while rank not in seen and rank in walk.blocked:
            seen.add(rank)
            path.append(rank)
            rank = rank_at[walk.blocked[rank]]
        if rank in path:
            yield _cycle(standing, walk, path[path.index(rank) :])


def _together(standing: OpIndex) -> dict[int, int]:
    """What the first of two overlapped ops waits for besides: what the second needs."""
    programs, overlaps = standing.schedule.programs, standing.schedule.overlaps
    return {
        standing.programs[rank][at]: needed
        for rank, program in enumerate(programs if overlaps else ())
        for at, two in enumerate(pairwise(program))
        if two in overlaps
        if (needed := standing.numbers.needed(standing.programs[rank][at + 1])) != NOTHING
    }


def _cycle(standing: OpIndex, walk: Walk, ring: list[int]) -> Violation:
    """The deadlock of the ranks in `ring`, each standing at an op that waits for the next one's."""
    steps: list[str] = []
    ops: list[Op] = []
    for rank in ring:
        op, needed = _stands(standing, walk, rank)
        ops += [op, needed]
        steps.append(f"rank {rank} stands at {op}, which waits for {needed}")
    op, needed = _stands(standing, walk, ring[0])
    rule = "deadlock: " + "; ".join(steps) + f"; and {needed} comes only later on its rank"
    each_once = tuple(here for at, here in enumerate(ops) if here != ops[at - 1])  # awaited and stood at
    return Violation(rule, ring[0], walk.reached[ring[0]], op, needed, each_once)


def _stands(standing: OpIndex, walk: Walk, rank: int) -> tuple[Op, Op]:
    """The op that `rank` stands at, and the one that it waits for."""
    return standing.schedule.programs[rank][walk.reached[rank]], standing.op(walk.blocked[rank])


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
    standing = OpIndex(schedule)
    yield from standing.violations
    yield from _missing(standing)
    order = list(_local_order(standing))
    yield from order
    yield from _pairs(schedule)
    late = {standing.numbers.of(violation.missing) for violation in order if violation.missing}
    yield from deadlocks(standing, late)


def _missing(standing: OpIndex) -> Iterator[Violation]:
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


def _local_order(standing: OpIndex) -> Iterator[Violation]:
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
