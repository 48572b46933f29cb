"""The conformance suite: what every builder of schedules guarantees, also one of your own.

    from penstock.schedule.builders.conformance import check_builder

    def test_my_builder():
        check_builder(my_builder)
        check_builder(my_builder, peak_live=lambda ranks, microbatches, rank: min(ranks - rank, microbatches))

It is a plain function, so it needs no test runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from penstock.errors import InputError, ScheduleError
from penstock.schedule.builders import Builder
from penstock.schedule.ops import Op, Placement, Schedule
from penstock.schedule.verify import verify

PeakLive = Callable[[int, int, int], int]  # ranks, microbatches, rank

_SHOWN = 20


@dataclass(frozen=True)
class ConformanceFailure:
    """One rule that the builder breaks, at one size."""

    ranks: int
    microbatches: int
    rule: str

    def __str__(self) -> str:
        return f"ranks={self.ranks}, microbatches={self.microbatches}: {self.rule}"


class ConformanceError(InputError):
    """A builder that breaks rules; `failures` has every rule and size."""

    def __init__(self, name: str, failures: Iterable[ConformanceFailure]) -> None:
        self.name, self.failures = name, tuple(failures)
        shown = "".join(f"\n  {failure}" for failure in self.failures[:_SHOWN])
        more = len(self.failures) - _SHOWN
        super().__init__(
            f"builder {name}",
            f"it breaks {len(self.failures)} rule(s):{shown}" + (f"\n  and {more} more" if more > 0 else ""),
            "Begin with the smallest size listed, and draw what it builds with penstock.schedule.render",
        )

    def __reduce__(self) -> tuple[type[ConformanceError], tuple[str, tuple[ConformanceFailure, ...]]]:
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
    """Run `builder` at every pair of sizes, and raise ConformanceError with every rule that it breaks.

    builder: called as ``builder(ranks=..., microbatches=..., **options)``
    placement: the placement that it must choose for a number of ranks; None: any
    peak_live: the exact peak of live activations from ranks, microbatches and the rank; None: not checked
    """
    failures = []
    for p, m in product(ranks, microbatches):
        broken_rules = _broken(builder, p, m, options, placement, peak_live)
        failures += [ConformanceFailure(p, m, rule) for rule in broken_rules]
    if failures:
        raise ConformanceError(getattr(builder, "__name__", repr(builder)), failures)


def _broken(
    builder: Builder,
    ranks: int,
    microbatches: int,
    options: dict[str, Any],
    placement: Callable[[int], Placement] | None,
    peak_live: PeakLive | None,
) -> Iterator[str]:
    """The rules that the builder breaks at one size."""
    try:
        schedule: object = builder(ranks=ranks, microbatches=microbatches, **options)
        again: object = builder(ranks=ranks, microbatches=microbatches, **options)
    except Exception as error:  # of any type: it is one failure among others
        yield f"it raises {type(error).__name__}: {error}"
        return
    if not isinstance(schedule, Schedule):
        yield f"it returns {type(schedule).__name__}; a builder returns a penstock.schedule.Schedule"
        return
    if schedule.ranks != ranks:
        yield f"its schedule is for {schedule.ranks} ranks"
    if schedule.microbatches != microbatches:
        yield f"its schedule is for {schedule.microbatches} microbatches"
    if placement and schedule.placement != (expected := placement(ranks)):
        placed, wanted = list(schedule.placement.rank_of), list(expected.rank_of)
        yield f"its stages are placed on the ranks {placed} instead of {wanted}"
    for rank, program in enumerate(schedule.programs):
        if not program:
            yield f"rank {rank} has an empty program"
    changeable = list(_changeable(schedule, again))
    yield from changeable
    if changeable:  # verify needs a well-formed schedule
        return
    try:
        peaks = verify(schedule).peak_live
    except ScheduleError as error:
        yield from (f"verify refuses it: {violation}" for violation in error.violations)
        return
    for rank, peak in enumerate(peaks):
        if peak_live and peak != (most := peak_live(ranks, microbatches, rank)):
            yield f"rank {rank} holds {peak} live activations at its peak instead of {most}"


def _changeable(schedule: Schedule, again: object) -> Iterator[str]:
    """What keeps it from being frozen, inert data."""
    if schedule != again:
        yield "two calls with the same arguments return different schedules"
    try:
        hash(schedule)
    except TypeError as error:
        yield f"its schedule is not frozen ({error}); give placement and programs as tuples of tuples"
    for op in (op for program in schedule.programs for op in program):
        if not _reads_back(op):
            yield f"{op} is no op, or is not read back from its own text"


def _reads_back(op: object) -> bool:
    try:
        return isinstance(op, Op) and Op.parse(str(op)) == op
    except InputError:
        return False
