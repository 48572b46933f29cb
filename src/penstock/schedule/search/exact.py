"""CP-SAT on all of a schedule or on a part of it, and large-neighbourhood search with it.

A part is a stretch of each rank's program. Ops before it stay; ops behind it keep their order and move up. So
if an op of the part ends at t, the step takes at least t + its tail, and the best order of the part is the
best of the whole if all else stays.

OR-tools is an optional dependency: see `available`.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any, Literal, NamedTuple

from penstock.schedule.dispatch import F, I, Programs, W
from penstock.schedule.op_arrays import NOTHING
from penstock.schedule.search.evaluate import Best, checked_key, key, tails, times
from penstock.schedule.search.problem import CP_SAT_SECOND, OP_MODELLED, Problem

# minimize the value; the sum of the ranks' ends without a larger value; or both at once
Aim = Literal["value", "ends", "both"]


def available() -> bool:
    return importlib.util.find_spec("ortools") is not None


class Solved(NamedTuple):
    """The best programs found. bound: no value is smaller, with all else fixed; proven: they are optimal"""

    programs: Programs
    bound: int
    proven: bool


class Part(NamedTuple):
    """The positions from starts[r] up to stops[r] of rank r's program.

    in_order: ranks whose ops keep their order but may move in time
    """

    starts: Sequence[int]
    stops: Sequence[int]
    in_order: frozenset[int] = frozenset()


def solve(best: Best, programs: Programs, part: Part, aim: Aim, seconds: float) -> Solved:
    """The best order of `part` within `seconds`, as CP-SAT counts them. best: all of it but its programs"""
    from ortools.sat.python import cp_model

    problem, budget, least = best.problem, best.budget, best.least
    model = _Model(cp_model.CpModel(), problem, programs, part, aim, least)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # several race, and results would differ
    solver.parameters.random_seed = best.random.randrange(2**30)
    solver.parameters.max_deterministic_time = seconds
    solver.parameters.max_time_in_seconds = max(0.1, budget.wall_left)
    budget.spend(OP_MODELLED * len(model.start))
    status = solver.solve(model.model)
    budget.spend(CP_SAT_SECOND * solver.response_proto.deterministic_time)
    bound = max(least, round(solver.best_objective_bound)) if aim == "value" else least
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(programs, bound, False)
    reordered = [list(program) for program in programs]
    for rank, piece in enumerate(model.pieces):
        if rank in part.in_order:
            continue
        # of ops at the same time, those that take no time come first
        start = {op: solver.value(model.start[op]) for op in piece}
        ordered = sorted(piece, key=lambda op: (start[op], problem.duration[op] > 0))
        reordered[rank][part.starts[rank] : part.stops[rank]] = ordered
    return Solved(reordered, bound, status == cp_model.OPTIMAL)


def solve_whole(best: Best, aim: Aim, share: float) -> None:
    """Improve on `best` by CP-SAT on all ops, with what is left of `share` of the budget."""
    seconds = best.budget.left(share) / CP_SAT_SECOND
    if seconds <= 0:
        return
    whole = Part([0] * len(best.programs), [len(program) for program in best.programs])
    solved = solve(best, best.programs, whole, aim, seconds)
    best.offer(solved.programs, "CP-SAT")
    # with copies of the model, another distribution of the microbatches may be better
    if best.problem.exact_sizes and best.problem.placement.replicas == 1:
        best.least = max(best.least, solved.bound)


class _Model:
    """A cp_model.CpModel with the variable start[n] for each op n of the part."""

    def __init__(
        self, model: Any, problem: Problem, programs: Programs, part: Part, aim: Aim, least: int
    ) -> None:
        self.model, self.problem, self.programs, self.part = model, problem, programs, part
        ends = times(problem, programs)
        assert ends is not None, "the programs deadlock"
        self.ends, self.tails = ends, tails(problem, programs)
        self.value = key(problem, programs, ends).value
        self.horizon = self.value + max(problem.offset)
        self.pieces = [program[a:b] for program, a, b in zip(programs, part.starts, part.stops, strict=True)]
        self.free = {op for piece in self.pieces for op in piece}
        self.behind = {
            op for program, stop in zip(programs, part.stops, strict=True) for op in program[stop:]
        }
        self.start: dict[int, Any] = {}
        for rank in range(problem.ranks):
            self._rank(rank)
        self._order()
        for rank in range(problem.ranks):
            if rank not in part.in_order:
                self._memory(rank)
        self._aim(aim, least)

    def _rank(self, rank: int) -> None:
        """Run the rank's ops one at a time, none earlier than the ops before the part allow."""
        problem, intervals = self.problem, []
        before = self.part.starts[rank]
        free_at = self.ends[self.programs[rank][before - 1]] if before else 0
        for op in self.pieces[rank]:
            earliest, needed, takes = free_at, problem.need[op], problem.duration[op]
            if needed != NOTHING and needed not in self.free:
                earliest = max(earliest, self.ends[needed] + problem.delay[op])
            self.start[op] = start = self.model.new_int_var(earliest, self.horizon - takes, "")
            self.model.add_hint(start, self.ends[op] - takes)
            intervals.append(self.model.new_fixed_size_interval_var(start, takes, ""))
        if rank in self.part.in_order:
            for one, other in pairwise(self.pieces[rank]):
                self.model.add(self.start[other] >= self._end(one))
        else:
            self.model.add_no_overlap(intervals)

    def _end(self, op: int) -> Any:
        return self.start[op] + self.problem.duration[op]

    def _order(self) -> None:
        start, need, delay = self.start, self.problem.need, self.problem.delay
        for op in start:
            if op % 3 != F and op - 1 in start:
                self.model.add(start[op] >= self._end(op - 1))
            if need[op] in start:
                self.model.add(start[op] >= self._end(need[op]) + delay[op])
        if self.problem.alike:  # then an optimal schedule has every line in the order of the microbatches
            for line in self.problem.lines:
                for one, other in pairwise([op for op in line if op in start]):
                    self.model.add(start[other] >= self._end(one))

    def _memory(self, rank: int) -> None:
        problem, stages = self.problem, self.problem.placement.stages_of(rank)
        if sum(problem.take[op] for op in problem.ops_of[rank]) <= problem.limit[rank]:
            return
        if problem.alike:
            exact = [self._room_by_order(stage, len(stages) == 1) for stage in stages]
            if all(exact):
                return
        self._room_over_time(rank)

    def _room_by_order(self, stage: int, alone: bool) -> bool:
        """If k fit, F of microbatch i + k waits for W of i. Returns True if memory needs nothing else."""
        forwards = list(self.problem.lines[3 * stage + F])
        if not forwards:
            return True
        limit = self.problem.limit[self.problem.rank_of[forwards[0]]]
        whole, released = self.problem.take[forwards[0]], self.problem.give[forwards[0] + I]
        kept = whole - released
        for kind, count in (
            (I, limit // whole if whole else 0),
            (W, (limit - whole) // kept + 1 if kept else 0),
        ):
            if count and (kind == W or released):
                for one, other in zip(forwards, forwards[count:], strict=False):
                    if one + kind in self.start and other in self.start:
                        self.model.add(self.start[other] >= self._end(one + kind))
        return alone and not (released and kept) and not self.problem.take[forwards[0] + I]

    def _room_over_time(self, rank: int) -> None:
        """Each activation as an interval with a size; their sum stays under the limit."""
        model, problem = self.model, self.problem
        limit, intervals, sizes = problem.limit[rank], [], []
        for stage in problem.placement.stages_of(rank):
            for first in problem.lines[3 * stage + F]:
                released, more = problem.give[first + I], problem.take[first + I]
                for size, since, until in (
                    (released, first, first + I),
                    (problem.take[first] - released, first, first + W),
                    (more, first + I, first + W),
                ):
                    if not size or since in self.behind or not (until in self.free or until in self.behind):
                        continue
                    if since not in self.free and until not in self.free:
                        limit -= size
                        continue
                    begin = self.start[since] if since in self.free else 0
                    end = self._end(until) if until in self.free else self.horizon
                    length = model.new_int_var(0, self.horizon, "")
                    intervals.append(model.new_interval_var(begin, length, end, ""))
                    sizes.append(size)
        model.add_cumulative(intervals, sizes, limit)

    def _aim(self, aim: Aim, least: int) -> None:
        """The value is the latest end plus tail, over the ops that ops behind the part wait for."""
        model, problem = self.model, self.problem
        value = model.new_int_var(min(least, self.value), self.value, "")
        sum_of_ends = []
        for rank, (program, piece) in enumerate(zip(self.programs, self.pieces, strict=True)):
            if not piece:
                continue
            stop = self.part.stops[rank]
            tail = -problem.offset[rank]
            if stop < len(program):
                tail = problem.duration[program[stop]] + self.tails[program[stop]]
            end = model.new_int_var(0, self.horizon, "")
            model.add(value >= end + tail)
            sum_of_ends.append(end)
            for op in piece:
                model.add(end >= self._end(op))
                fed = problem.feeds[op]
                if fed != NOTHING and fed not in self.free:
                    way = problem.delay[fed] + problem.duration[fed] + self.tails[fed]
                    model.add(value >= self._end(op) + way)
        if aim == "value":
            model.minimize(value)
        elif aim == "ends":
            model.minimize(sum(sum_of_ends))
        else:
            model.minimize(_WEIGHT * problem.ranks * value + sum(sum_of_ends))


_WEIGHT = 10  # of the value against a rank's end, if both are minimized


# ---- Large-neighbourhood search: CP-SAT reorders one window of the schedule at a time

_SECONDS = 0.15  # deterministic, for one window
_FIRST, _FEWEST, _MOST = 60.0, 24.0, 240.0  # ops in a window
_GIVEN_UP = 60  # windows in a row that changed nothing


def solve_windows(best: Best, share: float) -> None:
    """Improve on `best` until `share` of the budget is spent, or many windows in a row change nothing."""
    programs, reached = best.programs, best.key
    size, idle = _FIRST, 0
    while best.budget.left(share) > 0 and idle < _GIVEN_UP:
        part = _window(best.problem, programs, size, best.random)
        solved = solve(best, programs, part, "both", min(_SECONDS, best.budget.left(share) / CP_SAT_SECOND))
        # windows grow until CP-SAT cannot finish them
        size = min(_MOST, size * 1.08) if solved.proven else max(_FEWEST, size * 0.85)
        # ops that take no time may come in an order that cannot run
        new_key = checked_key(best.problem, solved.programs)
        idle = 0 if new_key < reached else idle + 1
        # another order that is as good is taken too: the next window starts from there
        if new_key <= reached:
            programs, reached = solved.programs, new_key
    best.offer(programs, "CP-SAT on windows")


def _window(problem: Problem, programs: Programs, size: float, random: Random) -> Part:
    """The ops that start within a random time; about `size` ops of neighbouring ranks are free to move."""
    ends, duration = times(problem, programs), problem.duration
    assert ends is not None, "the programs deadlock"
    ranks = problem.ranks
    wide = ranks if random.random() < 0.5 else random.randint(min(2, ranks), ranks)
    lowest = random.randint(0, ranks - wide)
    makespan = max(ends)
    length = makespan * size / problem.size * ranks / wide
    begin = random.uniform(-0.5 * length, makespan - 0.5 * length)

    def position(program: list[int], time: float) -> int:
        return bisect_left(program, time, key=lambda op: ends[op] - duration[op])

    return Part(
        [position(program, begin) for program in programs],
        [position(program, begin + length) for program in programs],
        frozenset(range(ranks)).difference(range(lowest, lowest + wide)),
    )
