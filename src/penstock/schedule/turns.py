"""All ops of a schedule in one order in which they can run, and when each ends.

    turn      1    2    3    4    5    6    7          0 is the beginning of the step
    rank 0 | 0F0  0F1  .    .    .    0B0  0B1 R0      R0: rank 0 reduces the gradients of stage 0
    rank 1 | .    .    1F0  1B0  ...

An op begins when the result that it takes has arrived and its rank is free.
A rank reduces a stage's gradients after the last op that adds to them; this takes a turn of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.schedule.op_arrays import OpArrays

if TYPE_CHECKING:
    from penstock.schedule.op_arrays import Booleans, Floats, Integers


@dataclass(frozen=True, eq=False)
class Turns:
    """Arrays by turn, counted from 1: entry t - 1 is of turn t.

    op: the index of the op, as in `OpArrays`; of a reduction, that of the op that it follows
    reduces: whether the turn is a reduction
    needed, before: the turns whose result, and whose end on the same rank, it awaits; 0 for none
    delays: from the end of `needed` until its result is there
    """

    op: Integers
    reduces: Booleans
    needed: Integers
    before: Integers
    delays: Floats

    @classmethod
    def of(
        cls,
        arrays: OpArrays,
        order: list[int],
        delays: Floats,
        pairs: Collection[int] = (),
        reduced: Collection[int] = (),
    ) -> Turns:
        """The turns of ops and reductions.

        order: from `OpArrays.walk`
        delays: by op, until the result that it takes is there
        pairs: the first ops of overlapped pairs: who needs one waits for the second op as well
        reduced: the ops that are followed by a reduction
        """
        import numpy as np

        source, op = arrays.source, np.array(order, np.intp)
        if pairs:
            later = np.zeros(len(order) + 1, np.intp)
            later[[*pairs]] = 1
            source = source + later[source]
        follows = np.zeros(len(order), bool)
        follows[[*reduced]] = True
        at = np.flatnonzero(follows[op]) + 1
        op, reduces = np.insert(op, at, op[at - 1]), np.insert(np.zeros(len(op), bool), at, True)
        end = np.zeros(len(order) + 1, np.intp)  # the turn of each op; that of NOTHING, the last, is 0
        end[op[~reduces]] = np.flatnonzero(~reduces) + 1
        free = end.copy()  # the turn after which the op's rank is free
        free[op[reduces]] = np.flatnonzero(reduces) + 1
        needed = np.where(reduces, 0, end[source[op]])
        before = np.where(reduces, end[op], free[arrays.before[op]])
        return cls(op, reduces, needed, before, np.where(reduces, 0.0, delays[op]))

    def ends(self, durations: Floats, reductions: Mapping[int, float] | None = None) -> Floats:
        """The end of each turn, and that of turn 0 in front.

        durations: by op; reductions: how long the reduction after an op takes
        """
        import numpy as np

        takes = durations[self.op]
        for at in np.flatnonzero(self.reduces).tolist():
            takes[at] = (reductions or {})[int(self.op[at])]
        columns = (self.needed, self.before, self.delays, takes)
        ended = [0.0]
        append = ended.append  # half a million calls
        for needed, before, delay, duration in zip(*(column.tolist() for column in columns), strict=True):
            there, free_at = ended[needed] + delay, ended[before]
            append((there if there > free_at else free_at) + duration)
        return np.array(ended)

    def by_op(self, ended: Floats) -> Floats:
        """The ends of the ops, by their index."""
        import numpy as np

        ends = np.empty(len(self.op) - int(self.reduces.sum()))
        ends[self.op[~self.reduces]] = ended[1:][~self.reduces]
        return ends


def ends(
    arrays: OpArrays,
    order: list[int],
    durations: Floats,
    delays: Floats,
    pairs: Mapping[int, float],
    reductions: Mapping[int, float] | None = None,
) -> Floats:
    """The end of each op, if each starts when its rank is free and its input is there.

    order: from `OpArrays.walk`
    delays: from the end of the source of an op until its result is there
    pairs: by its first op, how long an overlapped pair takes: it starts when both its inputs are there, and
        its ops end together
    reductions: by the op that it follows, how long a reduction takes its rank
    """
    turns = Turns.of(arrays, order, delays, pairs, reductions or ())
    if pairs:  # the first op takes no time, and whoever needs it waits for the second
        durations = durations.copy()
        firsts = [*pairs]
        durations[firsts] = 0.0
        durations[[one + 1 for one in firsts]] = [*pairs.values()]
    end_times = turns.by_op(turns.ends(durations, reductions))
    for one in pairs:
        end_times[one] = end_times[one + 1]
    return end_times


def last_gradients(arrays: OpArrays) -> dict[int, int]:
    """By stage that trains, the index of the last op that adds to its gradients."""
    import numpy as np

    adds = np.flatnonzero(arrays.slot > 0)
    return dict(zip(arrays.stage[adds].tolist(), adds.tolist(), strict=True))  # of one rank: in order
