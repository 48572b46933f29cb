"""The ops of a schedule as arrays: which op needs which, and an order in which they can run.

A schedule may have half a million ops. So what concerns each op alone is computed on arrays (numpy, imported
on first use). Only what one op passes on to another is a loop: `run_all`, and `ends` in `turns`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise, repeat
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedule.ops import KINDS, SLOT, SOURCE, Kind, Op, Schedule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.intp]
    Booleans = npt.NDArray[np.bool_]
    Floats = npt.NDArray[np.float64]

NOTHING = -1


@dataclass(frozen=True, eq=False)
class OpArrays:
    """All ops, those of rank 0 first: an op's index counts them in this order.

    bounds[r], bounds[r + 1]: where the ops of rank r begin and end
    ops, stage, kind, microbatch, rank: by index; kind counts in `KINDS`. NOTHING for a stage, kind or
        microbatch that the schedule does not have
    """

    schedule: Schedule
    ops: list[Op]
    bounds: list[int]
    stage: Integers
    kind: Integers
    microbatch: Integers
    rank: Integers

    @classmethod
    def of(cls, schedule: Schedule) -> OpArrays:
        """The arrays of any programs made of ops, whole or not."""
        import numpy as np

        ops = [*chain.from_iterable(schedule.programs)]
        lengths = [*map(len, schedule.programs)]
        fields = [*chain.from_iterable(ops)]
        stage, microbatch = (
            _numbers(fields[::3], schedule.stages),
            _numbers(fields[2::3], schedule.microbatches),
        )
        kind = _column(fields[1::3], KINDS)
        rank = np.repeat(np.arange(len(lengths)), lengths)
        return cls(schedule, ops, [*accumulate(lengths, initial=0)], stage, kind, microbatch, rank)

    @cached_property
    def exists(self) -> Booleans:
        """Whether the schedule has the stage, the kind and the microbatch of an op."""
        exists: Booleans = (self.stage != NOTHING) & (self.kind != NOTHING) & (self.microbatch != NOTHING)
        return exists

    @cached_property
    def on_its_rank(self) -> Booleans:
        """Whether the rank whose program has an op hosts the stage of that op."""
        import numpy as np

        hosts: Integers = np.array(self.schedule.placement.rank_of)[self.stage]
        return np.equal(hosts, self.rank)

    @cached_property
    def slot(self) -> Integers:
        """`SLOT` of the op's kind."""
        return by_kind(SLOT)[self.kind]

    @cached_property
    def index(self) -> Integers:
        """The index of an op by stage, microbatch and slot; NOTHING if no program has it.

        Of several ops it is the first on the rank of the stage, or else the first on any rank.
        """
        import numpy as np

        schedule = self.schedule
        indices = np.full((schedule.stages, schedule.microbatches, 3), NOTHING)
        for chosen in (self.exists & ~self.on_its_rank, self.exists & self.on_its_rank):
            at = np.flatnonzero(chosen)[::-1]  # the last one assigned stays
            indices[self.stage[at], self.microbatch[at], self.slot[at]] = at
        return indices

    @cached_property
    def is_indexed(self) -> Booleans:
        """Whether an op is the one that `index` has for its stage, microbatch and slot."""
        import numpy as np

        indexed = self.index[self.stage, self.microbatch, self.slot]
        return self.exists & np.equal(indexed, np.arange(len(indexed)))

    @cached_property
    def edge(self) -> Integers:
        """The stage before the edge that an op's input crosses, whatever hosts it; NOTHING for no input."""
        import numpy as np

        depth = self.schedule.placement.depth
        step: Integers = by_kind(SOURCE)[self.kind]
        in_one_copy = (self.stage + step) // depth == self.stage // depth
        return np.where(self.exists & (step != 0) & in_one_copy, self.stage + np.minimum(step, 0), NOTHING)

    @cached_property
    def source(self) -> Integers:
        """The index of the op of the neighbouring stage whose result an op takes, or NOTHING."""
        import numpy as np

        stage = np.where(self.edge == NOTHING, 0, self.stage + by_kind(SOURCE)[self.kind])
        return np.where(self.edge == NOTHING, NOTHING, self.index[stage, self.microbatch, self.slot])

    @cached_property
    def own(self) -> Integers:
        """The index of the op of its own stage that an op needs, or NOTHING."""
        import numpy as np

        needs = self.exists & (self.slot > 0)
        return np.where(needs, self.index[self.stage, self.microbatch, self.slot - 1], NOTHING)

    @cached_property
    def crosses(self) -> Booleans:
        """Whether an op takes its input from another rank."""
        import numpy as np

        return np.greater(self.source, NOTHING) & np.not_equal(self.rank[self.source], self.rank)

    @cached_property
    def before(self) -> Integers:
        """The index of the op before on the same rank, or NOTHING."""
        import numpy as np

        first = np.diff(self.rank, prepend=NOTHING) != 0
        return np.where(first, NOTHING, np.arange(len(self.rank)) - 1)

    @cached_property
    def pairs(self) -> list[int]:
        """The index of the first op of each overlapped pair whose ops are next to each other."""
        if not self.schedule.overlaps:
            return []
        if self.is_indexed.all():  # each op is there once
            return self._neighbours()
        return [
            start + at
            for start, program in zip(self.bounds, self.schedule.programs, strict=False)
            for at, two in enumerate(pairwise(program))
            if two in self.schedule.overlaps
        ]

    def _neighbours(self) -> list[int]:
        """`pairs`, looked up by their ops: there may be more than 100,000."""
        import numpy as np

        schedule = self.schedule
        fields = [*chain.from_iterable(chain.from_iterable(schedule.overlaps))]
        known = np.ones(len(schedule.overlaps), bool)
        indices = []
        for first in (0, 3):
            stage = _numbers(fields[first::6], schedule.stages)
            microbatch = _numbers(fields[first + 2 :: 6], schedule.microbatches)
            kind = _column(fields[first + 1 :: 6], KINDS)
            at = self.index[stage, microbatch, by_kind(SLOT)[kind]]
            known &= (
                (stage != NOTHING) & (microbatch != NOTHING) & (kind != NOTHING) & (self.kind[at] == kind)
            )
            indices.append(at)
        one, other = indices
        known &= (one != NOTHING) & (other == one + 1) & (self.rank[one] == self.rank[other])
        neighbours: list[int] = np.sort(one[known]).tolist()
        return neighbours

    def position(self, at: int) -> tuple[int, int]:
        """The rank of the op with this index, and its position in the rank's program."""
        rank = int(self.rank[at])
        return rank, at - self.bounds[rank]

    def walk(self, done: Collection[int] = ()) -> Walk:
        """Run all programs. The ops of an overlapped pair wait together. done: ops that nobody waits for"""
        sources = self.source.tolist()
        also_needs = {one: sources[one + 1] for one in self.pairs if sources[one + 1] != NOTHING}
        return run_all(self.bounds, sources, also_needs, done)


def _numbers(values: Sequence[object], count: int) -> Integers:
    """By entry, itself if it is one of the numbers from 0 to `count` - 1, or NOTHING."""
    import numpy as np

    if not {*map(type, values)} <= {int}:  # numpy would read a text as a number
        return _column(values, range(count))
    try:
        numbers = np.array(values, np.intp)
    except OverflowError:  # a number of very many digits
        return _column(values, range(count))
    return np.where((numbers >= 0) & (numbers < count), numbers, NOTHING)


def _column(values: Sequence[object], known: Iterable[object]) -> Integers:
    """By entry, its position among the `known` values, or NOTHING."""
    import numpy as np

    position = {value: at for at, value in enumerate(known)}
    return np.fromiter(map(position.get, values, repeat(NOTHING)), np.intp, len(values))


def by_kind(values: Mapping[Kind, int]) -> Integers:
    """The values in the order of `KINDS`, and 0 for NOTHING."""
    import numpy as np

    return np.array([*(values.get(kind, 0) for kind in KINDS), 0])


class Walk(NamedTuple):
    """How far the ranks get if each runs until it has to wait for another.

    order: the steps that ran, in an order in which they can run
    reached: by rank, the step at which it stopped, or its end
    blocked: by rank that has not reached its end, the step that it waits for
    """

    order: list[int]
    reached: list[int]
    blocked: dict[int, int]


def run_all(
    bounds: Sequence[int],
    needs: Sequence[int],
    also_needs: Mapping[int, int] | None = None,
    done: Iterable[int] = (),
) -> Walk:
    """Run the steps of all ranks, numbered across ranks: those of rank r begin at bounds[r].

    needs: the step that each one waits for, or NOTHING
    also_needs: a second one that this step waits for, because its overlapped neighbour does
    done: steps that count as done from the beginning
    """
    is_done = bytearray(len(needs) + 1)
    is_done[NOTHING] = 1  # the last place, which -1 refers to
    for step in done:
        is_done[step] = 1
    order: list[int] = []
    reached, stops = [*bounds[:-1]], bounds[1:]
    waiting: dict[int, list[int]] = {}  # step -> the ranks that wait for it
    ready = deque(range(len(stops)))  # first in, first out: a rank's inputs gather before its turn
    while ready:
        rank = ready.popleft()
        start, stop = reached[rank], stops[rank]
        for at in range(start, stop):
            needed = needs[at]
            if also_needs and is_done[needed]:
                needed = also_needs.get(at, NOTHING)
            if not is_done[needed]:
                waiting.setdefault(needed, []).append(rank)
                stop = at
                break
            is_done[at] = 1
            if at in waiting:
                ready += waiting.pop(at)
        order += range(start, stop)
        reached[rank] = stop
    return Walk(order, reached, {rank: needed for needed, ranks in waiting.items() for rank in ranks})
