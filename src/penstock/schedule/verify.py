"""The proof that a schedule may run: complete, placed, ordered, free of deadlock, within memory.

Every rule is checked and every violation reported at once. What is proven here is what the executor
relies on: it never checks an order again, and it never holds more than `Proof.peak_live`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from penstock.errors import ScheduleError
from penstock.schedule.ops import Kind, Op, Schedule
from penstock.schedule.order import Walk


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
    """What `verify` established: `peak_live[r]` is the most live activations that rank r ever holds."""

    schedule: Schedule
    peak_live: tuple[int, ...]


def verify(schedule: Schedule, memory_limit: int | None = None) -> Proof:
    """Prove `schedule`, or raise ScheduleError with every violation.

    memory_limit: the most live activations that any rank may hold.
    """
    violations = [*_programs(schedule)]
    if not violations:  # the positions below mean something only where each rank has one program
        first = _first_places(schedule)
        violations += _places(schedule, first)
        violations += _missing(schedule, first)
        early = list(_local_order(schedule, first))
        violations += early
        violations += _deadlocks(schedule, first, early)
    peak_live = tuple(_peak_live(schedule, rank) for rank in range(len(schedule.programs)))
    violations += _memory(peak_live, memory_limit)
    if violations:
        raise ScheduleError(schedule.name, violations)
    return Proof(schedule, peak_live)


def _programs(schedule: Schedule) -> Iterator[Violation]:
    if schedule.microbatches < 1:
        yield Violation(f"{schedule.microbatches} microbatches; a step has at least one")
    if len(schedule.programs) != schedule.ranks:
        yield Violation(f"{len(schedule.programs)} programs for {schedule.ranks} ranks; each rank has one")


def _first_places(schedule: Schedule) -> dict[Op, tuple[int, int]]:
    """Where each op first stands (rank, position), on the rank of its stage where it stands there at all."""
    first: dict[Op, tuple[int, int]] = {}
    astray: dict[Op, tuple[int, int]] = {}
    for rank, program in enumerate(schedule.programs):
        hosted = schedule.placement.stages_of(rank)
        for position, op in enumerate(program):
            (first if op.stage in hosted else astray).setdefault(op, (rank, position))
    return astray | first


def _places(schedule: Schedule, first: dict[Op, tuple[int, int]]) -> Iterator[Violation]:
    """Each op exists, stands on the rank that hosts its stage, and stands there once."""
    hosts, stages, microbatches = schedule.placement.rank_of, schedule.stages, schedule.microbatches
    for rank, program in enumerate(schedule.programs):
        for position, op in enumerate(program):
            if not 0 <= op.stage < stages:
                yield Violation(f"there are only stages 0 to {stages - 1}", rank, position, op)
            elif op.kind not in get_args(Kind):
                yield Violation(
                    f"there are only the kinds {' and '.join(get_args(Kind))}", rank, position, op
                )
            elif not 0 <= op.microbatch < microbatches:
                yield Violation(f"there are only microbatches 0 to {microbatches - 1}", rank, position, op)
            elif hosts[op.stage] != rank:
                yield Violation(f"stage {op.stage} is placed on rank {hosts[op.stage]}", rank, position, op)
            elif first[op] != (rank, position):
                yield Violation(f"it stands already at position {first[op][1]}", rank, position, op)


def _missing(schedule: Schedule, first: dict[Op, tuple[int, int]]) -> Iterator[Violation]:
    """Each stage runs each microbatch forward, and backward where the schedule trains at all."""
    kinds: tuple[Kind, ...] = ("F", "B") if schedule.trains else ("F",)
    for stage in range(schedule.stages):
        for kind in kinds:
            for microbatch in range(schedule.microbatches):
                if (op := Op(stage, kind, microbatch)) not in first:
                    yield Violation("it is in no program", schedule.placement.rank_of[stage], None, op, op)


def _local_order(schedule: Schedule, first: dict[Op, tuple[int, int]]) -> Iterator[Violation]:
    """No op stands before a predecessor of its own rank."""
    for op, (rank, position) in first.items():
        for needed in op.predecessors(schedule.stages):
            place = first.get(needed)
            if place is not None and place[0] == rank and place[1] > position:
                yield Violation(f"it needs {needed}, which stands later, at position {place[1]}",
                                rank, position, op, needed)  # fmt: skip


def _deadlocks(
    schedule: Schedule, first: dict[Op, tuple[int, int]], early: list[Violation]
) -> Iterator[Violation]:
    """No cycle of ops that wait for one another across ranks.

    Ops that are missing or locally out of order have been reported; they count as done here, so that
    what is reported now is a deadlock of its own.
    """
    assumed = {violation.missing for violation in early if violation.missing is not None}
    for op in first:
        assumed.update(needed for needed in op.predecessors(schedule.stages) if needed not in first)
    walk = Walk(schedule, assumed)
    for _ in walk:
        pass
    seen: set[int] = set()
    for start in sorted(walk.blocked):
        path: list[int] = []  # follow who waits for whom until a rank comes up again
        rank = start
        while rank not in seen and rank in walk.blocked:
            seen.add(rank)
            path.append(rank)
            rank = first[walk.blocked[rank][1]][0]
        if rank in path:
            ring = path[path.index(rank) :]
            yield _cycle(walk, ring)


def _cycle(walk: Walk, ring: list[int]) -> Violation:
    """The deadlock of the ranks in `ring`, each standing at an op that waits for the next one's."""
    steps: list[str] = []
    ops: list[Op] = []
    for rank in ring:
        op, needed = walk.blocked[rank]
        ops += [op, needed]
        steps.append(f"rank {rank} stands at {op}, which waits for {needed}")
    op, needed = walk.blocked[ring[0]]
    rule = "deadlock: " + "; ".join(steps) + f"; and {needed} comes only later on its rank"
    each_once = tuple(here for at, here in enumerate(ops) if here != ops[at - 1])  # awaited and stood at
    return Violation(rule, ring[0], walk.position(ring[0]), op, needed, each_once)


def _peak_live(schedule: Schedule, rank: int) -> int:
    if not schedule.trains:
        return 0  # nothing is held for a backward that never comes
    live = peak = 0
    for op in schedule.programs[rank]:
        live += 1 if op.kind == "F" else -1
        peak = max(peak, live)
    return peak


def _memory(peak_live: tuple[int, ...], limit: int | None) -> Iterator[Violation]:
    for rank, peak in enumerate(peak_live):
        if limit is not None and peak > limit:
            yield Violation(f"it holds {peak} live activations at its peak, and {limit} are allowed", rank)
