"""The proof that a schedule can run: complete, in its place, in order, free of deadlock, within memory.

    rank 0 | 0F0 0B0 0F1 0B1        rank 0 is at 0B0, which waits for 1B0;
    rank 1 | 1F0 1F1 1B0 1B1        rank 1 is at 1F1, which waits for 0F1: a deadlock

`verify` checks every rule and reports all violations at once:

    form        one program per rank, made of ops
    index       each op exists, is on the rank of its stage, and is there once
    missing     each microbatch goes through all stages of one copy of the model, and back
    order       an op comes after those that it needs on its rank
    pairs       an overlapped pair is a forward and, next to it, a backward
    deadlocks   no ranks wait for one another in a cycle
    memory      no rank holds more live activations than the limit

The executor relies on this proof: it checks no order again, and never holds more than `Proof.peak_live`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import cast

from penstock.errors import ScheduleError
from penstock.schedule.op_arrays import KINDS, NOTHING, OpArrays, OpNumbers, all_are, possible_order
from penstock.schedule.ops import Op, Pair, Schedule, Violation, collector_paused
from penstock.schedule.order import Walk, buffered_sends, cycles

_LIVE = {"F": 1, "B": -1, "W": -1}
_DEFERRED = {"I": 1, "W": -1}
_COMPARED = 1000  # if this many ops are missing and nine in ten, they are not listed one by one


@dataclass(frozen=True)
class Proof:
    """The facts that `verify` has proven.

    peak_live[r]: the most live activations that rank r holds at once, each from its F to the end of B or W
    peak_deferred[r]: the most of them whose I is done and whose W is not
    """

    schedule: Schedule
    peak_live: tuple[int, ...]
    peak_deferred: tuple[int, ...]

    @cached_property
    def buffered_sends(self) -> int:
        """How many unreceived results a channel must hold, if a send blocks its rank until it has room.

        0: no deadlock even if each send blocks until its receive is posted, which happens when the receiver
        begins the op before the one that needs it. The runtime's sends never block.
        """
        return buffered_sends(self.schedule)


def verify(schedule: Schedule, memory_limit: int | None = None) -> Proof:
    """Prove `schedule`, or raise ScheduleError with every violation.

    memory_limit: the most live activations that a rank may hold; None for no limit
    """
    return proven(schedule, memory_limit)[0]


def proven(schedule: Schedule, memory_limit: int | None = None) -> tuple[Proof, OpArrays, list[int]]:
    """The proof of `verify`, and what it was made with: the ops, and an order in which they can run."""
    if valid := ordered(schedule):
        arrays, order = valid
        proof = Proof(schedule, *_peaks(arrays))
        if memory_limit is None or max(proof.peak_live) <= memory_limit:
            return proof, arrays, order
    violations = all_violations(schedule)
    if not all(isinstance(op, Op) for program in schedule.programs for op in program):
        raise ScheduleError(schedule.name, violations)  # nothing can be counted
    if memory_limit is not None:
        for rank in range(len(schedule.programs)):
            if (peak := _peak_live(schedule, rank)) > memory_limit:
                rule = f"it holds {peak} live activations at its peak, and {memory_limit} are allowed"
                violations.append(Violation(rule, rank))
    assert violations, "a schedule is valid or breaks a rule"
    raise ScheduleError(schedule.name, violations)


def ordered(schedule: Schedule) -> tuple[OpArrays, list[int]] | None:
    """The ops of a valid schedule, and an order in which they can run; None if it breaks a rule.

    This decides the same as `all_violations`, on arrays and without a word about what is wrong. The schedule
    keeps the result, unless its programs are of a type that can change.
    """
    if type(schedule.programs) is not tuple or {*map(type, schedule.programs)} != {tuple}:
        return _ordered(schedule)
    known = vars(schedule)
    if "ordered" not in known:
        with collector_paused():
            known["ordered"] = _ordered(schedule)
    op_order: tuple[OpArrays, list[int]] | None = known["ordered"]
    return op_order


def _ordered(schedule: Schedule) -> tuple[OpArrays, list[int]] | None:
    sized = type(schedule.microbatches) is int and schedule.microbatches > 0
    if not sized or len(schedule.programs) != schedule.ranks:
        return None
    if not _are_pairs(schedule.overlaps):
        return None
    arrays = OpArrays.of(schedule)
    if arrays is None or not _each_once(arrays) or not _can_overlap(arrays) or not _in_order(arrays):
        return None
    order = possible_order(arrays)
    return None if order is None else (arrays, order)


def _each_once(arrays: OpArrays) -> bool:
    """Each microbatch goes through one copy of the model and back; each op is there once, on its rank."""
    import numpy as np

    schedule, count = arrays.schedule, len(arrays.stage)
    placement = schedule.placement
    forwards = schedule.microbatches * placement.depth
    if not forwards <= count <= 3 * forwards:  # before `index` takes memory for all of them
        return False
    there = arrays.index != NOTHING
    forward, backward, weight = (there[:, :, slot] for slot in range(3))
    used = forward.reshape(placement.replicas, placement.depth, schedule.microbatches)
    split = np.zeros_like(forward)
    is_half = arrays.kind == KINDS.index("I")
    split[arrays.stage[is_half], arrays.microbatch[is_half]] = True
    return bool(
        (np.array(placement.rank_of)[arrays.stage] == arrays.rank).all()
        and there.sum() == count  # no op twice
        and (used.any(axis=1).sum(axis=0) == 1).all()
        and (used.all(axis=1) == used.any(axis=1)).all()
        and (backward == (forward & schedule.trains)).all()
        and (weight == split).all()
    )


def _in_order(arrays: OpArrays) -> bool:
    """No op comes before one of its rank that it needs. All ops are there."""
    import numpy as np

    ops, needed = np.arange(len(arrays.stage)), arrays.needed
    too_late = (needed > ops) & (arrays.rank[needed] == arrays.rank)
    own = np.where(arrays.slot > 0, arrays.index[arrays.stage, arrays.microbatch, arrays.slot - 1], NOTHING)
    return not (too_late.any() or (own > ops).any())


def _are_pairs(overlaps: Collection[object]) -> bool:
    """Whether `_is_no_pair` holds for none of them."""
    return all_are(Pair, overlaps) and all_are(Op, chain.from_iterable(cast(Collection[Pair], overlaps)))


def _can_overlap(arrays: OpArrays) -> bool:
    """Whether `_pairs` finds nothing wrong. No op is there twice.

    A forward before a backward is in one pair at most, so that no op needs to be looked for in two of them.
    """
    import numpy as np

    one = np.array(arrays.pairs, np.intp)
    two, stage, microbatch = one + 1, arrays.stage, arrays.microbatch
    return len(one) == len(arrays.schedule.overlaps) and bool(
        (arrays.slot[one] == 0).all()
        and (arrays.slot[two] == 1).all()
        and ((stage[one] != stage[two]) | (microbatch[one] != microbatch[two])).all()
    )


def _peaks(arrays: OpArrays) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """By rank, the most live activations and the most that await their W; inference keeps none."""
    import numpy as np

    def highest(changes: dict[str, int]) -> tuple[int, ...]:
        held = np.array([changes.get(kind, 0) for kind in KINDS])[arrays.kind].cumsum()
        # every rank ends with nothing, so that one sum over all ranks is that of each
        return tuple(int(held[start:stop].max(initial=0)) for start, stop in pairwise(arrays.bounds))

    if not arrays.schedule.trains:
        return (0,) * arrays.schedule.ranks, (0,) * arrays.schedule.ranks
    return highest(_LIVE), highest(_DEFERRED)


def all_violations(schedule: Schedule) -> list[Violation]:
    """Every broken rule but the limit of memory."""
    if violations := [*_form(schedule)]:
        return violations  # without form, positions have no meaning
    index = OpIndex(schedule)
    order = [*_order(index)]
    late = {index.numbers.of(violation.missing) for violation in order if violation.missing}
    return [*index.violations, *_missing(index), *order, *_pairs(schedule), *_deadlocks(index, late)]


def _form(schedule: Schedule) -> Iterator[Violation]:
    """One program per rank, made of ops, and not far fewer ops than a step has."""
    if type(schedule.microbatches) is not int or schedule.microbatches < 1:
        yield Violation(f"{schedule.microbatches} microbatches; a step has at least one")
        return
    if len(schedule.programs) != schedule.ranks:
        yield Violation(f"{len(schedule.programs)} programs for {schedule.ranks} ranks; each rank has one")
        return
    op_count, sound = 0, True
    for rank, program in enumerate(schedule.programs):
        op_count += len(program)
        for position, op in enumerate(program):
            if not isinstance(op, Op) or type(op.stage) is not int or type(op.microbatch) is not int:
                sound = False
                yield Violation(f"{op!r} is no op", rank, position)
    for pair in schedule.overlaps:
        if _is_no_pair(pair):
            sound = False
            yield Violation(f"{pair!r} in overlaps is no Pair")
    least = schedule.microbatches * schedule.placement.depth * (2 if sound and schedule.trains else 1)
    if sound and least > 10 * op_count + _COMPARED:
        step = f"{schedule.microbatches} microbatches on {schedule.placement.depth} stages"
        yield Violation(f"{op_count} ops; {step} are {least} at least")


def _is_no_pair(entry: object) -> bool:
    return not isinstance(entry, Pair) or not all(isinstance(op, Op) for op in entry)


class OpIndex:
    """The place of each op: `rank_at` and `position_at` by its number; rank NOTHING if no program has it.

    programs: the numbers of each rank's ops, NOTHING for an op that this schedule cannot have
    violations: ops that do not exist, are on another rank than their stage, or occur twice
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.numbers = schedule, OpNumbers(schedule)
        self.rank_at, self.position_at = [NOTHING] * self.numbers.count, [0] * self.numbers.count
        self.violations: list[Violation] = []
        self._misplaced: list[tuple[int, int, int]] = []
        self.programs = [
            [self._add(op, rank, position) for position, op in enumerate(program)]
            for rank, program in enumerate(schedule.programs)
        ]
        for number, rank, position in self._misplaced:  # better than reporting it as missing, too
            if self.rank_at[number] == NOTHING:
                self.rank_at[number], self.position_at[number] = rank, position

    def _add(self, op: Op, rank: int, position: int) -> int:
        """Note the place of the op. Returns its number."""
        schedule = self.schedule
        if not 0 <= op.stage < schedule.stages:
            wrong = f"there are only stages 0 to {schedule.stages - 1}"
        elif op.kind not in KINDS:
            wrong = f"there are only the kinds {', '.join(KINDS[:-1])} and {KINDS[-1]}"
        elif not 0 <= op.microbatch < schedule.microbatches:
            wrong = f"there are only microbatches 0 to {schedule.microbatches - 1}"
        else:
            number = self.numbers.of(op)
            host = schedule.placement.rank_of[op.stage]
            if host != rank:
                self.violations.append(
                    Violation(f"stage {op.stage} is placed on rank {host}", rank, position, op)
                )
                self._misplaced.append((number, rank, position))
            elif self.rank_at[number] != NOTHING:
                self.violations.append(Violation(self._twice(op, number), rank, position, op))
            else:
                self.rank_at[number], self.position_at[number] = rank, position
            return number
        self.violations.append(Violation(wrong, rank, position, op))
        return NOTHING

    def _twice(self, op: Op, number: int) -> str:
        other, position = self.at(number), self.position_at[number]
        if other == op:
            return f"it is already at position {position}"
        return f"a backward is whole or split, and {other} is at position {position}"

    def at(self, number: int) -> Op:
        """The op in the place of this number: B or I, which share a number, as the program has it."""
        return self.schedule.programs[self.rank_at[number]][self.position_at[number]]

    def op(self, number: int) -> Op:
        """The op of this number that the schedule has, or should have."""
        stage, microbatch, slot = self.numbers.places(number)
        if slot == 1 and self.is_split(stage, microbatch):
            return Op(stage, "I", microbatch)
        return self.numbers.op(number)

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Whether this backward is split, or has a W and neither B nor I."""
        if (stage, microbatch) in self.schedule.split:
            return True
        forward = stage * self.numbers.row + 3 * microbatch
        return self.rank_at[forward + 2] != NOTHING and self.rank_at[forward + 1] == NOTHING

    def copies_used(self, microbatch: int) -> list[int]:
        """The copies of the model that have an op of this microbatch; the first copy if none has."""
        depth, row = self.schedule.placement.depth, self.numbers.row
        firsts = ((stage, stage * row + 3 * microbatch) for stage in range(self.schedule.stages))
        used = {stage // depth for stage, first in firsts if {*self.rank_at[first : first + 3]} != {NOTHING}}
        return sorted(used) or [0]


def _missing(index: OpIndex) -> Iterator[Violation]:
    """Each microbatch goes through all stages of one copy of the model, and back in training."""
    schedule, rank_at = index.schedule, index.rank_at
    placement, trains, depth = schedule.placement, schedule.trains, schedule.placement.depth
    for microbatch in range(schedule.microbatches):
        used = index.copies_used(microbatch) if placement.replicas > 1 else [0]
        if len(used) > 1:
            yield Violation(f"microbatch {microbatch} runs on {len(used)} copies of the model; it takes one")
        for stage in chain.from_iterable(range(depth * copy, depth * (copy + 1)) for copy in used):
            forward = stage * index.numbers.row + 3 * microbatch
            slots = 1 + (trains and 1 + index.is_split(stage, microbatch))
            for number in range(forward, forward + slots):
                if rank_at[number] == NOTHING:
                    op = index.op(number)
                    yield Violation("it is in no program", placement.rank_of[stage], None, op, op)


def _order(index: OpIndex) -> Iterator[Violation]:
    """No op comes before one of its rank that it needs, and no W follows a whole backward."""
    rank_at, position_at, needed_by = index.rank_at, index.position_at, index.numbers.needed
    for number, rank in enumerate(rank_at):
        if rank == NOTHING:
            continue
        position, slot = position_at[number], number % 3
        for needed in (needed_by(number), number - 1 if slot else NOTHING):
            if needed != NOTHING and rank_at[needed] == rank and position_at[needed] > position:
                op = index.op(needed)
                rule = f"it needs {op}, which comes later, at position {position_at[needed]}"
                yield Violation(rule, rank, position, index.op(number), op)
        if slot == 2 and rank_at[number - 1] != NOTHING and (before := index.at(number - 1)).kind == "B":
            yield Violation(f"{before} has computed it already", rank, position, index.op(number))


def _pairs(schedule: Schedule) -> Iterator[Violation]:
    """Each overlapped pair is a forward and, next in the program, a backward of something else."""
    neighbours = {Pair(*two) for program in schedule.programs for two in pairwise(program)
                  if two in schedule.overlaps}  # fmt: skip
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


def _deadlocks(index: OpIndex, late: set[int]) -> Iterator[Violation]:
    """One violation for each cycle of ranks; the ops of a pair wait together.

    late: ops that come after an op of their rank that needs them. These and missing ops are reported
        already and count as done here, so that a deadlock is reported only if it has no other cause.
    """
    numbers, rank_at, overlaps = index.numbers, index.rank_at, index.schedule.overlaps
    needs = [numbers.needs(program) for program in index.programs]
    absent = {n for n in chain.from_iterable(needs) if n != NOTHING and rank_at[n] == NOTHING}
    also_needs = {
        index.programs[rank][at]: needs[rank][at + 1]
        for rank, program in enumerate(index.schedule.programs if overlaps else ())
        for at, two in enumerate(pairwise(program))
        if two in overlaps and needs[rank][at + 1] != NOTHING
    }
    walk = Walk(numbers.count, index.programs, needs, absent | late, also_needs)
    walk.run()
    for ring in cycles({rank: rank_at[needed] for rank, needed in walk.blocked.items()}):
        reached = [index.schedule.programs[rank][walk.reached[rank]] for rank in ring]
        awaited = [index.op(walk.blocked[rank]) for rank in ring]
        steps = "; ".join(
            f"rank {rank} is at {op}, which waits for {needed}"
            for rank, op, needed in zip(ring, reached, awaited, strict=True)
        )
        ops = [op for both in zip(reached, awaited, strict=True) for op in both]
        each_once = tuple(op for at, op in enumerate(ops) if op != ops[at - 1])  # one may be awaited and next
        rule = f"deadlock: {steps}; and {awaited[0]} comes only later on its rank"
        yield Violation(rule, ring[0], walk.reached[ring[0]], reached[0], awaited[0], each_once)


def _peak_live(schedule: Schedule, rank: int) -> int:
    """The most live activations of a rank, in a schedule that may break rules."""
    if not schedule.trains:
        return 0
    return max(accumulate((_LIVE.get(op.kind, 0) for op in schedule.programs[rank]), initial=0))
