"""When receives are posted: in the senders' order, early enough, and no earlier than can be of use."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.schedule import Op, Schedule, build, verify
from penstock.schedule.choose import chosen_schedule
from penstock.schedule.ops import loop
from penstock.schedule.order import AHEAD, Exchanges, exchanges, posts
from support.programs import received, valid, written
from support.schedules import FORMS, built, takes

# a search takes a second at these sizes: one of the two is in every run
MOST = [pytest.param(form, marks=pytest.mark.sweep if form == "searched v" else ()) for form in FORMS]
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def text(schedule: Schedule, rank: int, ahead: float = AHEAD) -> str:
    """The program of a rank, what is posted before an op in brackets before it."""
    program = zip(schedule.programs[rank], posts(verify(schedule), rank, ahead), strict=True)
    return " ".join((f"[{' '.join(map(str, posted))}]" if posted else "") + str(op) for op, posted in program)


def test_golden_1f1b() -> None:
    """Between whole backwards one op ahead is enough; where forwards follow each other it takes two."""
    schedule = build("1f1b", ranks=3, microbatches=4)
    assert text(schedule, 0) == "0F0 0F1 [1B0]0F2 [1B1]0B0 0F3 [1B2]0B1 [1B3]0B2 0B3"
    assert text(schedule, 1) == "[0F0 0F1]1F0 [2B0]1F1 [0F2 2B1]1B0 1F2 [0F3 2B2]1B1 1F3 [2B3]1B2 1B3"
    assert text(schedule, 2) == "[1F0]2F0 [1F1]2B0 2F1 [1F2]2B1 2F2 [1F3]2B2 2F3 2B3"


def test_golden_zero_bubble() -> None:
    """Between the short ops of the drain as well: 1I3 is posted two ops before 0I3."""
    schedule = build("zb_h1", ranks=2, microbatches=4)
    assert text(schedule, 0) == "0F0 [1I0]0F1 0I0 [1I1]0W0 0F2 0I1 [1I2]0W1 0F3 [1I3]0I2 0W2 0I3 0W3"
    assert text(schedule, 1) == "[0F0 0F1]1F0 1I0 1F1 [0F2]1I1 1W0 1F2 [0F3]1I2 1W1 1F3 1I3 1W2 1W3"


def test_nothing_is_posted_that_cannot_have_been_sent() -> None:
    """0F1 is sent after 0B0 only, which takes 1B0: however far ahead one looks, it is posted after 1B0."""
    schedule = written(loop(2), 2, "0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1")
    assert text(schedule, 1, inf) == "[0F0]1F0 1B0 [0F1]1F1 1B1"
    assert text(schedule, 0, inf) == "0F0 [1B0]0B0 0F1 [1B1]0B1"


def test_what_is_needed_late_but_sent_early_is_posted_first() -> None:
    """The second rank takes the microbatches backwards."""
    schedule = written(loop(2), 3, "0F0 0F1 0F2", "1F2 1F1 1F0")
    assert text(schedule, 1, 0) == "[0F0 0F1 0F2]1F2 1F1 1F0"


def positions(schedule: Schedule) -> dict[Op, tuple[int, int]]:
    return {op: (rank, at) for rank, program in enumerate(schedule.programs) for at, op in enumerate(program)}


@settings(max_examples=100, deadline=None)
@given(valid(), st.sampled_from([0.0, 1.0, 2.0, 3.5, inf]))
def test_the_rule(schedule: Schedule, ahead: float) -> None:
    where = positions(schedule)
    proof = verify(schedule)
    for rank, program in enumerate(schedule.programs):
        found = [(place, op) for place, posted in enumerate(posts(proof, rank, ahead)) for op in posted]
        uses = {needed: op for op in program if (needed := received(schedule, op)) is not None}
        assert sorted(op for _, op in found) == sorted(uses)
        channels: dict[tuple[int, int], list[tuple[int, Op]]] = {}
        for place, op in found:
            channels.setdefault((op.stage, uses[op].stage), []).append((place, op))
        for queue in channels.values():
            assert [where[op] for _, op in queue] == sorted(where[op] for _, op in queue)
            least = len(program)
            for place, op in reversed(queue):
                least = min(least, latest(program, where[uses[op]][1], ahead))
                assert place == max(least, heard(schedule, rank, op, where) + 1)
                assert place <= where[uses[op]][1]


def latest(program: tuple[Op, ...], use: int, ahead: float) -> int:
    """The last place before `use` with `ahead` units between; the first of all if there is none."""
    enough = [at for at in range(use + 1) if sum(UNITS[op.kind] for op in program[at:use]) >= ahead]
    return max(enough, default=0)


def heard(schedule: Schedule, rank: int, sent: Op, where: dict[Op, tuple[int, int]]) -> int:
    """The last position on `rank` whose result the sender takes before it comes to `sent`."""
    peer, until = where[sent]
    needs = [received(schedule, op) for op in schedule.programs[peer][: until + 1]]
    return max((where[op][1] for op in needs if op is not None and where[op][0] == rank), default=-1)


SIZES = [(2, 2), (2, 5), (3, 4), (4, 4), (4, 10), (8, 16)]


def finishes(found: Exchanges, in_line: bool) -> bool:
    """All ranks, step by step, in the plainest way: a judge written apart from the code."""
    schedule, hosts = found.schedule, found.schedule.placement.rank_of
    groups: dict[tuple[int, int], set[Op]] = {}  # by rank and place, what is exchanged
    brings: dict[tuple[int, Op], int] = {}  # by rank and what is received, the place
    for rank, row in enumerate(found.receives):
        for place, ops in enumerate(row):
            for op in ops:
                sender = hosts[op.stage]
                sent = schedule.programs[sender].index(op) + 1
                groups.setdefault((rank, place), set()).add(op)
                groups.setdefault((sender, sent), set()).add(op)
                brings[rank, op] = place
    at, over = [0] * schedule.ranks, [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        begun = {(rank, op) for rank in range(schedule.ranks)
                 for place in range(min(over[rank], at[rank]) + 1) for op in groups.get((rank, place), ())
                 }  # fmt: skip
        for rank, program in enumerate(schedule.programs):
            mine = groups.get((rank, over[rank]), set())
            if over[rank] <= at[rank] and all(sum((r, op) in begun for r in range(schedule.ranks)) == 2
                                              for op in mine):  # fmt: skip
                over[rank] += 1
                moved = True
            if at[rank] < len(program):
                needed = received(schedule, program[at[rank]])
                place = -1 if needed is None else brings[rank, needed]
                if place < over[rank] and (not in_line or at[rank] < over[rank]):
                    at[rank] += 1
                    moved = True
    return all(at[rank] == len(program) for rank, program in enumerate(schedule.programs))


@pytest.mark.parametrize("name", MOST)
def test_every_builder_comes_to_its_end(name: str) -> None:
    for ranks, microbatches in SIZES if "searched" not in name else [(4, 8)]:
        if takes(name, ranks, microbatches):
            found = exchanges(verify(built(name, ranks, microbatches)))
            assert ranks > 4 or finishes(found, in_line=False)
            assert ranks > 4 or finishes(found, in_line=True)


@pytest.mark.parametrize("name", MOST)
def test_each_result_is_received_once_before_its_use_and_in_the_order_of_sending(name: str) -> None:
    schedule = built(name, 4, 8)
    found, hosts = exchanges(verify(schedule)), schedule.placement.rank_of
    for rank, program in enumerate(schedule.programs):
        assert len(found.receives[rank]) == len(program)
        places = {op: place for place, ops in enumerate(found.receives[rank]) for op in ops}
        needs = {needed: at for at, op in enumerate(program) if (needed := received(schedule, op))}
        assert places.keys() == needs.keys()
        assert all(places[op] <= needs[op] for op in needs)
        got = [op for ops in found.receives[rank] for op in ops]
        for peer in range(4):
            sent = [op for op in schedule.programs[peer] if op in needs]
            assert [op for op in got if hosts[op.stage] == peer] == sent


def test_what_the_docstring_draws() -> None:
    found = exchanges(verify(chosen_schedule("1f1b", 2, 3)))
    assert [" ".join(map(str, ops)) for ops in found.receives[1]] == ["0F0", "", "0F1", "", "0F2", ""]


def test_results_that_cross_are_received_as_soon_as_they_are_sent() -> None:
    """Late receives alone would let these two wait for each other: each sends what the other wants later."""
    found = exchanges(verify(chosen_schedule({"schedule": "1f1b", "stages_per_rank": 2}, 2, 4)))
    early = 0
    for program, row in zip(found.schedule.programs, found.receives, strict=True):
        uses = {received(found.schedule, op): at for at, op in enumerate(program)}
        early += sum(place < uses[op] for place, ops in enumerate(row) for op in ops)
    assert early


def a_circle() -> Schedule:
    """Three ranks in a loop, each of which has something to send on before what it waits for can come."""
    return written(
        loop(3, 2),
        3,
        "0F2 0F1 3F2 0F0 3F0 3F1 3B2 0B2 3B0 3B1 0B0 0B1",
        "1F2 1F1 4F2 1F0 4F0 4F1 4B2 1B2 4B1 4B0 1B0 1B1",
        "2F2 5F2 2F1 5B2 2F0 5F0 5F1 5B1 2B2 5B0 2B0 2B1",
    )


def test_who_would_wait_in_a_circle_is_named() -> None:
    proof = verify(a_circle())  # no op waits in a circle
    with pytest.raises(ConfigError) as refused:
        exchanges(proof)
    for said in (
        "exchange='batched' with schedule 'mine': what a rank sends and receives between",
        "rank 0 after 0F0 sends 0F0 to rank 1 and receives 2F1 from rank 2",
        "rank 2 after 5B2 sends 5B2 to rank 1 and waits for rank 1",
        "and waits for rank 0",
        "Take exchange='channels'",
    ):
        assert said in str(refused.value)


@settings(max_examples=75, deadline=None)
@given(valid(always_trains=True))
def test_what_is_accepted_ends(schedule: Schedule) -> None:
    try:
        found = exchanges(verify(schedule))
    except ConfigError:
        return
    assert finishes(found, in_line=False)
    # an op's result leaves its rank in a later exchange, which waits for those before it anyway
    assert finishes(found, in_line=True)
