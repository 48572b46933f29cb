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
from penstock.schedule.ops import Kind, Op, Pair, Schedule
from penstock.schedule.order import NOTHING, Numbers, Walk
from penstock.schedule.rendezvous import buffered_sends

_KINDS: tuple[Kind, ...] = get_args(Kind)
_COMPARED = 1000  # programs this far from the size they should have are not compared op by op


@dataclass(frozen=True)
class Violation:
    """One broken rule. `position` counts ops in the rank's program from 0; what does not apply is None."""

    rule: str
    rank: int | None = None
    position: int | None = None
    op: Op | None = None
    missing: Op | None = None
    cycle: tuple[Op, ...] = ()

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}"
        where += "" if self.position is None else f", position {self.position}"
        what = "" if self.op is None else f"{self.op}"
        return ": ".join(part for part in (where, what, self.rule) if part)


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
        reading = _Reading(schedule)
        violations += reading.violations
        violations += reading.missing()
        violations += reading.local_order()
        violations += reading.pairs()
        violations += reading.deadlocks()
    if not all(isinstance(op, Op) for program in schedule.programs for op in program):
        raise ScheduleError(schedule.name, violations)  # nothing can be counted
    peaks = [_peaks(schedule, rank) for rank in range(len(schedule.programs))]
    peak_live = tuple(live for live, _ in peaks)
    violations += _memory(peak_live, memory_limit)
    if violations:
        raise ScheduleError(schedule.name, violations)
    return Proof(schedule, peak_live, tuple(deferred for _, deferred in peaks))


def _programs(schedule: Schedule) -> Iterator[Violation]:
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


class _Reading:
    """Where each op stands. `violations`: ops that do not exist, stand astray, or stand twice."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.numbers = schedule, Numbers(schedule)
        self.programs: list[list[int]] = []
        self.rank_at, self.position_at = [NOTHING] * self.numbers.count, [0] * self.numbers.count
        self.violations = list(self._read())
        self.early: set[int] = set()  # needed by an op that stands before them on the same rank

    def op(self, number: int) -> Op:
        """The op of this number that the schedule holds, or else should hold."""
        stage, microbatch, slot = self.numbers.places(number)
        if slot == 1:
            return Op(stage, "I" if self._is_split(stage, microbatch) else "B", microbatch)
        return Op(stage, "W" if slot else "F", microbatch)

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

    def missing(self) -> Iterator[Violation]:
        """Each microbatch goes through all stages of one copy of the model, and back where they train."""
        placement, trains = self.schedule.placement, self.schedule.trains
        depth = placement.depth
        for microbatch in range(self.schedule.microbatches):
            used = self._copies_used(microbatch) if placement.replicas > 1 else [0]
            if len(used) > 1:
                yield Violation(
                    f"microbatch {microbatch} runs on {len(used)} copies of the model; it takes one"
                )
            for stage in chain.from_iterable(range(depth * copy, depth * (copy + 1)) for copy in used):
                forward = stage * self.numbers.row + 3 * microbatch
                slots = range(1 + (trains and 1 + self._is_split(stage, microbatch)))
                for number in (forward + slot for slot in slots):
                    if self.rank_at[number] == NOTHING:
                        op = self.op(number)
                        yield Violation("it is in no program", placement.rank_of[stage], None, op, op)

    def _is_split(self, stage: int, microbatch: int) -> bool:
        """Also where W stands and neither B nor I does."""
        if (stage, microbatch) in self.schedule.split:
            return True
        forward = stage * self.numbers.row + 3 * microbatch
        return self.rank_at[forward + 2] != NOTHING and self.rank_at[forward + 1] == NOTHING

    def _copies_used(self, microbatch: int) -> list[int]:
        """The copies of the model that hold an op of this microbatch; the first where none does."""
        depth, row = self.schedule.placement.depth, self.numbers.row
        found = {
            stage // depth
            for stage in range(self.schedule.stages)
            for slot in range(3)
            if self.rank_at[stage * row + 3 * microbatch + slot] != NOTHING
        }
        return sorted(found) or [0]

    def local_order(self) -> Iterator[Violation]:
        """No op stands before a predecessor of its own rank."""
        for number, rank in enumerate(self.rank_at):
            if rank == NOTHING:
                continue
            needed = self.numbers.needed(number)
            if needed != NOTHING:
                yield from self._order(number, needed)
            if number % 3:
                yield from self._order(number, number - 1)

    def _order(self, number: int, needed: int) -> Iterator[Violation]:
        rank, position = self.rank_at[number], self.position_at[number]
        if self.rank_at[needed] == rank and self.position_at[needed] > position:
            self.early.add(needed)
            rule = f"it needs {self.op(needed)}, which stands later, at position {self.position_at[needed]}"
            yield Violation(rule, rank, position, self.op(number), self.op(needed))
        if number % 3 == 2 and needed == number - 1 and self.rank_at[needed] != NOTHING:
            whole = self.schedule.programs[self.rank_at[needed]][self.position_at[needed]]
            if whole.kind == "B":
                yield Violation(f"{whole} has computed it already", rank, position, self.op(number))

    def pairs(self) -> Iterator[Violation]:
        """Each overlapped pair is a forward and a backward next to each other."""
        if not self.schedule.overlaps:
            return
        neighbours = {Pair(*two) for program in self.schedule.programs for two in pairwise(program)}
        taken: set[Op] = set()
        for pair in sorted(self.schedule.overlaps):
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

    def deadlocks(self) -> Iterator[Violation]:
        """No cycle of ops that wait for one another across ranks; overlapped ops wait together.

        Ops that are missing or locally out of order have been reported; they count as done here, so that
        what is reported now is a deadlock of its own.
        """
        numbers = self.numbers
        needs = [numbers.needs(program) for program in self.programs]
        absent = {n for n in chain.from_iterable(needs) if n != NOTHING and self.rank_at[n] == NOTHING}
        walk = Walk(numbers, self.programs, needs, absent | self.early, self._together())
        for _ in walk:
            pass
        seen: set[int] = set()
        for start in sorted(walk.blocked):
            path: list[int] = []  # follow who waits for whom until a rank comes up again
            rank = start
            while rank not in seen and rank in walk.blocked:
                seen.add(rank)
                path.append(rank)
                rank = self.rank_at[walk.blocked[rank]]
            if rank in path:
                yield self._cycle(walk, path[path.index(rank) :])

    def _together(self) -> dict[int, int]:
        """What the first of two overlapped ops waits for besides: what the second needs."""
        programs, overlaps = self.schedule.programs, self.schedule.overlaps
        return {
            self.programs[rank][at]: needed
            for rank, program in enumerate(programs if overlaps else ())
            for at, (here, there) in enumerate(pairwise(program))
            if (here, there) in overlaps
            if (needed := self.numbers.needed(self.programs[rank][at + 1])) != NOTHING
        }

    def _cycle(self, walk: Walk, ring: list[int]) -> Violation:
        """The deadlock of the ranks in `ring`, each standing at an op that waits for the next one's."""
        steps: list[str] = []
        ops: list[Op] = []
        for rank in ring:
            op, needed = self._stands(walk, rank)
            ops += [op, needed]
            steps.append(f"rank {rank} stands at {op}, which waits for {needed}")
        op, needed = self._stands(walk, ring[0])
        rule = "deadlock: " + "; ".join(steps) + f"; and {needed} comes only later on its rank"
        each_once = tuple(here for at, here in enumerate(ops) if here != ops[at - 1])  # awaited and stood at
        return Violation(rule, ring[0], walk.reached[ring[0]], op, needed, each_once)

    def _stands(self, walk: Walk, rank: int) -> tuple[Op, Op]:
        """The op that `rank` stands at, and the one that it waits for."""
        return self.schedule.programs[rank][walk.reached[rank]], self.op(walk.blocked[rank])


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
