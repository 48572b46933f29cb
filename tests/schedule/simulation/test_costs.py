from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.schedule import Costs, Op, Span, Timeline, build, loop, simulate
from penstock.schedule.choose import chosen_schedule
from penstock.schedule.ops import Pair
from support.refusals import refuses


def test_a_backward_takes_both_gradients() -> None:
    costs = Costs(forward=[1, 2], input_grad=[3, 4], weight_grad=0.5)
    assert costs.durations("F", loop(2), 3) == [[1] * 3, [2] * 3]
    assert costs.durations("B", loop(2), 2) == [[3.5, 3.5], [4.5, 4.5]]


@pytest.mark.parametrize(
    ("name", "value"),
    [("forward", -1.0), ("input_grad", nan), ("weight_grad", inf), ("communication", -1.0), ("sent", -1)],
)
def test_a_cost_is_finite_and_not_negative(name: str, value: float) -> None:
    wrong: Any = {name: value}
    with refuses(ConfigError, rule="cost is finite") as caught:
        Costs(**wrong)
    assert caught.value.value == f"Costs({name}={value!r})"


def test_one_number_a_stage() -> None:
    with refuses(ConfigError, "Costs(forward=...) with 3 numbers", "2 stages"):
        Costs(forward=[1, 2, 3]).durations("F", loop(2), 1)


def test_measured_costs_are_the_medians_of_a_timeline() -> None:
    schedule = build("1f1b", ranks=2, microbatches=3)
    run = simulate(schedule, Costs(forward=[1, 2], input_grad=[1, 3], weight_grad=1, communication=0.5))
    costs = Costs.measured(run, communication=0.5)
    assert costs.durations("F", loop(2), 3) == [[1] * 3, [2] * 3]
    assert costs.durations("B", loop(2), 1) == [[2], [4]]
    assert simulate(schedule, costs) == run


def test_measured_costs_of_inference_have_no_backward() -> None:
    run = simulate(build("inference", ranks=2, microbatches=2), Costs(forward=3))
    assert Costs.measured(run) == Costs(forward=[3, 3], input_grad=[0, 0], weight_grad=[0, 0])


@pytest.mark.parametrize("name", ["dualpipe", "zb_v", "1f1b"])
def test_what_was_measured_predicts_itself(name: str) -> None:
    """0.2.0: where whole and split backwards were mixed, a whole one's time was taken for that of an I."""
    schedule = build(name, ranks=2, microbatches=6)
    run = simulate(schedule, Costs(1, 2, 3, 0.5))
    assert simulate(schedule, Costs.measured(run, communication=0.5)).makespan == run.makespan


@pytest.mark.parametrize("name", ["dualpipe_v", "1f1b_paired"])
def test_what_ran_next_to_another_op_is_no_measure_of_it(name: str) -> None:
    """A pair's ops begin and end together on paper: none of them takes so long alone."""
    schedule = chosen_schedule({"schedule": "1f1b", "paired": True} if "1f1b" in name else name, 2, 6)
    assert schedule.overlaps
    costs = Costs(3, 4, 1, 0.5, exchange=1, exchange_in_backward=2)
    run = simulate(schedule, costs)
    again = replace(Costs.measured(run, communication=0.5), exchange=1, exchange_in_backward=2)
    assert set(again.rows("forward", schedule.placement, 1)[0]) == {3}
    assert simulate(schedule, again) == run


def test_where_no_op_ran_alone_all_count() -> None:
    spans = (Span(0, Op(0, "F", 0), 0, 1), Span(0, Op(0, "F", 1), 1, 5), Span(0, Op(0, "B", 0), 1, 4))
    overlapped = Timeline("mine", 1, spans, (2,), overlaps=frozenset({Pair(spans[1].op, spans[2].op)}))
    assert Costs.measured(overlapped) == Costs([1], [3], [0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": None}, {"forward": "1"}, {"forward": True}, {"forward": {0: 1}}, {"forward": [[[1]]]},
        {"bytes": -1}, {"bandwidth": "3"}, {"bandwidth": 0}, {"activation": [1, nan]},
        {"activation": [nan, 1.0]}, {"buffer": [[1.0, -1.0]]}, {"bytes": [1.0, True]},
        {"communication": None}, {"buffer": None}, {"held_in_backward": "2"}, {"held_in_forward": -1},
    ],
)  # fmt: skip
def test_what_is_no_cost_is_refused_at_once(wrong: Any) -> None:
    with refuses(ConfigError, "Costs"):
        Costs(**wrong)


def test_ops_that_take_no_time_hold_memory_all_the_same() -> None:
    timeline = simulate(build("gpipe", ranks=2, microbatches=8), Costs(0, 0, 0))
    assert list(timeline.peak_live) == [8, 8]
    assert list(timeline.peak_memory) == [8, 8]


def test_costs_by_stage_and_microbatch() -> None:
    costs = Costs(forward=[1, [1, 2]], bytes=4, bandwidth=2, communication=1, activation=[1, 2])
    timeline = simulate(build("gpipe", ranks=2, microbatches=2), costs)
    starts = {str(span.op): (span.start, span.end) for span in timeline.spans}
    # 1 of computing, 1 of latency, 4 bytes at 2 a unit of time
    assert [starts["1F0"], starts["1F1"]] == [(4.0, 5.0), (5.0, 7.0)]
    assert list(timeline.peak_memory) == [2, 4]


def test_costs_of_a_stage_count_for_each_copy_of_it() -> None:
    schedule = build("dualpipe", ranks=2, microbatches=2)
    assert simulate(schedule, Costs([1, 2])) == simulate(schedule, Costs([1, 2, 1, 2]))


def test_what_is_left_out_is_as_much_as_another_cost() -> None:
    costs = Costs(activation=[3, 4], buffer=0.5)
    for name, other in (
        ("held_for_weight", "activation"),
        ("held_in_forward", "activation"),
        ("held_in_backward", "activation"),
        ("recomputed", "forward"),
        ("sent", "buffer"),
    ):
        assert costs.rows(name, loop(2), 3) == costs.rows(other, loop(2), 3)
    assert Costs(sent=0.25, buffer=1).rows("sent", loop(2), 1) == [[0.25], [0.25]]


@pytest.mark.parametrize(("costs", "counts"), [
    (Costs(), False), (Costs(buffer=[0, [0.0, 0]], sent=0), False), (Costs(buffer=[0, [0, 1]]), True),
    (Costs(sent=1), True),
])  # fmt: skip
def test_buffers_count_where_one_holds_something(costs: Costs, counts: bool) -> None:
    assert costs.counts_buffers == counts


@pytest.mark.parametrize("name", ["gather", "reduction"])
def test_what_a_stage_does_once_a_step_is_one_number_a_stage(name: str) -> None:
    once: Any = {name: [1, 2]}
    assert Costs(**once).of_stages(name, loop(2)) == [1, 2]
    wrong: Any = {name: [[1, 1], [2, 2]]}
    with refuses(ConfigError, rule="cost is finite"):
        Costs(**wrong)
