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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from numbers import Real
from typing import Any, cast

from penstock.errors import ScheduleError
from penstock.schedule.collector import collector_paused
from penstock.schedule.op_arrays import NOTHING, OpArrays, Walk, by_kind
from penstock.schedule.ops import KINDS, SLOT, Kind, Op, Pair, Schedule, Violation

_LIVE: dict[Kind, int] = {"F": 1, "B": -1, "W": -1}
_DEFERRED: dict[Kind, int] = {"I": 1, "W": -1}
_COMPARED = 1000  # if this many ops are missing and nine in ten, they are not listed one by one


@dataclass(frozen=True)
class Proof:
    """The facts that `verify` has proven.

    peak_live[r]: the most live activations that rank r holds at once, each from its F to the end of B or W
    peak_deferred[r]: the most of them whose I is done and whose W is not
    arrays, order: all ops, and an order in which the ranks can run them
    """

    schedule: Schedule
    peak_live: tuple[int, ...]
    peak_deferred: tuple[int, ...]
    arrays: OpArrays = field(repr=False, compare=False)
    order: list[int] = field(repr=False, compare=False)


def verify(schedule: Schedule, memory_limit: int | None = None) -> Proof:
    """Prove `schedule`, or raise ScheduleError with every violation.

    memory_limit: the most live activations that a rank may hold; None for no limit
    """
    if violations := [*_form(schedule)]:
        raise ScheduleError(schedule.name, violations)  # without form, positions have no meaning
    with collector_paused(all_stay=True):
        arrays = OpArrays.of(schedule)
        too_late = _too_late(arrays)
        walk = arrays.walk({needed for _, needed in too_late})
        violations = [
            *_index(arrays),
            *_missing(arrays),
            *_order(arrays, too_late),
            *_pairs(arrays),
            *_deadlocks(arrays, walk),
        ]
    peak_live = _peaks(arrays, _LIVE)
    for rank, peak in enumerate(peak_live):
        if memory_limit is not None and peak > memory_limit:
            rule = f"it holds {peak} live activations at its peak, and {memory_limit} are allowed"
            violations.append(Violation(rule, rank))
    if violations:
        raise ScheduleError(schedule.name, violations)
    return Proof(schedule, peak_live, _peaks(arrays, _DEFERRED), arrays, walk.order)


def _form(schedule: Schedule) -> Iterator[Violation]:
    """One program per rank, made of ops, and not far fewer ops than a step has."""
    if type(schedule.microbatches) is not int or schedule.microbatches < 1:
        yield Violation(f"{schedule.microbatches} microbatches; a step has at least one")
        return
    if len(schedule.programs) != schedule.ranks:
        yield Violation(f"{len(schedule.programs)} programs for {schedule.ranks} ranks; each rank has one")
        return
    is_sound = True
    programs: Sequence[Sequence[object]] = schedule.programs
    for rank, program in enumerate(programs):
        for position, entry in enumerate(() if _are_ops(program) else program):
            if not _are_ops([entry]):
                is_sound = False
                yield Violation(f"{entry!r} is no op", rank, position)
    pairs: Collection[object] = schedule.overlaps
    for pair in () if _are_pairs(pairs) else pairs:
        if not isinstance(pair, Pair) or not (isinstance(pair[0], Op) and isinstance(pair[1], Op)):
            is_sound = False
            yield Violation(f"{pair!r} in overlaps is no Pair")
    count = sum(map(len, schedule.programs))
    least = schedule.microbatches * schedule.placement.depth * (2 if is_sound and schedule.trains else 1)
    if is_sound and least > 10 * count + _COMPARED:
        step = f"{schedule.microbatches} microbatches on {schedule.placement.depth} stages"
        yield Violation(f"{count} ops; {step} are {least} at least")


def _are_pairs(entries: Collection[object]) -> bool:
    """Whether all are pairs of ops, where no type is derived from these. There may be very many."""
    if not {*map(type, entries)} <= {Pair}:
        return False
    return {*map(type, chain.from_iterable(cast(Collection[Pair], entries)))} <= {Op}


def _are_ops(entries: Sequence[object]) -> bool:
    """Whether all are ops, of whole numbers and text. A schedule may have half a million: types are few."""
    if not all(issubclass(kind, Op) for kind in {*map(type, entries)}):
        return False
    return {*map(type, chain.from_iterable(cast(Sequence[Op], entries)))} <= {int, str}


def _index(arrays: OpArrays) -> Iterator[Violation]:
    """Each op exists, is on the rank of its stage, and is there once."""
    import numpy as np

    schedule = arrays.schedule
    for at in np.flatnonzero(~arrays.on_its_rank | ~arrays.is_indexed).tolist():
        op, rank, position = arrays.ops[at], *arrays.position(at)
        if arrays.stage[at] == NOTHING:
            rule = f"there are only stages 0 to {schedule.stages - 1}"
        elif arrays.kind[at] == NOTHING:
            rule = f"there are only the kinds {', '.join(KINDS[:-1])} and {KINDS[-1]}"
        elif arrays.microbatch[at] == NOTHING:
            rule = f"there are only microbatches 0 to {schedule.microbatches - 1}"
        elif (host := schedule.placement.rank_of[op.stage]) != rank:
            rule = f"stage {op.stage} is placed on rank {host}"
        else:
            first = int(arrays.index[op.stage, op.microbatch, SLOT[op.kind]])
            rule, (_, there) = "it is already at position", arrays.position(first)
            if arrays.ops[first] != op:
                rule = f"a backward is whole or split, and {arrays.ops[first]} is at position"
            rule = f"{rule} {there}"
        yield Violation(rule, rank, position, op)


def _missing(arrays: OpArrays) -> Iterator[Violation]:
    """Each microbatch goes through all stages of one copy of the model, and back in training."""
    import numpy as np

    schedule, placement = arrays.schedule, arrays.schedule.placement
    there = arrays.index != NOTHING  # by stage, microbatch and slot
    split = np.zeros(there.shape[:2], bool)
    halves = np.flatnonzero(arrays.exists & (arrays.kind == KINDS.index("I")))
    split[arrays.stage[halves], arrays.microbatch[halves]] = True
    split |= there[:, :, 2] & ~there[:, :, 1]  # or a W alone
    used = there.any(axis=2).reshape(placement.replicas, placement.depth, -1).any(axis=1)
    used[0] |= ~used.any(axis=0)  # the first copy, if none has an op of the microbatch
    taken = np.repeat(used, placement.depth, axis=0)
    needed = np.stack([taken, taken & schedule.trains, taken & split & schedule.trains], axis=2)
    absent = (needed & ~there).swapaxes(0, 1)  # microbatch by microbatch
    copies = used.sum(axis=0)
    for microbatch in np.flatnonzero((copies > 1) | absent.any(axis=(1, 2))).tolist():
        if copies[microbatch] > 1:
            rule = f"microbatch {microbatch} runs on {copies[microbatch]} copies of the model; it takes one"
            yield Violation(rule)
        for stage, slot in np.argwhere(absent[microbatch]).tolist():
            op = Op(stage, ("F", "I" if split[stage, microbatch] else "B", "W")[slot], microbatch)
            yield Violation("it is in no program", placement.rank_of[stage], None, op, op)


def _too_late(arrays: OpArrays) -> list[tuple[int, int]]:
    """Each op that comes before one of its rank that it needs, and that one."""
    import numpy as np

    pairs: list[tuple[int, int]] = []
    for needed in (arrays.source, arrays.own):
        later = needed > np.arange(len(needed))
        at = np.flatnonzero(later & (arrays.rank[needed] == arrays.rank) & arrays.is_indexed)
        pairs += zip(at.tolist(), needed[at].tolist(), strict=True)
    return pairs


def _order(arrays: OpArrays, too_late: list[tuple[int, int]]) -> list[Violation]:
    """No op comes before one of its rank that it needs, and no W follows a whole backward. Stage by stage."""
    import numpy as np

    violations = []
    for at, needed in too_late:
        op, (_, later) = arrays.ops[needed], arrays.position(needed)
        rule = f"it needs {op}, which comes later, at position {later}"
        violations.append(Violation(rule, *arrays.position(at), arrays.ops[at], op))
    after_whole = (arrays.slot == SLOT["W"]) & (arrays.kind[arrays.own] == KINDS.index("B"))
    for at in np.flatnonzero(after_whole & (arrays.own != NOTHING) & arrays.is_indexed).tolist():
        rule = f"{arrays.ops[arrays.own[at]]} has computed it already"
        violations.append(Violation(rule, *arrays.position(at), arrays.ops[at]))
    return sorted(violations, key=_stage_by_stage)


def _stage_by_stage(violation: Violation) -> tuple[int, int, int]:
    assert violation.op is not None
    stage, kind, microbatch = violation.op
    return stage, microbatch, SLOT[kind]


def _pairs(arrays: OpArrays) -> list[Violation]:
    """Each overlapped pair is a forward and, next in the program, a backward of something else.

    So an op is in two pairs only if another rule is broken, too.
    """
    import numpy as np

    ops, one = arrays.ops, np.array(arrays.pairs, np.intp)
    neighbours = zip(map(ops.__getitem__, one), map(ops.__getitem__, one + 1), strict=True)
    overlaps = arrays.schedule.overlaps
    all_there = len(one) == len(overlaps) and bool(arrays.is_indexed.all())
    apart = () if all_there else overlaps.difference(neighbours)
    rules = dict.fromkeys(apart, "overlaps two ops that do not follow each other")
    kinds = (arrays.slot[one] != SLOT["F"]) | (arrays.slot[one + 1] != SLOT["B"])
    for at in one[kinds].tolist():
        rules[Pair(*ops[at : at + 2])] = "overlaps other kinds than a forward and then a backward"
    for at in one[~kinds & (arrays.own[one + 1] == one)].tolist():
        rules[Pair(*ops[at : at + 2])] = "overlaps a backward with the forward that it needs"
    return [Violation(f"{pair} {rules[pair]}") for pair in sorted(rules, key=_numbers_first)]


def _numbers_first(pair: Pair) -> list[tuple[bool, Any]]:
    """The key of a sort of pairs, which may hold anything: Python compares no number with a text."""
    parts: list[Any] = [part for op in pair for part in op]
    return [(False, part) if isinstance(part, Real) else (True, str(part)) for part in parts]


def _deadlocks(arrays: OpArrays, walk: Walk) -> Iterator[Violation]:
    """One violation for each cycle of ranks.

    To the walk, missing ops and those that come too late count as done: they are reported already, so that a
    deadlock is reported only if it has no other cause.
    """
    for ring in cycles({rank: int(arrays.rank[needed]) for rank, needed in walk.blocked.items()}):
        reached = [arrays.ops[walk.reached[rank]] for rank in ring]
        awaited = [arrays.ops[walk.blocked[rank]] for rank in ring]
        steps = "; ".join(
            f"rank {rank} is at {op}, which waits for {needed}"
            for rank, op, needed in zip(ring, reached, awaited, strict=True)
        )
        ops = [op for both in zip(reached, awaited, strict=True) for op in both]
        each_once = tuple(op for at, op in enumerate(ops) if op != ops[at - 1])  # one may be awaited and next
        rule = f"deadlock: {steps}; and {awaited[0]} comes only later on its rank"
        yield Violation(rule, *arrays.position(walk.reached[ring[0]]), reached[0], awaited[0], each_once)


def cycles(waits_for: Mapping[int, int]) -> Iterator[list[int]]:
    """Each cycle of ranks that wait for one another. waits_for: rank -> the rank that it waits for."""
    seen: set[int] = set()
    for start in sorted(waits_for):
        path, rank = [], start
        while rank in waits_for and rank not in seen:
            seen.add(rank)
            path.append(rank)
            rank = waits_for[rank]
        if rank in path:
            yield path[path.index(rank) :]


def _peaks(arrays: OpArrays, changes: Mapping[Kind, int]) -> tuple[int, ...]:
    """By rank, the most that it holds at once; inference keeps nothing."""
    import numpy as np

    if not arrays.schedule.trains:
        return (0,) * arrays.schedule.ranks
    total = np.append(0, by_kind(changes)[arrays.kind].cumsum())  # before each op
    return tuple(int(total[start : stop + 1].max() - total[start]) for start, stop in pairwise(arrays.bounds))
