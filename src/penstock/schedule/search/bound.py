"""Lower bounds on the value of any schedule.

Each is for one rank with the stages s_1 < ... < s_v; its time counts from the offset of the rank.

    busy        arrival of its first op + its work + idle before its first I + idle after its last F
    way home    arrival + idle before its first I + its work, less the W that it can defer,
                + the way from its last I to the W of the first stage
    residence   arrival + the sum over its activations of size x the least time held, divided by the limit
    chain       the way of one microbatch there and back

Before its first I a rank can run only forwards, as many as fit in its memory, while the first microbatch goes
to the last stage and back: the rest of that time is idle. After its last F it can run only backwards, of what
its memory holds, while the last microbatch goes there and back.
"""

from __future__ import annotations

from math import gcd, inf

from penstock.schedule.dispatch import F, I, W
from penstock.schedule.search.problem import Problem


def lower_bound(problem: Problem) -> int:
    """In quanta: no programs have a smaller value (`evaluate.key`)."""
    if problem.placement.replicas > 1:
        return _of_copies(problem)
    bounds = _Bounds(problem)
    lower_bounds = [bounds.chain()]
    for rank in range(problem.ranks):
        lower_bounds += (bounds.busy(rank), bounds.way_home(rank), bounds.residence(rank))
    return max(lower_bounds)


def _of_copies(problem: Problem) -> int:
    """The work of each rank, for any distribution of the microbatches over the copies of the model.

    If microbatches are alike, the rank also waits for its first one to arrive.
    """
    arrival, depth = problem.arrival, problem.placement.depth
    used = set(problem.copies) == set(range(problem.placement.replicas))
    bounds = []
    for rank, (lines, offset) in enumerate(zip(problem.lines_of, problem.offset, strict=True)):
        work = 0
        for first in range(0, problem.row, 3):
            by_copy = [0] * problem.placement.replicas
            for stage in problem.placement.stages_of(rank):
                begin = stage * problem.row + first
                by_copy[stage // depth] += sum(problem.duration[begin : begin + 3])
            work += min(by_copy)
        start = min(arrival[line] for line in lines) if problem.alike and used else 0
        bounds.append(start + work - offset)
    return max(bounds)


class _Bounds:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        # by line, over its microbatches
        self.least, self.most, self.total = (
            problem.by_line(pick, problem.duration) for pick in (min, max, sum)
        )
        self.delay = problem.by_line(min, problem.delay)
        # by stage: the least that is held until I, and until W
        self.activation = problem.by_line(min, problem.take)[F::3]
        self.kept = problem.by_line(min, problem.give)[W::3]
        pairs = zip(problem.lines_of, problem.offset, strict=True)
        self.start = [min(self.problem.arrival[line] for line in lines) - offset for lines, offset in pairs]
        # sizes add up to multiples of their greatest common divisor only
        grain = gcd(*problem.take, *problem.give) or 1
        self.limit = [limit - limit % grain for limit in problem.limit]

    def chain(self) -> int:
        return self.problem.arrival[W] + self.least[W] - max(self.problem.offset)

    def busy(self, rank: int) -> int:
        before, after = self._before(rank), self._after(rank)
        # if all forwards can run before the first I, the two idle times may be one
        apart = self._forwards(rank) < sum(self.total[3 * s + F] for s in self._stages(rank))
        return self.start[rank] + self.problem.work[rank] + (before + after if apart else max(before, after))

    def way_home(self, rank: int) -> int:
        """After the last I of s_1 only W is left to run on the rank."""
        first = self._stages(rank)[0]
        items = [(self.most[3 * s + W], self.kept[s], self.total[3 * s + W]) for s in self._stages(rank)]
        put_off = max(self._fill(items, self.limit[rank]), self.most[3 * first + W])
        home = sum(self.least[3 * s + I] + self.delay[3 * s + I] for s in range(first)) + self.least[W]
        start = self.problem.arrival[3 * first + F] + self._before(rank)
        offset = self.problem.offset[self.problem.placement.rank_of[0]]
        return start + self.problem.work[rank] - put_off + home - offset

    def residence(self, rank: int) -> int:
        """An activation is held at least until its gradient can come back, and then until W."""
        if not self.limit[rank]:
            return 0
        total, problem = 0, self.problem
        for stage in self._stages(rank):
            until_i = self._return(stage, stage)
            for op in problem.lines[3 * stage + F]:
                whole, released = problem.take[op], problem.give[op + I]
                kept = whole - released
                total += released * until_i + kept * (until_i + problem.duration[op + W])
        return self.start[rank] - (-total // self.limit[rank])

    def _stages(self, rank: int) -> tuple[int, ...]:
        return self.problem.placement.stages_of(rank)

    def _before(self, rank: int) -> int:
        last = self._stages(rank)[-1]
        first_input_grad = self.problem.arrival[3 * last + I] - self.problem.offset[rank]
        return max(0, first_input_grad - self.start[rank] - self._forwards(rank))

    def _forwards(self, rank: int) -> int:
        """The most forward time that fits in memory before the first I."""
        stages = self._stages(rank)
        items = [(self.most[3 * s + F], self.activation[s], self.total[3 * s + F]) for s in stages]
        return self._fill(items, self.limit[rank])

    def _after(self, rank: int) -> int:
        """The idle time after the last F, on s_v, until its microbatch has come back and W of s_1 is done."""
        stages = self._stages(rank)
        first, last = 3 * stages[0], 3 * stages[-1]
        items: list[tuple[int, int, int]] = []
        for stage in stages:
            i, w = 3 * stage + I, 3 * stage + W
            items += (
                (self.most[i] + self.most[w], self.activation[stage], self.total[i] + self.total[w]),
                (self.most[w], self.kept[stage], self.total[w]),
            )
        left = min(self._fill(items, self.limit[rank]), sum(whole for _, _, whole in items[::2]))
        back = self._return(stages[-1], stages[0]) + self.least[first + W]
        return max(0, back - self.most[last + F] - left)

    def _return(self, start: int, end: int) -> int:
        """The least time from F on stage `start` to the end of I on stage `end`, of one microbatch."""
        depth = self.problem.placement.depth
        there = sum(self.least[3 * s + F] + self.delay[3 * s + F] for s in range(start, depth))
        back = sum(self.least[3 * s + I] + self.delay[3 * s + I] for s in range(end, depth))
        return there - self.delay[3 * start + F] + back

    def _fill(self, items: list[tuple[int, int, int]], limit: int) -> int:
        """The most time that fits into `limit`, with fractions. items: time, size, and time in all."""
        time = 0.0
        for apiece, size, together in sorted(items, key=lambda item: -item[0] / item[1] if item[1] else -inf):
            if not size:
                time += together
                continue
            taken = min(together, limit * apiece / size)
            time += taken
            limit -= int(taken * size / apiece) if apiece else 0  # rounded down: what is left is no less
        return -int(-time // 1)
