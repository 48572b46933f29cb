from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Op, Pair, Placement, Schedule, Violation, build, loop, verify
from support.programs import written

op = Op.parse


def schedule(microbatches: int, *programs: str, rank_of: tuple[int, ...] = ()) -> Schedule:
    """One program per rank, written as text."""
    return written(Placement(rank_of) if rank_of else loop(len(programs)), microbatches, *programs)


def overlapping(pair: Any) -> Schedule:
    return replace(schedule(2, "0F0 0F1 0B0 0B1"), overlaps=frozenset({pair}))


def violations(wrong: Schedule, memory_limit: int | None = None) -> tuple[Violation, ...]:
    with pytest.raises(ScheduleError) as caught:
        verify(wrong, memory_limit)
    return caught.value.violations


def is_refused(edited: Schedule) -> bool:
    try:
        verify(edited)
    except ScheduleError:
        return True
    return False


def test_a_valid_schedule_is_proven_with_its_peak() -> None:
    valid = schedule(2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    proof = verify(valid, memory_limit=2)
    assert proof.schedule is valid
    assert proof.peak_live == (2, 1)


def test_backwards_and_stages_may_come_in_any_order() -> None:
    verify(schedule(2, "0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"))
    verify(schedule(1, "1F0 1B0", "0F0 0B0", rank_of=(1, 0)))


STRAY = Op(0, "X", 0)  # type: ignore[arg-type]
BARE = (op("0F1"), op("0B0"))
FORWARDS = Pair(op("0F0"), op("0F1"))
ABSENT = "it is in no program"

BROKEN: dict[str, tuple[Schedule, list[Violation]]] = {
    "no microbatch": (schedule(0, ""), [Violation("0 microbatches; a step has at least one")]),
    "a program too few": (
        schedule(1, "0F0", rank_of=(0, 1)), [Violation("1 programs for 2 ranks; each rank has one")]),
    "a stage that does not exist": (
        schedule(1, "0F0", "1F0 2F0"), [Violation("there are only stages 0 to 1", 1, 1, op("2F0"))]),
    "a microbatch that does not exist": (
        schedule(1, "0F0 0F1", "1F0"), [Violation("there are only microbatches 0 to 0", 0, 1, op("0F1"))]),
    "a kind that does not exist": (
        Schedule("mine", loop(1), 1, ((op("0F0"), STRAY),)),
        [Violation("there are only the kinds F, B, I and W", 0, 1, STRAY)]),
    # version 0.2.0 ended with an AttributeError
    "an overlap that is no pair": (overlapping(BARE), [Violation(f"{BARE!r} in overlaps is no Pair")]),
    "an overlap of two forwards": (
        overlapping(FORWARDS),
        [Violation(f"{FORWARDS} overlaps other kinds than a forward and then a backward")]),
    "an op on another rank than its stage": (
        schedule(1, "0F0 1F0", "1F0 0F0"),
        [Violation("stage 1 is placed on rank 1", 0, 1, op("1F0")),
         Violation("stage 0 is placed on rank 0", 1, 1, op("0F0"))]),
    "an op that is on another rank alone": (
        schedule(1, "0F0 1F0", ""), [Violation("stage 1 is placed on rank 1", 0, 1, op("1F0"))]),
    "an op that comes twice": (
        schedule(1, "0F0 0B0 0F0", "1F0 1B0"), [Violation("it is already at position 0", 0, 2, op("0F0"))]),
    "a forward that is missing": (
        schedule(2, "0F0 0F1", "1F1"), [Violation(ABSENT, 1, None, op("1F0"), op("1F0"))]),
    "a backward that is missing": (
        schedule(1, "0F0 0B0", "1F0"), [Violation(ABSENT, 1, None, op("1B0"), op("1B0"))]),
    # version 0.2.0 asked for 0B0, and where that was put in, refused the W next to it
    "an input gradient that is missing": (
        schedule(1, "0F0 0W0"), [Violation(ABSENT, 0, None, op("0I0"), op("0I0"))]),
    "a weight gradient that is missing": (
        schedule(1, "0F0 0I0"), [Violation(ABSENT, 0, None, op("0W0"), op("0W0"))]),
    "a microbatch on both copies of the model": (
        written(Placement((0, 1), replicas=2), 1, "0F0 0B0", "1F0 1B0"),
        [Violation("microbatch 0 runs on 2 copies of the model; it takes one")]),
    "a backward before its forward": (
        schedule(1, "0F0 0B0", "1B0 1F0"),
        [Violation("it needs 1F0, which comes later, at position 1", 1, 0, op("1B0"), op("1F0"))]),
    "a stage before the one that feeds it on the same rank": (
        schedule(1, "1F0 0F0", rank_of=(0, 0)),
        [Violation("it needs 0F0, which comes later, at position 1", 0, 0, op("1F0"), op("0F0"))]),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_reported(name: str) -> None:
    wrong, found = BROKEN[name]
    assert violations(wrong) == tuple(found)


def test_more_live_activations_than_allowed() -> None:
    gpipe = build("gpipe", ranks=2, microbatches=3)
    assert violations(gpipe, memory_limit=2) == tuple(
        Violation("it holds 3 live activations at its peak, and 2 are allowed", rank) for rank in (0, 1)
    )


def test_all_violations_come_at_once() -> None:
    wrong = schedule(2, "0B0 0F0 0F1 0F1", "1F0 1B0 1F7 2F0")
    assert violations(wrong, memory_limit=1) == (
        Violation("it is already at position 2", 0, 3, op("0F1")),
        Violation("there are only microbatches 0 to 1", 1, 2, op("1F7")),
        Violation("there are only stages 0 to 1", 1, 3, op("2F0")),
        Violation("it is in no program", 0, None, op("0B1"), op("0B1")),
        Violation("it is in no program", 1, None, op("1F1"), op("1F1")),
        Violation("it is in no program", 1, None, op("1B1"), op("1B1")),
        Violation("it needs 0F0, which comes later, at position 1", 0, 0, op("0B0"), op("0F0")),
        Violation("it holds 2 live activations at its peak, and 1 are allowed", 0),
        Violation("it holds 2 live activations at its peak, and 1 are allowed", 1),
    )


def test_a_deadlock_of_two_ranks() -> None:
    """Rank 0 wants a gradient before it sends the microbatch that rank 1 wants before that gradient."""
    (found,) = violations(schedule(2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert (found.rank, found.position, found.op, found.missing) == (0, 1, op("0B0"), op("1B0"))
    assert found.cycle == (op("0B0"), op("1B0"), op("1F1"), op("0F1"))
    assert str(found) == (
        "rank 0, position 1: 0B0: deadlock: rank 0 is at 0B0, which waits for 1B0; "
        "rank 1 is at 1F1, which waits for 0F1; and 1B0 comes only later on its rank"
    )


def test_a_deadlock_of_three_ranks() -> None:
    """Rank 0 hosts the first and the last stage, and wants to run the last one first."""
    (found,) = violations(schedule(1, "3F0 0F0", "1F0", "2F0", rank_of=(0, 1, 2, 0)))
    assert (found.rank, found.position, found.op, found.missing) == (0, 0, op("3F0"), op("2F0"))
    assert found.cycle == (op("3F0"), op("2F0"), op("1F0"), op("0F0"))


def test_who_waits_for_a_deadlock_is_no_part_of_it() -> None:
    (found,) = violations(schedule(2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B1 2B0"))
    assert {o.stage for o in found.cycle} == {0, 1}


def test_two_deadlocks_are_two_violations() -> None:
    """Stages 1 and 2 wait for each other, and so do 4 and 5; nothing else is wrong."""
    found = violations(
        schedule(2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1", "3F0 3F1 3B0 3B1")
    )
    assert [set(map(str, each.cycle)) for each in found] == [{"1B0", "2B0", "2F1", "1F1"}]
    pairs = schedule(1, "1F0 2F0 0F0", "3F0", "5F0 4F0", rank_of=(0, 0, 0, 1, 2, 2))
    assert [str(each.op) for each in violations(pairs)] == ["1F0", "5F0"]


def test_a_deadlock_next_to_another_violation_is_still_found() -> None:
    found = violations(schedule(2, "0F0 0B0 0F1 0B1 0F0", "1F0 1F1 1B0 1B1"))
    assert [each.rule.split(":")[0] for each in found] == ["it is already at position 0", "deadlock"]


def test_the_error_lists_the_first_twenty() -> None:
    empty = schedule(30, "")
    with pytest.raises(ScheduleError) as caught:
        verify(empty)
    assert len(caught.value.violations) == 30
    assert "rank 0: 0F19: it is in no program" in str(caught.value)
    assert "0F20" not in str(caught.value)
    assert "and 10 more" in str(caught.value)


PAIRED = schedule(3, "0F0 0B0 0F1 0F2 0B1 0B2")
PAIRS = [
    *(Pair(op(one), op(other)) for one, other in (
        ("0F2", "0B1"),  # the only one that may overlap
        ("0F0", "0B0"), ("0F1", "0F2"), ("0B0", "0F1"), ("0B1", "0B2"), ("0F1", "0B1"), ("0F9", "0B1"),
    )),
    Pair(op("0F2"), op("0B1")),
]  # fmt: skip


NOT_NEXT = "overlaps two ops that do not follow each other"
OTHER_KINDS = "overlaps other kinds than a forward and then a backward"
WRONG = dict(zip(PAIRS[1:], [
    "overlaps a backward with the forward that it needs",
    OTHER_KINDS, OTHER_KINDS, OTHER_KINDS, NOT_NEXT, NOT_NEXT,
], strict=False))  # fmt: skip


@pytest.mark.parametrize("pairs", [*combinations(PAIRS[:-1], 1), *combinations(PAIRS, 2)], ids=str)
def test_pairs_that_cannot_overlap(pairs: tuple[Pair, ...]) -> None:
    edited = replace(PAIRED, overlaps=frozenset(pairs))
    wrong = [f"{pair} {WRONG[pair]}" for pair in sorted({*pairs}) if pair in WRONG]
    if wrong:
        assert [violation.rule for violation in violations(edited)] == wrong
    else:
        verify(edited)


def test_pairs_of_numbers_and_of_text_are_told_in_one_order() -> None:
    """Unreleased: a TypeError: the violations were sorted, and Python compares no 0 with "0"."""
    pairs = [Pair(Op(stage, "F", 9), op("0B1")) for stage in (7, 10, None, "0")]  # type: ignore[arg-type]
    wrong = [violation.rule for violation in violations(replace(PAIRED, overlaps=frozenset(pairs)))]
    assert [rule for rule in wrong if rule.endswith(NOT_NEXT)] == [
        f"{pair} {NOT_NEXT}" for pair in (pairs[0], pairs[1], pairs[3], pairs[2])
    ]


@pytest.mark.parametrize(
    ("program", "pairs", "valid"),
    [
        ("0F0 0F1 0B0 0F2 0B1 0B2", "0F1 0B0 0F2 0B1", True),
        ("0F0 0F1 0B0 0F1 0B1 0F2 0B2", "0F1 0B0 0F1 0B1", False),
        ("0F0 0F1 0B0 0F2 0B1 0B2", "0B0 0F2 0F2 0B1", False),
    ],
)
def test_an_op_is_in_one_pair(program: str, pairs: str, valid: bool) -> None:
    """It has a neighbour of the other kind on each side only where it is in the program twice."""
    ops = [op(text) for text in pairs.split()]
    edited = replace(schedule(3, program), overlaps=frozenset({Pair(*ops[:2]), Pair(*ops[2:])}))
    assert is_refused(edited) != valid


class Longer(NamedTuple):
    forward: Op
    backward: Op
    more: int = 0


class OwnOp(Op):
    pass


@pytest.mark.parametrize(
    ("entry", "valid"),
    [
        (Pair(op("0F2"), op("0B1")), True),
        (Pair(OwnOp(0, "F", 2), op("0B1")), True),
        (Pair(Op(np.int64(0), "F", np.int64(2)), op("0B1")), True),  # type: ignore[arg-type]  # equal all the same
        ((op("0F2"), op("0B1")), False),
        (Longer(op("0F2"), op("0B1")), False),
        (Pair((0, "F", 2), op("0B1")), False),  # type: ignore[arg-type]
        (Pair(op("0F2"), None), False),  # type: ignore[arg-type]
        (Pair(op("0F2"), op("0I1")), False),
        (Pair(op("0F2"), Op(0, "B", -2)), False),
        (Pair(op("0F2"), Op("0", "B", None)), False),  # type: ignore[arg-type]
        ("0F2 0B1", False),
        (None, False),
        (5, False),
    ],
    ids=str,
)
def test_whatever_stands_among_the_pairs_is_judged(entry: Any, valid: bool) -> None:
    assert is_refused(replace(PAIRED, overlaps=frozenset({entry}))) != valid
