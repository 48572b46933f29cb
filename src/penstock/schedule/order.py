"""One walk over a schedule in an order that its ranks could really follow.

`verify` and `simulate` both take it: an op comes as soon as its rank has reached it and its
predecessors have come. Receives are posted in the order in which the sender sends, so that first in,
first out on a channel never pairs the wrong ends, and an op waits for its own inputs only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from penstock.schedule.ops import Op, Schedule


class Walk:
    """Iterate to get (rank, op) in a feasible order; afterwards `blocked` tells who is left waiting.

    satisfied: ops to take as done although no program holds them at a reachable place.
    """

    def __init__(self, schedule: Schedule, satisfied: Collection[Op] = ()) -> None:
        self._schedule = schedule
        self._done: set[Op] = set(satisfied)
        self._reached = [0] * schedule.ranks
        self.blocked: dict[int, tuple[Op, Op]] = {}  # rank -> (the op it stands at, the op it waits for)

    def __iter__(self) -> Iterator[tuple[int, Op]]:
        schedule, done, reached = self._schedule, self._done, self._reached
        stages = schedule.stages
        waiting: dict[Op, list[int]] = {}  # an op not yet done -> the ranks that stand waiting for it
        ready = list(range(schedule.ranks))
        while ready:
            rank = ready.pop()
            program = schedule.programs[rank]
            while reached[rank] < len(program):
                op = program[reached[rank]]
                missing = next((p for p in op.predecessors(stages) if p not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                reached[rank] += 1
                done.add(op)
                yield rank, op
                ready.extend(waiting.pop(op, ()))
        for missing, ranks in waiting.items():
            for rank in ranks:
                self.blocked[rank] = (schedule.programs[rank][reached[rank]], missing)

    def position(self, rank: int) -> int:
        """How many ops of its program `rank` has done."""
        return self._reached[rank]
