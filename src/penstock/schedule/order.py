"""One walk over a schedule in an order that its ranks could really follow.

`verify` and `simulate` both take it: an op comes as soon as its rank has reached it and its
predecessors have come. Receives are posted in the order in which the sender sends, so that first in,
first out on a channel never pairs the wrong ends, and an op waits for its own inputs only.

Schedules may hold half a million ops, so ops are numbers here, and what an op needs is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.schedule.ops import Op, Schedule

_SLOT = {"F": 0, "B": 1, "I": 1, "W": 2}
NOTHING = -1


class Numbers:
    """A number for each op: three a microbatch and stage. B and I share one: a schedule holds either."""

    def __init__(self, schedule: Schedule) -> None:
        self.microbatches, self.depth = schedule.microbatches, schedule.placement.depth
        self.row = 3 * schedule.microbatches  # from a stage to the next
        self.count = self.row * schedule.stages

    def of(self, op: Op) -> int:
        return op.stage * self.row + 3 * op.microbatch + _SLOT[op.kind]

    def places(self, number: int) -> tuple[int, int, int]:
        """Stage, microbatch, and slot of a number: 0 is F, 1 is B or I, 2 is W."""
        stage, within = divmod(number, self.row)
        return stage, *divmod(within, 3)

    def program(self, ops: Iterable[Op]) -> list[int]:
        row = self.row
        return [stage * row + 3 * microbatch + _SLOT[kind] for stage, kind, microbatch in ops]

    def needed(self, number: int) -> int:
        """What must come over from another stage before this op; NOTHING where it takes none.

        What it needs of its own stage stands before it in the same program, which `verify` has checked.
        """
        kind, stage = number % 3, number // self.row
        if kind == 0 and stage % self.depth:
            return number - self.row
        if kind == 1 and (stage + 1) % self.depth:
            return number + self.row
        return NOTHING

    def needs(self, program: Iterable[int]) -> list[int]:
        """`needed` of each."""
        needed = self.needed
        return [needed(number) for number in program]


class Walk:
    """Iterate to get (rank, position) in a feasible order; afterwards `blocked` tells who is left waiting.

    programs, needs: numbers by rank and position; needs come from `Numbers.needs`
    satisfied: numbers to take as done although no program holds them at a reachable place
    together: number -> what it needs besides, because its overlapped neighbour does
    """

    def __init__(
        self,
        numbers: Numbers,
        programs: list[list[int]],
        needs: list[list[int]],
        satisfied: Iterable[int] = (),
        together: dict[int, int] | None = None,
    ) -> None:
        self._programs, self._needs, self._together = programs, needs, together or {}
        self._done = bytearray(numbers.count + 1)
        self._done[NOTHING] = 1  # the last place: needing nothing is always fulfilled
        for number in satisfied:
            self._done[number] = 1
        self.reached = [0] * len(programs)
        self.blocked: dict[int, int] = {}  # rank -> the number that it waits for

    def __iter__(self) -> Iterator[tuple[int, int]]:
        done, reached, together = self._done, self.reached, self._together
        waiting: dict[int, list[int]] = {}  # a number not yet done -> the ranks that stand waiting for it
        ready = list(range(len(reached)))
        while ready:
            rank = ready.pop()
            program, needs = self._programs[rank], self._needs[rank]
            for at in range(reached[rank], len(program)):
                number, needed = program[at], needs[at]
                if together and done[needed]:
                    needed = together.get(number, NOTHING)
                if not done[needed]:
                    waiting.setdefault(needed, []).append(rank)
                    reached[rank] = at
                    break
                done[number] = 1
                yield rank, at
                if number in waiting:
                    ready += waiting.pop(number)
            else:
                reached[rank] = len(program)
        self.blocked = {rank: needed for needed, ranks in waiting.items() for rank in ranks}
