"""The ops of a schedule as integers and as arrays, an order in which they can run, and when they end.

A schedule may have half a million ops. So what concerns each op alone is computed on arrays (numpy, imported
on first use). Only what one op passes on to another is a loop: `possible_order` and `ends`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, get_args

from penstock.schedule.ops import Kind, Op, Schedule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.intp]
    Floats = npt.NDArray[np.float64]

NOTHING = -1
KINDS: tuple[Kind, ...] = get_args(Kind)
_SLOT = {"F": 0, "B": 1, "I": 1, "W": 2}


class OpNumbers:
    """An integer for each op: three per stage and microbatch, in slots F, B or I, and W.

    B and I share a slot because a backward is either whole or split.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._depth = schedule, schedule.placement.depth
        self.row = 3 * schedule.microbatches  # numbers per stage
        self.count = self.row * schedule.stages

    def of(self, op: Op) -> int:
        return op.stage * self.row + 3 * op.microbatch + _SLOT[op.kind]

    def places(self, number: int) -> tuple[int, int, int]:
        """Stage, microbatch and slot."""
        stage, within = divmod(number, self.row)
        return stage, *divmod(within, 3)

    def op(self, number: int) -> Op:
        stage, microbatch, slot = self.places(number)
        if slot == 1:
            return self._schedule.gradient(stage, microbatch)
        return Op(stage, "W" if slot else "F", microbatch)

    def needed(self, number: int) -> int:
        """The op of the neighbouring stage whose result this op takes, or NOTHING.

        What it needs from its own stage comes earlier in the same program; `verify` checks that separately.
        """
        slot, stage = number % 3, number // self.row
        if slot == 0 and stage % self._depth:
            return number - self.row
        if slot == 1 and (stage + 1) % self._depth:
            return number + self.row
        return NOTHING

    def needs(self, program: Iterable[int]) -> list[int]:
        """`needed` for each op of a program."""
        return list(map(self.needed, program))


@dataclass(frozen=True)
class OpArrays:
    """All ops, those of rank 0 first: an op's index counts them in this order.

    bounds[r], bounds[r + 1]: where the ops of rank r begin and end
    ops, stage, kind, microbatch, rank: by index; kind counts in `KINDS`
    """

    schedule: Schedule
    ops: list[Op]
    bounds: list[int]
    stage: Integers
    kind: Integers
    microbatch: Integers
    rank: Integers

    @classmethod
    def of(cls, schedule: Schedule) -> OpArrays | None:
        """None without ops, or if an entry is no op or one that no schedule of this size has."""
        import numpy as np

        entries = [*chain.from_iterable(schedule.programs)]
        if not entries or not all_are(Op, entries) or {*map(len, entries)} != {3}:
            return None
        flat: list[Any] = [*chain.from_iterable(entries)]
        stages, kinds, microbatches = flat[::3], flat[1::3], flat[2::3]
        if {*map(type, stages), *map(type, microbatches)} != {int}:
            return None
        if not all_are(str, kinds) or not {*kinds} <= {*KINDS}:
            return None
        try:
            stage, microbatch = (np.fromiter(each, np.intp, len(each)) for each in (stages, microbatches))
        except OverflowError:
            return None
        for numbers, count in ((stage, schedule.stages), (microbatch, schedule.microbatches)):
            if not 0 <= numbers.min() <= numbers.max() < count:
                return None
        of_letter = np.zeros(128, np.intp)
        of_letter[[*map(ord, KINDS)]] = range(len(KINDS))
        lengths = [*map(len, schedule.programs)]
        return cls(
            schedule,
            entries,
            np.cumsum([0, *lengths]).tolist(),
            stage,
            of_letter[np.frombuffer("".join(kinds).encode(), np.uint8)],
            microbatch,
            np.repeat(np.arange(len(lengths)), lengths),
        )

    @cached_property
    def slot(self) -> Integers:
        """F, B or I, and W are 0, 1 and 2, as in `OpNumbers`."""
        import numpy as np

        return np.array([_SLOT[kind] for kind in KINDS])[self.kind]

    @cached_property
    def index(self) -> npt.NDArray[np.intp]:
        """The index of an op by stage, microbatch and slot; NOTHING if no program has it."""
        import numpy as np

        schedule = self.schedule
        indices = np.full((schedule.stages, schedule.microbatches, 3), NOTHING)
        indices[self.stage, self.microbatch, self.slot] = np.arange(len(self.stage))
        return indices

    @cached_property
    def edge(self) -> Integers:
        """The stage before the edge that an op's input crosses, whatever hosts it; NOTHING for no input."""
        import numpy as np

        depth = self.schedule.placement.depth
        of_forward = np.where(self.stage % depth > 0, self.stage - 1, NOTHING)
        of_gradient = np.where((self.stage + 1) % depth > 0, self.stage, NOTHING)
        return np.select([self.slot == 0, self.slot == 1], [of_forward, of_gradient], NOTHING)

    @cached_property
    def needed(self) -> Integers:
        """The index of the op of the neighbouring stage whose result an op takes, or NOTHING."""
        import numpy as np

        source = np.where(self.slot == 0, self.stage - 1, self.stage + 1) % self.schedule.stages
        return np.where(self.edge == NOTHING, NOTHING, self.index[source, self.microbatch, self.slot])

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
        return [
            start + at
            for start, program in zip(self.bounds, self.schedule.programs, strict=False)
            for at, two in enumerate(pairwise(program))
            if two in self.schedule.overlaps
        ]


def all_are(wanted: type, entries: Iterable[object]) -> bool:
    """Whether all are instances of the class."""
    return all(issubclass(entry_type, wanted) for entry_type in {*map(type, entries)})


def possible_order(arrays: OpArrays) -> list[int] | None:
    """All ops, by index, in an order that the ranks can follow; None if some wait for one another in a cycle.

    The ops of an overlapped pair wait together, and stay next to each other.
    """
    needed, pairs = arrays.needed.tolist(), frozenset(arrays.pairs)
    done, awaited = bytearray(len(needed) + 1), bytearray(len(needed))
    done[NOTHING] = 1  # the last place
    reached, stops = arrays.bounds[:-1], arrays.bounds[1:]
    waiting: dict[int, int] = {}  # by the op that it waits for, the rank: a result has one taker
    ready = deque(range(len(stops)))  # first in, first out: what a rank waits for piles up meanwhile
    order: list[int] = []
    while ready:
        rank = ready.popleft()
        start, stop = reached[rank], stops[rank]
        for at in range(start, stop):
            source = needed[at]
            if pairs and done[source] and at in pairs:
                source = needed[at + 1]
            if not done[source]:
                waiting[source], awaited[source] = rank, 1
                stop = at
                break
            done[at] = 1
            if awaited[at]:
                ready.append(waiting.pop(at))
        order += range(start, stop)
        reached[rank] = stop
    return None if waiting else order


def ends(
    arrays: OpArrays, order: list[int], durations: Floats, delays: Floats, pairs: Mapping[int, float]
) -> Floats:
    """The end of each op, if each starts when its rank has ended the one before and its input is there.

    order: from `possible_order`
    delays: from the end of the op that is needed until its result is there
    pairs: by its first op, how long an overlapped pair takes: it starts when both its inputs are there, and
        its ops end together
    """
    import numpy as np

    needed, durations = arrays.needed.copy(), durations.copy()
    for one, length in pairs.items():  # the first op takes no time, and whoever needs it waits for the second
        needed[arrays.needed == one] = one + 1
        durations[one], durations[one + 1] = 0.0, length
    place = np.zeros(len(order) + 1, np.intp)  # in the order, counted from 1; that of NOTHING, the last, is 0
    place[order] = np.arange(1, len(order) + 1)
    columns = (place[needed[order]], place[arrays.before[order]], delays[order], durations[order])
    ended = [0.0]
    append = ended.append  # half a million calls
    for source, before, delay, takes in zip(*(column.tolist() for column in columns), strict=True):
        there, free_at = ended[source] + delay, ended[before]
        append((there if there > free_at else free_at) + takes)
    end_times = np.array(ended)[place[:-1]]
    for one in pairs:
        end_times[one] = end_times[one + 1]
    return end_times
