import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.schedule import Op, Placement, Schedule, loop
from penstock.schedule.builders.conformance import ConformanceError, check_builder
from penstock.schedule.builders.gpipe import gpipe
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from support.refusals import refuses


def crossed(built: Schedule) -> Schedule:
    """Every second rank takes each backward at once, which hangs where the next one does not."""
    programs = [
        tuple(sorted(program, key=lambda op: op.microbatch)) if rank % 2 == 0 else program
        for rank, program in enumerate(built.programs)
    ]
    return replace(built, programs=tuple(programs))


def with_first(change: Callable[[tuple[Op, ...]], Any]) -> Callable[[Schedule], Schedule]:
    """Change the program of rank 0."""
    return lambda built: replace(built, programs=(change(built.programs[0]), *built.programs[1:]))


def reversed_placement(built: Schedule) -> Schedule:
    placement = Placement(tuple(reversed(range(built.ranks))))
    return replace(built, placement=placement, programs=built.programs[::-1])


STRAY = Op(0, "Z", 0)  # type: ignore[arg-type]


def too_many_microbatches(ranks: int, microbatches: int) -> Schedule:
    return gpipe(ranks, microbatches + 1)


def not_a_schedule(ranks: int, microbatches: int) -> Any:
    return "F0 B0"


def unlucky(ranks: int, microbatches: int) -> Schedule:
    if microbatches < ranks:
        raise ValueError(f"{microbatches} < {ranks}")
    return gpipe(ranks, microbatches)


def peak_of_1f1b(ranks: int, microbatches: int, rank: int) -> int:
    return min(ranks - rank, microbatches)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (crossed, "0B0: deadlock: rank 0 is at 0B0, which waits for 1B0"),
        (with_first(lambda program: program[:-1]), "verify refuses it: rank 0: 0B2"),
        (with_first(lambda program: ()), "rank 0 has an empty program"),
        (lambda built: gpipe(1, 3), "is for 1 ranks"),
        (lambda built: gpipe(2, 4), "is for 4 microbatches"),
        (reversed_placement, "on the ranks [1, 0] instead of [0, 1]"),
        (with_first(list), "is not frozen"),
        (with_first(lambda program: tuple(map(tuple, program))), "(0, 'F', 0) is no op"),
        (with_first(lambda program: (*program, STRAY)), "0Z0 is no op"),
        (lambda built: built, "3 live activations at its peak instead of 2"),
        (str, "it returns str"),
    ],
)
def test_the_error_says_why_a_builder_does_not_conform(change: Callable[[Schedule], Any], rule: str) -> None:
    def mine(ranks: int, microbatches: int) -> Any:
        return change(gpipe(ranks, microbatches))

    with refuses(ConformanceError, "builder mine", rule) as caught:
        check_builder(mine, ranks=[2], microbatches=[3], placement=loop, peak_live=peak_of_1f1b)
    assert caught.value.exit_code == 2


def test_a_builder_that_depends_on_the_call_is_caught() -> None:
    calls = itertools.count()

    def moody(ranks: int, microbatches: int) -> Schedule:
        return (gpipe if next(calls) % 2 else one_f_one_b)(ranks, microbatches)

    with refuses(ConformanceError, "builder moody", "arguments return different"):
        check_builder(moody)


def test_every_size_that_fails_is_listed() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_builder(unlucky, ranks=[1, 2, 3], microbatches=[1, 2, 3])
    sizes = [(failure.ranks, failure.microbatches) for failure in caught.value.failures]
    assert sizes == [(2, 1), (3, 1), (3, 2)]
    assert "ranks=3, microbatches=2: it raises ValueError: 2 < 3" in str(caught.value)
    copy = pickle.loads(pickle.dumps(caught.value))  # it can be sent to another process
    assert (str(copy), copy.failures) == (str(caught.value), caught.value.failures)


def test_a_long_list_is_cut_in_the_message_only() -> None:
    with refuses(ConformanceError, rule="and 25 more") as caught:
        check_builder(not_a_schedule)
    assert len(caught.value.failures) == 45


def test_sizes_may_be_given_by_iterators() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_builder(too_many_microbatches, ranks=iter([1, 2]), microbatches=iter([1, 2]))
    assert {(failure.ranks, failure.microbatches) for failure in caught.value.failures} == {
        (1, 1), (1, 2), (2, 1), (2, 2),
    }  # fmt: skip
