"""The conformance suite: what every builder of schedules keeps, a user's own too.

    from penstock.schedule.builders.conformance import check_builder

    def test_my_builder():
        check_builder(my_builder)
        check_builder(my_builder, peak_live=lambda ranks, microbatches, rank: min(ranks - rank, microbatches))

A plain function, so that any test runner can call it, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from penstock.errors import InputError, ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.ops import Kind, Op, Placement, Schedule
from penstock.schedule.simulate import simulate
from penstock.schedule.timeline import Timeline
from penstock.schedule.verify import verify

Builder = Callable[..., Schedule]
PeakLive = Callable[[int, int, int], int]  # ranks, microbatches, rank

_SHOWN = 20
_ROUNDING = 1e-9  # sums of durations in another order differ by less than this share


@dataclass(frozen=True)
class Failure:
    """One rule that the builder breaks, at one size."""

    ranks: int
    microbatches: int
    rule: str

    def __str__(self) -> str:
        return f"ranks={self.ranks}, microbatches={self.microbatches}: {self.rule}"


class ConformanceError(InputError):
    """A builder that does not conform; `failures` lists every rule it breaks, at every size tried."""

    def __init__(self, name: str, failures: Iterable[Failure]) -> None:
        self.name, self.failures = name, tuple(failures)
        shown = "".join(f"\n  {failure}" for failure in self.failures[:_SHOWN])
        more = len(self.failures) - _SHOWN
        super().__init__(
            f"builder {name}",
            f"it breaks {len(self.failures)} rule(s):{shown}" + (f"\n  and {more} more" if more > 0 else ""),
            "Begin with the smallest size listed, and draw what it builds with penstock.schedule.render",
        )

    def __reduce__(self) -> tuple[type[ConformanceError], tuple[str, tuple[Failure, ...]]]:
        return type(self), (self.name, self.failures)


def check_builder(
    builder: Builder,
    *,
    ranks: Iterable[int] = range(1, 6),
    microbatches: Iterable[int] = range(1, 10),
    placement: Callable[[int], Placement] | None = None,
    peak_live: PeakLive | None = None,
    **options: Any,
) -> None:
    """Run `builder` at every pair of sizes, and raise ConformanceError with all that it breaks.

    builder: called as ``builder(ranks=..., microbatches=..., **options)``
    placement: the placement that it must choose for a number of ranks; any, where not given
    peak_live: the live activations that it must reach on each rank exactly, from the numbers of ranks and
        microbatches and the rank; not checked where not given
    """
    failures = []
    columns = tuple(microbatches)
    for rank_count in ranks:
        for microbatch_count in columns:
            case = _Case(builder, rank_count, microbatch_count, options)
            failures += [
                Failure(rank_count, microbatch_count, rule) for rule in case.broken(placement, peak_live)
            ]
    if failures:
        raise ConformanceError(getattr(builder, "__name__", repr(builder)), failures)


@dataclass(frozen=True)
class _Case:
    """The builder at one size."""

    builder: Builder
    ranks: int
    microbatches: int
    options: dict[str, Any]

    def broken(
        self, placement: Callable[[int], Placement] | None, peak_live: PeakLive | None
    ) -> Iterator[str]:
        try:
            schedule: object = self._build()
            again: object = self._build()
        except Exception as error:  # whatever it is, it belongs in the list beside the other sizes' failures
            yield f"it raises {type(error).__name__}: {error}"
            return
        if not isinstance(schedule, Schedule):
            yield f"it returns {type(schedule).__name__}; a builder returns a penstock.schedule.Schedule"
            return
        yield from self._as_asked(schedule, placement)
        inert = list(self._inert(schedule, again))
        yield from inert
        if inert:  # verify and simulate read only what is well formed
            return
        try:
            peaks = verify(schedule).peak_live
        except ScheduleError as error:
            yield from (f"verify refuses it: {violation}" for violation in error.violations)
            return
        for rank, peak in enumerate(peaks):
            if peak_live and peak != (expected := peak_live(self.ranks, self.microbatches, rank)):
                yield f"rank {rank} holds {peak} live activations at its peak instead of {expected}"
        yield from _runs(schedule, Costs())
        stages = range(1, schedule.stages + 1)
        yield from _runs(schedule, Costs([1 / s for s in stages], [s + 0.5 for s in stages], 0.25, 0.125))

    def _build(self) -> Schedule:
        return self.builder(ranks=self.ranks, microbatches=self.microbatches, **self.options)

    def _inert(self, schedule: Schedule, again: object) -> Iterator[str]:
        if schedule != again:
            yield "two calls with the same arguments return different schedules"
        try:
            hash(schedule)
        except TypeError as error:
            yield f"its schedule is not frozen ({error}); give placement and programs as tuples of tuples"
        for op in (op for program in schedule.programs for op in program):
            if not _reads_back(op):
                yield f"{op} is no op, or is not read back from its own text"

    def _as_asked(self, schedule: Schedule, placement: Callable[[int], Placement] | None) -> Iterator[str]:
        if schedule.ranks != self.ranks:
            yield f"its schedule is for {schedule.ranks} ranks"
        if schedule.microbatches != self.microbatches:
            yield f"its schedule is for {schedule.microbatches} microbatches"
        if placement and schedule.placement != (expected := placement(self.ranks)):
            placed, wanted = list(schedule.placement.rank_of), list(expected.rank_of)
            yield f"its stages are placed on the ranks {placed} instead of {wanted}"
        for rank, program in enumerate(schedule.programs):
            if not program:
                yield f"rank {rank} has an empty program"


def _reads_back(op: object) -> bool:
    try:
        return isinstance(op, Op) and Op.parse(str(op)) == op
    except InputError:
        return False


def _runs(schedule: Schedule, costs: Costs) -> Iterator[str]:
    """What holds for any run of a schedule, whatever the costs."""
    timeline = simulate(schedule, costs)
    for rank, program in enumerate(schedule.programs):
        spans = timeline.of_rank(rank)
        if tuple(span.op for span in spans) != tuple(program):
            yield f"rank {rank} does not run its ops in the order of its program"
        for before, after in pairwise(spans):
            if after.start < before.end:
                yield f"on rank {rank}, {after.op} starts before {before.op} has ended"
    yield from _waits(schedule, costs, timeline)
    least = max(_most_work(schedule, costs), _chain(schedule, costs))
    if timeline.makespan < least * (1 - _ROUNDING):
        yield f"its makespan {timeline.makespan} is below the least possible, {least}"


def _waits(schedule: Schedule, costs: Costs, timeline: Timeline) -> Iterator[str]:
    """No op starts before what it needs has ended and come over."""
    hosts = schedule.placement.rank_of
    ends = {span.op: span.end for span in timeline.spans}
    for span in timeline.spans:
        for needed in schedule.predecessors(span.op):
            latency = 0.0 if hosts[needed.stage] == span.rank else costs.communication
            if span.start < ends[needed] + latency:
                yield f"{span.op} starts before the result of {needed} can be there"


def _most_work(schedule: Schedule, costs: Costs) -> float:
    """What the busiest rank computes."""
    durations = {k: costs.durations(k, schedule.placement, schedule.microbatches) for k in get_args(Kind)}
    return max(
        sum(durations[kind][stage][microbatch] for stage, kind, microbatch in program)
        for program in schedule.programs
    )


def _chain(schedule: Schedule, costs: Costs) -> float:
    """The time that microbatch 0 takes alone, through all stages and back."""
    placement = schedule.placement
    ops = [op for program in schedule.programs for op in program if op.microbatch == 0 and op.kind != "W"]
    stages = {op.stage for op in ops}
    hosts = [placement.rank_of[stage] for stage in sorted(stages)]
    hops = sum(here != there for here, there in pairwise(hosts)) * (2 if schedule.trains else 1)
    durations = {k: costs.durations(k, placement, schedule.microbatches) for k in get_args(Kind)}
    return sum(durations[op.kind][op.stage][0] for op in ops) + hops * costs.communication
