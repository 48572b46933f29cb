"""`search`: from costs and a memory limit to a schedule, with a bound on what is possible.

    1  the builders' schedules, each also with W placed anew
    2  with many ops: a smaller problem, for its policies and for a steady state to repeat
    3  list scheduling
    4  small problems: CP-SAT on all of it, which may prove the optimum; others: annealing
    5  CP-SAT on one window after another; once the value is optimal, to make ranks end early

Without OR-tools annealing takes the place of CP-SAT. Each step starts from the best programs so far. Its
share of the budget counts from the beginning, so that a step that ends early leaves more to the next.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, isfinite
from random import Random
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule.builders import BUILDERS
from penstock.schedule.dispatch import F, I, Programs, W
from penstock.schedule.ops import Op, Placement, Schedule, check_size, loop, not_a_count, wave
from penstock.schedule.search import exact
from penstock.schedule.search.anneal import anneal, replaced
from penstock.schedule.search.bound import lower_bound
from penstock.schedule.search.evaluate import Best, times
from penstock.schedule.search.listing import Policy, list_schedules
from penstock.schedule.search.problem import OP_TIMED, Budget, Problem, problem
from penstock.schedule.simulation.costs import Costs, Row
from penstock.schedule.simulation.simulate import simulate
from penstock.schedule.simulation.timeline import Objective, Timeline, check_objective

# ---- The builders' schedules: a search starts from them


def candidates(
    placement: Placement, microbatches: int, costs: Costs, objective: Objective = "makespan"
) -> Iterator[tuple[str, Schedule]]:
    """Name and schedule of every builder for training on this placement, for each choice of options."""
    laps = placement.stages // placement.ranks
    choices: dict[str, tuple[Any, ...]] = {
        "stages_per_rank": (laps,),
        "waves": (laps // 2,) if laps > 1 else (),
        "zero_bubble": (False, True),
        "paired": (False, True) if costs.overlaps else (False,),
        "costs": (costs,),
        "objective": (objective,),
    }
    for name, builder in BUILDERS.items():
        known = [option for option in choices if option in inspect.signature(builder).parameters]
        for values in product(*(choices[option] for option in known)):
            options = dict(zip(known, values, strict=True))
            try:
                schedule = builder(ranks=placement.ranks, microbatches=microbatches, **options)
            except ConfigError:  # it does not take this size
                continue
            if schedule.placement == placement and schedule.trains:
                yield f"{name} paired" if options.get("paired") else name, schedule


# ---- The steps of a search


# ops that CP-SAT takes at once; more with one stage per rank, where the limit is only a matter of order
_ALL_AT_ONCE, _ALL_AT_ONCE_SINGLY = 400, 700
_LARGE = 900  # from so many ops on, a smaller problem comes first
_CUTS = 60  # moments at which a steady state is looked for


def find(problem: Problem, seeds: Sequence[tuple[str, Programs]], random: Random, budget: Budget) -> Best:
    """The best programs found. seeds: names and programs to start from; at least one must fit."""
    best = Best(problem, random, budget, lower_bound(problem))
    for name, programs in seeds:
        budget.spend(4 * OP_TIMED * problem.size)
        best.offer(programs, name)
        best.offer(replaced(problem, programs), f"{name} with W placed anew")
    assert best.programs, "no seed fits"
    policies: list[Policy] = []
    if problem.size > _LARGE and problem.alike and problem.placement.replicas == 1:
        for microbatches, share in ((problem.ranks + 3, 0.1), (2 * problem.ranks, 0.2)):
            if microbatches < problem.microbatches:
                policies += _from_fewer(best, microbatches, share, policies)
    _improve(best, policies)
    return best


def _from_fewer(best: Best, microbatches: int, share: float, policies: list[Policy]) -> list[Policy]:
    """Search with fewer microbatches and repeat the steady state of the result. Returns the best policies."""
    few = best.problem.first(microbatches)
    small = Best(few, best.random, best.budget, lower_bound(few))
    begun = best.budget.spent / best.budget.total
    policies = list_schedules(small, begun + 0.5 * (share - begun), policies)
    if small.programs:
        extend(best, small)
        improve = exact.solve_windows if exact.available() else anneal
        improve(small, share)
        extend(best, small)
    return policies


def extend(best: Best, small: Best) -> None:
    """Offer the programs of `small`, which has fewer microbatches, with a stretch of them repeated.

    Each rank repeats a stretch of its program that has every line once. It holds the same before and after
    the stretch, so the limit is kept.
    """
    few, ends = small.problem, times(small.problem, small.programs)
    assert ends is not None
    starts = [[ends[n] - few.duration[n] for n in program] for program in small.programs]
    lines = [[few.line_of[n] for n in program] for program in small.programs]
    makespan, more = max(ends), best.problem.microbatches - few.microbatches
    for cut in range(_CUTS):
        extended: Programs = []
        for rank, program in enumerate(lines):
            near, length = bisect_left(starts[rank], makespan * (cut + 0.5) / _CUTS), len(few.lines_of[rank])
            at = _once(program, near, length)
            if at is None:
                break
            stretch = program[at : at + length]
            extended.append(best.problem.in_order(program[:at] + stretch * more + program[at:]))
        if len(extended) == few.ranks:
            best.budget.spend(2 * OP_TIMED * best.problem.size)
            best.offer(extended, f"{small.method}, its steady state repeated")


def _once(program: list[int], near: int, count: int) -> int | None:
    """The position closest to `near` from which the next `count` ops are of different lines."""
    for at in sorted(range(max(0, near - count), min(len(program) - count, near + count) + 1),
                     key=lambda at: abs(at - near)):  # fmt: skip
        if len(set(program[at : at + count])) == count:
            return at
    return None


def _improve(best: Best, policies: list[Policy]) -> None:
    begun = best.budget.spent / best.budget.total
    singly = best.problem.placement.stages == best.problem.ranks
    whole = best.problem.size <= (_ALL_AT_ONCE_SINGLY if singly else _ALL_AT_ONCE)

    def until(share: float) -> float:
        return begun + share * (1.0 - begun)

    list_schedules(best, until(0.2 if whole else 0.35), policies)
    if not exact.available():
        anneal(best, 1.0)
        return
    if whole and not best.is_least:
        exact.solve_whole(best, "value", until(0.7))
    if not best.is_least and best.problem.size <= _LARGE:  # with more ops, too few of them would move
        anneal(best, until(0.8 if whole else 0.55))
    if whole and best.is_least:
        exact.solve_whole(best, "ends", 1.0)
    else:
        exact.solve_windows(best, 1.0)


_DIGITS = 1e-9  # relative: what sums of floats may differ by


@dataclass(frozen=True)
class Found:
    """The best schedule found, and a bound on what is possible. Times are in the unit of the costs.

    timeline: `schedule` simulated with the costs
    value: what was minimized, see `search`
    lower_bound: no schedule within the limit has a smaller value
    optimal: whether `value` is proven to be the least
    method: the step that found it
    best_builder, builder_value: the best builder on this placement within the limit; None if there is none
    cut_short: the search was stopped after four times its seconds; another run may find another schedule
    """

    schedule: Schedule
    timeline: Timeline
    value: float
    lower_bound: float
    optimal: bool
    method: str
    best_builder: str | None
    builder_value: float | None
    cut_short: bool

    @property
    def makespan(self) -> float:
        return self.timeline.makespan


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Placement = "loop",
    stages_per_rank: int | None = None,
    objective: Objective = "makespan",
    seconds: float = 30.0,
    seed: int = 0,
) -> Found:
    """Search for the fastest schedule within a memory limit; never worse than the best builder that fits.

    costs: of each op; None: unit times
    memory_limit: the most that a rank may hold, in the unit of ``costs.activation``; one, or one per rank.
        Only `activation` and `held_for_weight` count: leave room for buffers
    placement: "loop", "v", or a Placement; stages_per_rank: None means 1 for a loop and 2 for a V
    objective: "makespan": the end of the last rank, and among equals early ends of all ranks.
        "extent": `Timeline.extent`, the longest time from a rank's first op to its last, which is what a
        step takes if no rank waits for all others between steps. A rank counts from when its first op can
        start at best
    seconds: approximate length, counted as work, so that the same call gives the same schedule. The search
        ends early once its result is proven optimal

    What a stage does once a step, `gather` and `reduction` of the costs, is left out of all times.

    The search itself runs one op at a time. Pairs that run side by side, which `costs.exchange` makes faster,
    come only from builders; the best builder is returned if nothing found beats it.

    With OR-tools (``penstock[search]``) problems of up to about 200 ops are usually proven optimal. Raises
    ConfigError for a limit that no schedule can keep.
    """
    check_size(ranks, microbatches, stages_per_rank if type(stages_per_rank) is int else 1)
    where = _placement(placement, ranks, stages_per_rank)
    _check(seconds, objective)
    ignored: dict[str, Any] = {"buffer": 0.0, "sent": None, "held_in_forward": None, "held_in_backward": None}
    costs = replace(costs or Costs(), **ignored, offloaded=0.0, gather=0.0, reduction=0.0)
    limits = _limits(memory_limit, where.ranks)
    task = problem(where, microbatches, costs, limits, from_first_op=objective == "extent")
    _check_limits(task, memory_limit, costs, limits)
    builders = _fitting(task, costs, limits, objective)
    if where.replicas > 1 and builders:  # distribute microbatches as the best builder does
        copies = _copies(builders[0][1])
        task = problem(where, microbatches, costs, limits, copies, objective == "extent")
    best = find(task, _seeds(task, builders), Random(seed), Budget(seconds))
    least = best.least * task.quantum
    if costs.overlaps:
        least = min(least, _least_of_pairs(task, costs, limits))
    return _found(best, least, costs, builders)


def _seeds(task: Problem, builders: list[tuple[str, Schedule, float]]) -> list[tuple[str, Programs]]:
    """Names and programs to start from."""
    fitting = [(name, schedule) for name, schedule, _ in builders if _copies(schedule) == task.copies]
    seeds = [(name, task.programs(schedule)) for name, schedule in fitting]
    return [*seeds, ("one microbatch after the other", _serial(task))]


def _placement(choice: str | Placement, ranks: int, stages_per_rank: int | None) -> Placement:
    if isinstance(choice, Placement):
        if choice.ranks != ranks or stages_per_rank not in (None, choice.stages // choice.ranks):
            raise ConfigError(
                f"ranks={ranks}, stages_per_rank={stages_per_rank}",
                f"the placement given has {choice.stages} stages on {choice.ranks} ranks",
                f"Give ranks={choice.ranks}, and leave stages_per_rank out",
            )
        return choice
    if stages_per_rank is not None and (type(stages_per_rank) is not int or stages_per_rank < 1):
        raise not_a_count("stages_per_rank", stages_per_rank)
    if choice == "loop":
        return loop(ranks, stages_per_rank or 1)
    if choice == "v":
        return wave(ranks, stages_per_rank or 2)
    rule = "a search knows 'loop' and 'v' by name"
    raise ConfigError(f"placement={choice!r}", rule, "Give one of them or a Placement")


def _check(seconds: float, objective: str) -> None:
    if not (isinstance(seconds, int | float) and isfinite(seconds) and seconds > 0):
        rule = "it is a finite number above 0"
        raise ConfigError(f"seconds={seconds!r}", rule, "Give more than 0, say 30")
    check_objective(objective)


def _limits(memory_limit: float | Sequence[float] | None, ranks: int) -> list[float | None]:
    """By rank; None for no limit."""
    if memory_limit is None or isinstance(memory_limit, int | float):
        limits: list[float | None] = [memory_limit] * ranks
    else:
        limits = list(memory_limit)
    if len(limits) != ranks:
        rule = f"there are {ranks} ranks, and each takes one"
        raise ConfigError(f"memory_limit with {len(limits)} numbers", rule, f"Give one number, or {ranks}")
    for limit in limits:
        if limit is not None and not limit >= 0:
            rule = "a limit is 0 or more"
            raise ConfigError(f"memory_limit={memory_limit!r}", rule, "Leave it out for no limit")
    return [None if limit is None or not isfinite(limit) else limit for limit in limits]


def _check_limits(task: Problem, memory_limit: object, costs: Costs, limits: Sequence[float | None]) -> None:
    """Raise ConfigError for limits below what one microbatch at a time holds: every schedule needs that."""
    timeline = simulate(task.schedule("searched", _serial(task)), costs)
    alone, short = timeline.peak_memory, _beyond(limits, timeline)
    if short:
        by_rank = ", ".join(f"{alone[rank]:g} on rank {rank}" for rank in short)
        one_for_all = isinstance(memory_limit, int | float)
        least = f"{max(alone[rank] for rank in short):g}" if one_for_all else by_rank
        raise ConfigError(
            f"memory_limit={memory_limit!r}",
            "in any order a rank holds one microbatch's activations of all its stages at once",
            f"Give {least} or more",
        )


def _serial(task: Problem) -> Programs:
    """One microbatch at a time: on each rank its forwards, then I and W, the last stage first."""
    programs: Programs = []
    for rank in range(task.ranks):
        program: list[int] = []
        for i, copy in enumerate(task.copies):
            depth = task.placement.depth
            own = [s * task.row + 3 * i for s in task.placement.stages_of(rank) if s // depth == copy]
            program += [first + F for first in own]
            program += [first + kind for first in reversed(own) for kind in (I, W)]
        programs.append(program)
    return programs


def _copies(schedule: Schedule) -> tuple[int, ...]:
    """By microbatch, the copy of the model that it goes through."""
    copies = {
        op.microbatch: op.stage // schedule.placement.depth for program in schedule.programs for op in program
    }
    return tuple(copies[i] for i in range(schedule.microbatches))


def _fitting(
    task: Problem, costs: Costs, limits: Sequence[float | None], objective: Objective
) -> list[tuple[str, Schedule, float]]:
    """The builders' names, schedules and values within the limits, best first."""
    fitting = []
    for name, schedule in candidates(task.placement, task.microbatches, costs, objective):
        timeline = simulate(schedule, costs)
        if not _beyond(limits, timeline):
            fitting.append((name, schedule, _value(task, timeline)))
    return sorted(fitting, key=lambda builder: builder[2])


def _beyond(limits: Sequence[float | None], timeline: Timeline) -> list[int]:
    """The ranks that hold more than their limit."""
    pairs = enumerate(zip(timeline.peak_memory, limits, strict=True))
    return [rank for rank, (peak, limit) in pairs if limit is not None and peak > limit * (1 + _DIGITS)]


def _value(task: Problem, timeline: Timeline) -> float:
    """The value of `evaluate.key`, at the exact costs."""
    ends = [max((span.end for span in timeline.of_rank(rank)), default=0.0) for rank in range(task.ranks)]
    return max(end - offset * task.quantum for end, offset in zip(ends, task.offset, strict=True))


def _least_of_pairs(task: Problem, costs: Costs, limits: Sequence[float | None]) -> float:
    """A lower bound for schedules with pairs side by side: as if no op exchanged anything.

    A pair takes at least as long as its ops compute one after the other.
    """
    where, count = task.placement, task.microbatches
    names = ("forward", "input_grad", "weight_grad", "exchange", "exchange_in_backward")
    rows = {name: costs.rows(name, where, count) for name in names}

    def less(whole: list[Row], hidden: list[Row]) -> list[Row]:
        return [[max(0.0, a - b) for a, b in zip(*pair, strict=True)]
                for pair in zip(whole, hidden, strict=True)]  # fmt: skip

    beyond = less(rows["exchange_in_backward"], rows["input_grad"])  # a whole backward may wait during its W
    computed = replace(
        costs,
        forward=less(rows["forward"], rows["exchange"]),
        input_grad=less(rows["input_grad"], rows["exchange_in_backward"]),
        weight_grad=less(rows["weight_grad"], beyond),
    )
    bare = problem(where, count, computed, limits, task.copies)
    bare.offset[:] = [ceil(offset * task.quantum / bare.quantum) for offset in task.offset]
    return lower_bound(bare) * bare.quantum


def _found(best: Best, least: float, costs: Costs, builders: list[tuple[str, Schedule, float]]) -> Found:
    """The result. least: a lower bound on the value."""
    schedule, method = _merged(best.problem.schedule("searched", best.programs), costs), best.method
    timeline = simulate(schedule, costs)
    value = _value(best.problem, timeline)
    first = builders[0] if builders else None
    if first and first[2] < value:  # it has pairs, or rounding misled the search
        method, built, value = first
        schedule = replace(built, name="searched")
        timeline = simulate(schedule, costs)
    slack = _DIGITS * max(1.0, value)
    return Found(
        schedule=schedule,
        timeline=timeline,
        value=value,
        lower_bound=min(least, value),
        optimal=value <= least + slack,
        method=method,
        best_builder=first[0] if first else None,
        builder_value=first[2] if first else None,
        cut_short=best.budget.cut_short,
    )


def _merged(schedule: Schedule, costs: Costs) -> Schedule:
    """Merge an I and the W behind it into one B if no op waits for the gradient before W is done.

    A whole backward costs the runtime less than two halves, and no op moves.
    """
    timeline = simulate(schedule, costs)
    start = {span.op: span.start for span in timeline.spans}
    end = {span.op: span.end for span in timeline.spans}
    hosts, delays = schedule.placement.rank_of, costs.delays(schedule.placement, schedule.microbatches)

    def whole(one: Op, other: Op) -> bool:
        if one.kind != "I" or other != Op(one.stage, "W", one.microbatch):
            return False
        if schedule.placement.is_first(one.stage):
            return True
        before = one.stage - 1
        way = delays[before][one.microbatch] if hosts[before] != hosts[one.stage] else 0.0
        return end[other] + way <= start[Op(before, "I", one.microbatch)]

    programs = []
    for program in schedule.programs:
        merged: list[Op] = []
        for op in program:
            if merged and whole(merged[-1], op):
                merged[-1] = Op(op.stage, "B", op.microbatch)
            else:
                merged.append(op)
        programs.append(tuple(merged))
    return replace(schedule, programs=tuple(programs))
