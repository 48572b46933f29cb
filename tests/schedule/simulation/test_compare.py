"""All schedules side by side: in order, on equal terms, with advice that holds where one does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf

import pytest

from penstock.errors import ConfigError
from penstock.schedule import Costs, Schedule, both_ways, build, loop, simulate, wave
from penstock.schedule.builders import BUILDERS, Builder
from penstock.schedule.ops import Op
from penstock.schedule.simulation.compare import Entry, compare, round_up, share
from support.refusals import refuses


def gpipe(ranks: int, microbatches: int) -> Schedule:
    return build("gpipe", ranks=ranks, microbatches=microbatches)


def only_if(rule: Callable[[int, int], bool]) -> Builder:
    """A builder that refuses all other numbers."""

    def builder(ranks: int, microbatches: int) -> Schedule:
        if not rule(ranks, microbatches):
            raise ConfigError(f"microbatches={microbatches}", "this one is choosy", "Give others")
        return gpipe(ranks, microbatches)

    return builder


def by_name(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    return {entry.label: entry for entry in entries}


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (3, 3), (4, 8), (4, 5)])
@pytest.mark.parametrize("limit", [None, 3.0, 0.25])
def test_those_that_fit_come_first_by_step_time(ranks: int, microbatches: int, limit: float | None) -> None:
    entries = compare(ranks=ranks, microbatches=microbatches, memory_limit=limit)
    assert {"gpipe", "1f1b"} & {entry.name for entry in entries}
    assert "inference" not in {entry.name for entry in entries}
    keys = [(not e.fits, e.timeline.makespan if e.timeline else inf) for e in entries]
    assert keys == sorted(keys)
    for entry in entries:
        assert entry.fits == (not entry.refusal)
        if entry.fits:
            assert limit is None or entry.peak_memory <= limit
    programs = [(e.schedule.placement, e.schedule.programs) for e in entries if e.schedule]
    assert len(set(programs)) == len(programs) or any(e.schedule.overlaps for e in entries if e.schedule)


def test_a_faster_one_that_does_not_fit_comes_last() -> None:
    builders = {name: BUILDERS[name] for name in ("gpipe", "1f1b")}
    costs = Costs(communication=0.5)

    def order(limit: float | None) -> list[tuple[str, bool]]:
        found = compare(ranks=4, microbatches=8, costs=costs, memory_limit=limit, builders=builders)
        return [(entry.name, entry.fits) for entry in found if not entry.options]

    assert order(None) == [("gpipe", True), ("1f1b", True)]
    assert order(4) == [("1f1b", True), ("gpipe", False)]


def test_the_advice_on_memory_holds() -> None:
    costs = Costs(activation=0.7, weight_grad=0.5)
    builders = {name: BUILDERS[name] for name in ("gpipe", "1f1b", "zb_h2", "dualpipe_v")}

    def within(limit: float) -> dict[str, Entry]:
        return by_name(compare(ranks=4, microbatches=8, costs=costs, memory_limit=limit, builders=builders))

    refused = [entry for entry in within(1.1).values() if not entry.fits]
    assert {entry.name for entry in refused} == builders.keys()
    for entry in refused:
        found = re.fullmatch(r"Give a memory limit of ([\d.]+) or more", entry.advice)
        assert found
        assert within(float(found[1]))[entry.label].fits
        assert not within(0.99 * float(found[1]))[entry.label].fits


def test_what_cannot_be_built_says_why_and_what_would_do() -> None:
    entries = compare(
        ranks=4, microbatches=5, builders={"choosy": only_if(lambda p, m: m % p == 0), "gpipe": gpipe}
    )
    assert [entry.name for entry in entries] == ["gpipe", "choosy"]
    choosy = entries[1]
    assert (choosy.fits, choosy.timeline, choosy.peak_memory) == (False, None, inf)
    assert choosy.refusal == "microbatches=5: this one is choosy"
    assert choosy.advice == "Give others"


def test_each_choice_of_options_is_tried_once() -> None:
    seen = []

    def builder(ranks: int, microbatches: int, stages_per_rank: int = 2, split: bool = False) -> Schedule:
        seen.append((stages_per_rank, split))
        return build("inference", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)

    compare(ranks=2, microbatches=2, builders={"b": builder})
    assert seen == [(2, False), (2, True), (1, False), (1, True)]


def test_a_choice_that_is_refused_is_left_out_unless_all_are() -> None:
    def builder(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
        if stages_per_rank != 1 or microbatches > 100:
            raise ConfigError("stages_per_rank", "only 1", "Give 1")
        return gpipe(ranks, microbatches)

    entries = compare(ranks=2, microbatches=2, builders={"b": builder})
    assert [entry.label for entry in entries] == ["b stages_per_rank=1"]
    entries = compare(ranks=2, microbatches=200, builders={"b": builder})
    assert [(entry.label, entry.fits, entry.advice) for entry in entries] == [
        ("b stages_per_rank=1", False, "Give 1")
    ]


def test_what_verify_refuses_is_no_crash() -> None:
    def broken(ranks: int, microbatches: int) -> Schedule:
        program = (Op(0, "B", 0), Op(0, "F", 0))
        return Schedule("broken", loop(1), 1, (program,))

    (entry,) = compare(ranks=1, microbatches=1, builders={"broken": broken})
    assert not entry.fits
    assert entry.refusal.startswith("schedule 'broken': it breaks 1 rule")


def test_builders_that_shape_themselves_get_the_costs_of_their_stages() -> None:
    given = []

    def builder(ranks: int, microbatches: int, costs: Costs | None = None) -> Schedule:
        given.append(costs)
        return build("inference", ranks=ranks, microbatches=microbatches, stages_per_rank=2)

    compare(ranks=2, microbatches=2, costs=Costs(forward=[2, 4]), builders={"b": builder})
    assert given == [None, share(Costs(forward=[2, 4]), loop(2, 2))]


def test_a_schedule_of_ones_own_is_compared_too() -> None:
    mine = build("1f1b", ranks=2, microbatches=4)
    entries = compare(
        ranks=2, microbatches=4, builders={"gpipe": gpipe}, extra=[("mine", mine), ("again", mine)]
    )
    assert {entry.name: entry.also for entry in entries} == {"gpipe": (), "mine": ("again",)}


def test_equal_schedules_are_one_under_the_shortest_name() -> None:
    def switched(ranks: int, microbatches: int, on: bool = False) -> Schedule:
        return gpipe(ranks, microbatches) if on else build("1f1b", ranks=ranks, microbatches=microbatches)

    found = by_name(compare(ranks=2, microbatches=4, builders={"switched": switched, "gpipe": gpipe}))
    assert {label: entry.also for label, entry in found.items()} == {
        "switched": (),
        "gpipe": ("switched on=True",),
    }


def test_costs_are_shared_out_among_finer_stages() -> None:
    costs = Costs(
        forward=2.0, input_grad=[2.0, 4.0], weight_grad=[[1.0, 2.0], 3.0], communication=0.5,
        bytes=[7.0, 0.0], bandwidth=2.0, activation=3.0, held_for_weight=1.0,
    )  # fmt: skip
    assert share(costs, loop(2, 2)) == Costs(
        forward=1.0, input_grad=[1.0, 1.0, 2.0, 2.0], weight_grad=[[0.5, 1.0], [0.5, 1.0], 1.5, 1.5],
        communication=0.5, bytes=[7.0, 7.0, 0.0, 0.0], bandwidth=2.0, activation=1.5, held_for_weight=0.5,
    )  # fmt: skip
    crossing = Costs(buffer=[1, 2], sent=0.5, held_in_backward=4)  # as much crosses an edge as ever
    assert share(crossing, loop(2, 2)) == Costs(
        0.5, 0.5, 0.5, activation=0.5, buffer=[1, 1, 2, 2], sent=0.5, held_in_backward=2
    )
    assert share(Costs(), loop(2)) == Costs()
    assert share(Costs(held_for_weight=None), wave(3)).held_for_weight is None
    assert share(Costs(), both_ways(4)) == Costs()  # a copy's stage is a slice as large as with one copy


def test_an_exchange_is_shared_out_with_its_op() -> None:
    """0.5.0: it stayed whole where stages were finer, and was then longer than the op it is a part of."""
    shared = share(Costs(2, 2, 2, exchange=[2, 1], exchange_in_backward=1), loop(2, 2))
    assert (shared.exchange, shared.exchange_in_backward) == ([1, 1, 0.5, 0.5], 0.5)


def test_pairs_come_first_where_they_hide_an_exchange() -> None:
    builders = {"1f1b": BUILDERS["1f1b"]}

    def order(costs: Costs) -> list[bool]:
        entries = compare(ranks=4, microbatches=16, costs=costs, builders=builders)
        return ["paired" in entry.options for entry in entries]

    assert order(Costs(4, 4, 4, exchange=2, exchange_in_backward=4)) == [True, True, False, False]
    assert not order(Costs(4, 4, 4))[0]


def test_an_exchange_longer_than_its_op_is_refused_at_once() -> None:
    with refuses(ConfigError, rule="the exchange of 0F0, 2, is a part of its duration, 1"):
        compare(ranks=2, microbatches=2, costs=Costs(exchange=2), builders={"gpipe": gpipe})


def test_the_same_model_is_the_same_work_however_it_is_cut() -> None:
    costs = Costs(forward=[1, 2, 3], input_grad=[3, 1, 1], weight_grad=0.5)
    for schedule in (build("gpipe", ranks=3, microbatches=4), *_two_stages_a_rank(3, 4)):
        work = sum(simulate(schedule, share(costs, schedule.placement)).busy)
        assert work == pytest.approx(4 * (6 + 5 + 1.5))


def _two_stages_a_rank(ranks: int, microbatches: int) -> list[Schedule]:
    entries = compare(ranks=ranks, microbatches=microbatches)
    return [e.schedule for e in entries if e.schedule and e.schedule.placement.depth > ranks]


@pytest.mark.parametrize(
    ("given", "value", "rule"),
    [
        ({"ranks": 0}, "ranks=0", "whole number"),
        ({"microbatches": 2.5}, "microbatches=2.5", "whole number"),
        ({"memory_limit": 0}, "memory_limit=0", "may hold"),
        ({"memory_limit": float("nan")}, "memory_limit=nan", "may hold"),
        ({"costs": Costs(forward=[1, 2, 3])}, "Costs(forward=...) with 3 numbers", "there are 2 ranks"),
    ],
)
def test_what_no_schedule_can_have_is_refused(given: dict[str, object], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        compare(**{"ranks": 2, "microbatches": 2, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "text"),
    [(8.0, "8"), (0.0, "0"), (2.1, "2.1"), (1 / 3, "0.3334"), (12345.6, "12346"), (7.000001, "7.001")],
)
def test_limits_are_rounded_up(value: float, text: str) -> None:
    assert round_up(value) == text
    assert float(text) >= value
