import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import Costs, Op, Placement, Schedule, Timeline, Wait, build, loop, simulate


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
    programs = (tuple(map(Op.parse, ("0F0", "1F0", "1B0", "0B0"))),)
    timeline = simulate(Schedule("mine", Placement((0, 0)), 1, programs), Costs(communication=100))
    assert timeline.makespan == 6


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
    programs = ((Op(0, "B", 0), Op(0, "F", 0)),)
    with pytest.raises(ScheduleError, match="it needs 0F0"):
        simulate(Schedule("mine", loop(1), 1, programs))


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
    with pytest.raises(ConfigError, match="what 0F1 waits within itself, 2, is a part of what it takes, 1"):
        pair_of(Costs(forward=1, exchange=2))
