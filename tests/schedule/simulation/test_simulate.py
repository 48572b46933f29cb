"""What ranks hold over time, buffers included."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import (
    Costs,
    Op,
    Placement,
    Reduction,
    Schedule,
    Span,
    Timeline,
    Wait,
    build,
    loop,
    simulate,
    verify,
)
from penstock.schedule.order import posts
from support.programs import received, valid, written
from support.refusals import refuses


def starts_and_ends(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.op): (span.start, span.end) for span in timeline.spans}


def test_unequal_stages_and_a_slow_edge() -> None:
    """1F1B on two ranks, worked out by hand: 0.5 from rank to rank, backwards of 1.5."""
    costs = Costs(forward=[1, 2], input_grad=1, weight_grad=0.5, communication=0.5)
    timeline = simulate(build("1f1b", ranks=2, microbatches=2), costs)
    assert starts_and_ends(timeline) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0B0": (5.5, 7),  # 1B0 ends at 5
        "0B1": (9, 10.5),  # 1B1 ends at 8.5
        "1F0": (1.5, 3.5),  # 0F0 ends at 1
        "1B0": (3.5, 5),
        "1F1": (5, 7),  # its input is there since 2.5, its rank is free at 5
        "1B1": (7, 8.5),
    }
    assert timeline.makespan == 10.5
    assert timeline.busy == (5.0, 7.0)
    assert timeline.bubble == pytest.approx(1 - 12 / 21)
    assert timeline.peak_live == (2, 1)
    assert timeline.waits == (
        Wait(0, Op(0, "B", 0), 2, 5.5, sent=5),
        Wait(0, Op(0, "B", 1), 7, 9, sent=8.5),
        Wait(1, Op(1, "F", 0), 0, 1.5, sent=1),
    )
    assert timeline.idle == ((4.5, 1.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 3.5, 0.0))


def test_the_slowest_stage_sets_the_pace() -> None:
    """Four microbatches through stages of 1, 3 and 1: the middle one never pauses once it has begun."""
    timeline = simulate(build("inference", ranks=3, microbatches=4), Costs(forward=[1, 3, 1]))
    times = starts_and_ends(timeline)
    assert [times[f"1F{i}"] for i in range(4)] == [(1, 4), (4, 7), (7, 10), (10, 13)]
    assert [times[f"2F{i}"] for i in range(4)] == [(4, 5), (7, 8), (10, 11), (13, 14)]


def test_stages_on_one_rank_hand_over_at_once() -> None:
    """And so they use no buffers."""
    schedule = written(Placement((0, 0)), 1, "0F0 1F0 1B0 0B0")
    timeline = simulate(schedule, Costs(communication=100, buffer=9))
    assert timeline.makespan == 6
    assert timeline.peak_memory == (2.0,)


def test_the_edge_is_crossed_while_the_ranks_work() -> None:
    """A latency as long as a forward costs each microbatch that follows another nothing."""
    timeline = simulate(build("inference", ranks=2, microbatches=5), Costs(communication=1))
    assert starts_and_ends(timeline)["1F0"] == (2, 3)
    assert timeline.makespan == 1 + 1 + 5


def test_spans_are_in_order_of_rank_then_start_even_where_ops_take_no_time() -> None:
    schedule = build("gpipe", ranks=2, microbatches=3)
    timeline = simulate(schedule, Costs(0, 0, 0))
    for rank in range(2):
        assert tuple(span.op for span in timeline.of_rank(rank)) == schedule.programs[rank]
    assert [span.rank for span in timeline.spans] == [0] * 6 + [1] * 6


def test_a_schedule_that_would_hang_is_refused() -> None:
    with refuses(ScheduleError, rule="it needs 0F0"):
        simulate(written(loop(1), 1, "0B0 0F0"))


def pair_of(costs: Costs) -> Timeline:
    """One rank, two microbatches: 0F0 (0F1;0B0) 0B1."""
    return simulate(build("1f1b", ranks=1, microbatches=2, paired=True), costs)


def test_a_pair_hides_what_its_ops_wait_for_within_themselves() -> None:
    """F of 3 and B of 5, of which 1 is an exchange: together 3 + 5 - 2 of compute."""
    timeline = pair_of(Costs(forward=3, input_grad=3, weight_grad=2, exchange=1))
    assert starts_and_ends(timeline) == {"0F0": (0, 3), "0F1": (3, 9), "0B0": (3, 9), "0B1": (9, 14)}
    assert timeline.busy == (14.0,)  # what runs side by side counts once
    assert timeline.bubble == 0
    assert timeline.critical_path == (Op(0, "F", 0), Op(0, "B", 0), Op(0, "B", 1))


def test_a_pair_takes_no_less_than_each_op_alone() -> None:
    timeline = pair_of(Costs(forward=3, input_grad=6, weight_grad=2, exchange=3))
    assert starts_and_ends(timeline)["0B0"] == (3, 11)
    timeline = pair_of(Costs(forward=3, input_grad=6, weight_grad=2, exchange=1, exchange_in_backward=5))
    assert starts_and_ends(timeline)["0B0"] == (3, 11)
    timeline = pair_of(Costs(forward=8, input_grad=3, weight_grad=2, exchange=6, exchange_in_backward=0))
    assert starts_and_ends(timeline)["0B0"] == (8, 16)


def test_without_an_exchange_a_pair_runs_one_after_the_other() -> None:
    timeline = pair_of(Costs(forward=3, input_grad=3, weight_grad=2))
    assert starts_and_ends(timeline) == {"0F0": (0, 3), "0F1": (3, 6), "0B0": (6, 11), "0B1": (11, 16)}


def test_a_pair_waits_for_both_its_inputs() -> None:
    schedule = build("1f1b", ranks=2, microbatches=4, paired=True)
    timeline = simulate(schedule, Costs(communication=0.5, exchange=0.5, activation=1, buffer=0.25))
    times = starts_and_ends(timeline)
    for pair in schedule.overlaps:
        assert times[str(pair.forward)] == times[str(pair.backward)]
        for op in pair:
            ends = [times[str(needed)][1] for needed in schedule.predecessors(op)]
            assert times[str(pair.forward)][0] >= max(ends, default=0)
    assert timeline.peak_memory[0] >= 4


def test_an_exchange_longer_than_its_op_is_refused() -> None:
    with refuses(ConfigError, rule="the exchange of 0F1, 2, is a part of its duration, 1"):
        pair_of(Costs(forward=1, exchange=2))


def test_a_rank_sums_gradients_after_its_last_op_of_the_stage() -> None:
    """Two stages on one of two ranks: R1 takes 2 before 0B0 runs, and the result of 1B0 was sent before."""
    schedule = written(Placement((0, 1, 0)), 1, "0F0 2F0 2B0 0B0", "1F0 1B0")
    timeline = simulate(schedule, Costs(reduction=[1, 3, 2], buffer=0.25))
    assert starts_and_ends(timeline) == {
        "0F0": (0, 1), "1F0": (1, 2), "2F0": (2, 3), "2B0": (3, 5), "1B0": (5, 7), "0B0": (7, 9),
    }  # fmt: skip
    assert timeline.reductions == (Reduction(0, 2, 5, 7), Reduction(0, 0, 9, 10), Reduction(1, 1, 7, 10))
    assert timeline.makespan == 10
    assert [idle.reduce for idle in timeline.idle] == [3, 3]
    assert [wait.op for wait in timeline.waits if wait.rank == 0] == [Op(2, "F", 0)]  # 0B0 came while R2 ran
    late = simulate(schedule, Costs(reduction=[1, 3, 4], buffer=0.25))
    assert starts_and_ends(late)["0B0"] == (9, 11)
    assert late.critical_path == tuple(map(Op.parse, ("0F0", "1F0", "2F0", "2B0", "0B0")))
    assert [point for point in late.memory[0] if 5 < point[0] < 11] == [(9, 1.25)]  # posted after the sum


def test_the_last_reduction_ends_the_critical_path() -> None:
    schedule = build("1f1b", ranks=2, microbatches=2)
    assert simulate(schedule, Costs()).critical_path[-1] == Op(0, "B", 1)
    assert simulate(schedule, Costs(reduction=[0, 5])).critical_path[-1] == Op(1, "B", 1)


def test_a_stage_gathers_its_weights_once() -> None:
    timeline = simulate(build("inference", ranks=2, microbatches=3), Costs(gather=[0.5, 2]))
    assert [span.end - span.start for span in timeline.spans] == [1.5, 1, 1, 3, 1, 1]


def test_reductions_and_copies_to_the_host() -> None:
    """A rank of two stages, both ways: copies that take no time change no time."""
    schedule, costs = build("zb_v", ranks=2, microbatches=4), Costs(reduction=[1, 2, 3, 4], gather=0.5)
    plain = simulate(schedule, costs)
    assert len(plain.reductions) == 4
    copied = simulate(schedule, replace(costs, offloaded=0.5))
    assert (copied.spans, copied.reductions) == (plain.spans, plain.reductions)


# none of which comes to the same time another way, so that nothing ends when another thing begins by chance
BUFFER = 0.5
ODD = Costs(1.0, 1.37, 0.71, 0.443, activation=2.0, held_for_weight=1.5, buffer=BUFFER)


def test_two_ranks_by_hand() -> None:
    """1F1B on two ranks, an edge of 0.5: 1F0 runs from 1.5 to 2.5, 1B0 to 4.5, 1F1 to 5.5, 1B1 to 7.5."""
    costs = Costs(communication=0.5, activation=4, buffer=1)
    first, second = simulate(build("1f1b", ranks=2, microbatches=2), costs).memory
    assert list(second) == [
        (0.0, 1),  # posted for 0F0
        (1.5, 4),  # it is part of the activation from now on
        (2.5, 5),  # 1B0 begins, and the receive of 0F1 is posted
        (4.5, 5),  # its activation goes, its gradient is on its way, and 0F1 is an activation
        (5.0, 4),  # that has arrived
        (7.5, 1),  # the gradient of 1B1 is on its way
        (8.0, 0),
    ]
    assert [first[0], first[-1]] == [(0.0, 4), (10.0, 0)]
    # two activations, 0F1 on its way, and at the end of that forward the receives of both gradients
    assert max(held for _, held in first) == 4 + 4 + 1 + 2


def test_what_the_graph_keeps_anyway_is_not_counted_twice() -> None:
    schedule = build("gpipe", ranks=2, microbatches=3)
    costs = Costs(communication=5, activation=4, buffer=1)
    assert (
        simulate(schedule, costs).peak_memory[0] == 3 * 4 + 3 + 2
    )  # all are on their way when two are posted
    assert simulate(schedule, replace(costs, sent=0)).peak_memory[0] == 3 * 4 + 2


def test_what_nobody_waits_for_yet_stays_with_its_sender() -> None:
    """The second rank posts two ahead: 0F3, made at 4, when 1F0 has run, from 1.5 to 10.5."""
    schedule = build("gpipe", ranks=2, microbatches=4)
    first, _ = simulate(schedule, Costs(forward=[1, 9], communication=0.5, buffer=1)).memory
    activations, gradients_awaited = 4, 2
    assert (4.0, activations + gradients_awaited + 1) in first
    assert (11.0, activations + gradients_awaited) in first


def test_inference_holds_buffers_only() -> None:
    timeline = simulate(build("inference", ranks=2, microbatches=3), Costs(communication=0.5, buffer=1))
    assert timeline.peak_memory == (1.0, 3.0)  # all three are posted ahead
    assert [curve[-1][1] for curve in timeline.memory] == [0, 0]


def test_a_forward_run_again_holds_all_of_it_in_its_backward() -> None:
    costs = Costs(activation=0.25, held_in_backward=1, held_for_weight=0.5)
    (memory,) = simulate(build("zb_h1", ranks=1, microbatches=2), costs).memory
    assert max(held for _, held in memory) == 1.0
    (gpipe,) = simulate(build("gpipe", ranks=1, microbatches=2), costs).memory
    assert [held for _, held in gpipe] == [0.25, 0.5, 1.25, 1.0, 0]


def test_a_forward_holds_what_its_ops_need_while_it_runs() -> None:
    """The logits of a loss in float32: 1.0 counted what stays, and was low by more than half."""
    costs = Costs(activation=1, held_in_forward=3, held_in_backward=2)
    (gpipe,) = simulate(build("gpipe", ranks=1, microbatches=2), costs).memory
    assert [held for _, held in gpipe] == [3, 4, 3, 2, 0]
    schedule, costs = build("1f1b", ranks=2, microbatches=2), replace(costs, buffer=0.5, sent=0)
    assert simulate(schedule, costs).peak_memory == (4.5, 3.5)  # with a message that is posted
    assert simulate(schedule, replace(costs, held_in_forward=None)).peak_memory == (4, 2.5)


def test_buffers_by_stage() -> None:
    """The edge behind stage 0 is wide, the one behind stage 1 narrow."""
    schedule = build("inference", ranks=3, microbatches=1)
    assert simulate(schedule, Costs(buffer=[5, 1, 99])).peak_memory == (5.0, 5.0, 1.0)


@settings(max_examples=150, deadline=None)
@given(valid(), st.sampled_from([0.0, 0.3, None]))
def test_the_peak_is_that_of_all_that_lies_there(schedule: Schedule, sent: float | None) -> None:
    """Added up from the time that each single thing is held."""
    timeline = simulate(schedule, replace(ODD, sent=sent))
    for rank in range(schedule.ranks):
        things = held(schedule, timeline, rank, BUFFER if sent is None else sent)
        moments = [start for start, _, _, _ in things]
        most = max((sum(size for start, end, size, to_the_end in things
                        if start <= now and (now < end or (to_the_end and now == end)))
                    for now in moments), default=0.0)  # fmt: skip
        assert timeline.peak_memory[rank] == pytest.approx(most)
        assert not timeline.memory[rank] or timeline.memory[rank][-1][1] == pytest.approx(0)


def held(
    schedule: Schedule, timeline: Timeline, rank: int, sent: float
) -> list[tuple[float, float, float, bool]]:
    """From when, until when, how much, and whether it still lies there at the last moment."""
    span = {span.op: span for span in timeline.spans}
    program = schedule.programs[rank]
    users = {needed: op for op in span if (needed := received(schedule, op)) is not None}
    posted = {op: at for at, ops in enumerate(posts(verify(schedule), rank)) for op in ops}
    found: list[tuple[float, float, float, bool]] = []
    for op in program:
        last = {kind: span.get(op._replace(kind=kind)) for kind in ("B", "I", "W")}
        if op.kind == "F" and schedule.trains:
            end = last["B"] or last["I"]
            assert end is not None
            found.append((span[op].start, end.end, 2.0, False))
        if op.kind == "I":
            assert last["W"] is not None
            found.append((span[op].end, last["W"].end, 1.5, False))
        if op in users:
            size = sent if op.kind == "F" else BUFFER
            leaves = max(span[op].end, awaited(schedule, span, op, users[op]))
            found.append((span[op].end, leaves + 0.443, size, True))
        needed = received(schedule, op)
        if needed is not None:
            at = posted[needed]
            reached = span[program[at - 1]].end if at else 0.0
            end_of_it = span[op].start if op.kind == "F" else span[op].end
            # what is posted at the moment that F takes it over lies beside it, unless outweighed by F's own
            found.append((reached, end_of_it, BUFFER, not schedule.trains))
    return found


def awaited(schedule: Schedule, span: dict[Op, Span], op: Op, user: Op) -> float:
    """When the rank that runs `user` has posted the receive of what `op` made."""
    rank = schedule.placement.rank_of[user.stage]
    (at,) = [at for at, ops in enumerate(posts(verify(schedule), rank)) if op in ops]
    return span[schedule.programs[rank][at - 1]].end if at else 0.0


@settings(max_examples=50, deadline=None)
@given(valid())
def test_without_buffers_nothing_changes(schedule: Schedule) -> None:
    plain = replace(ODD, buffer=0.0)
    assert simulate(schedule, replace(plain, sent=0)) == simulate(schedule, plain)
