import re
from dataclasses import replace

import pytest

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
    render,
    simulate,
)
from support.drawn import COPIES, REDUCED, SECONDS, SPLIT, jittered


def test_golden_text() -> None:
    assert render(build("1f1b", ranks=2, microbatches=3)) == (
        "1f1b: 2 ranks, 3 microbatches\n"
        "\n"
        "rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2\n"
        "rank 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .\n"
        "\n"
        "makespan 12, bubble 25.0%, 14.3% between first and last op; a column is 1\n"
        "rank           0      1\n"
        "bubble     25.0%  25.0%\n"
        "  peer     25.0%   0.0%\n"
        "  outside   0.0%  25.0%\n"
        "peak live      2      1\n"
    )


def test_golden_text_of_a_prediction_above_a_measurement() -> None:
    schedule = build("gpipe", ranks=2, microbatches=1)
    predicted = simulate(schedule, Costs(0.01, 0.01, 0.01))
    measured = simulate(schedule, Costs(0.01, 0.01, 0.01, communication=0.01))
    assert render(measured, predicted=predicted) == (
        "gpipe: 2 ranks, 1 microbatch\n"
        "\n"
        "predicted\n"
        "rank 0 | F0 .  .  .  B0 B0\n"
        "rank 1 | .  F0 B0 B0 .  .\n"
        "\n"
        "makespan 60 ms, bubble 50.0%, 33.3% between first and last op; a column is 10 ms\n"
        "rank           0      1\n"
        "bubble     50.0%  50.0%\n"
        "  peer     50.0%   0.0%\n"
        "  outside   0.0%  50.0%\n"
        "peak live      1      1\n"
        "\n"
        "measured\n"
        "rank 0 | F0 .  .  .  .  .  B0 B0\n"
        "rank 1 | .  .  F0 B0 B0 .  .  .\n"
        "\n"
        "makespan 80 ms, bubble 62.5%, 45.5% between first and last op; a column is 10 ms\n"
        "rank           0      1\n"
        "bubble     62.5%  62.5%\n"
        "  peer     50.0%   0.0%\n"
        "  wire     12.5%   0.0%\n"
        "  outside   0.0%  62.5%\n"
        "peak live      1      1\n"
    )


def test_golden_text_of_reductions() -> None:
    assert render(REDUCED) == (
        "gpipe: 2 ranks, 1 microbatch\n"
        "\n"
        "rank 0 | F0 .  .  .  B0 B0 R  R\n"
        "rank 1 | .  F0 B0 B0 R  .  .  .\n"
        "\n"
        "makespan 8, bubble 62.5%, 50.0% between first and last op; a column is 1; "
        "R: reducing gradients across data-parallel ranks\n"
        "rank           0      1\n"
        "bubble     62.5%  62.5%\n"
        "  peer     37.5%   0.0%\n"
        "  reduce   25.0%  12.5%\n"
        "  outside   0.0%  50.0%\n"
        "peak live      1      1\n"
    )


@pytest.mark.parametrize("length", [0.0, 0.01, 0.4])
def test_a_short_reduction_is_shown_all_the_same(length: float) -> None:
    reductions = (Reduction(0, 0, 6, 6 + length), Reduction(1, 1, 4, 4 + length))
    rows = render(replace(REDUCED, reductions=reductions)).splitlines()
    assert rows[3].startswith("rank 1 | .  F0 B0 B0 R  .")
    assert rows[2].count("R") == (length > 0)  # of no time at all, none is left at the end of the step


def test_two_digit_microbatches_widen_the_columns() -> None:
    rows = render(build("inference", ranks=1, microbatches=11)).splitlines()
    assert rows[2] == "rank 0 | F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10"


@pytest.mark.parametrize("schedule", [
    build("inference", ranks=2, microbatches=1, stages_per_rank=2),
    Schedule("mine", Placement((1, 0)), 1, ((Op(1, "F", 0),), (Op(0, "F", 0),))),
])  # fmt: skip
def test_ops_are_written_in_full_where_the_rank_does_not_imply_their_stage(schedule: Schedule) -> None:
    text = render(schedule)
    assert all(str(op) in text for program in schedule.programs for op in program)


def test_costs_without_a_common_measure_are_rounded_to_columns_of_the_shortest_op() -> None:
    predicted = simulate(build("1f1b", ranks=4, microbatches=8), SECONDS)
    text = render(jittered(predicted, seed=0), predicted=predicted)
    for label in (f"{kind}{i}" for kind in "FB" for i in range(8)):
        assert len(re.findall(rf"\b{label}\b", text)) >= 2 * 4  # on each of four ranks, in both panels
    assert max(map(len, text.splitlines())) <= 120


def test_a_long_step_goes_on_below_and_is_cut_in_the_middle_with_a_note() -> None:
    text = render(build("1f1b", ranks=4, microbatches=64))
    assert max(map(len, text.splitlines())) <= 120
    assert re.findall("from time (\\d+)\n", text) == ["0", "28", "173"]
    note = "... 117 columns are left out here, from time 56 to 173; a drawing that ends in .html shows all"
    assert note in text
    assert "B63 B63" in text
    assert "left out" not in render(build("1f1b", ranks=4, microbatches=16))


def test_an_op_far_longer_than_the_others_fills_no_memory() -> None:
    spans = (Span(0, Op(0, "F", 0), 0, 1e-6), Span(0, Op(0, "F", 1), 1e6, 1e6 + 1e-6))
    assert len(render(Timeline("mine", 1, spans, (0,)))) < 2000


def test_golden_text_of_split_backwards() -> None:
    assert render(SPLIT).splitlines()[2:6] == [
        "rank 0 | F0 F1 .  I0 W0 I1 W1",
        "rank 1 | .  F0 I0 F1 I1 W0 W1",
        "",
        "makespan 7, bubble 14.3%, 7.7% between first and last op; a column is 1",
    ]


def test_golden_text_of_two_copies() -> None:
    assert render(COPIES).splitlines()[2:4] == [
        "rank 0 | 0F0 3F1 0F2 3B1 3B1 0B0 0B0 3F3 3B3 3B3 0B2 0B2",
        "rank 1 | 2F1 1F0 2F3 1B0 1B0 2B1 2B1 1F2 1B2 1B2 2B3 2B3",
    ]


def test_the_bubble_between_first_and_last_op_is_shown_only_where_it_differs() -> None:
    assert "makespan 6, bubble 0.0%; a" in render(build("gpipe", ranks=1, microbatches=2))


def test_what_nobody_took_note_of_has_no_row() -> None:
    text = render(jittered(simulate(build("1f1b", ranks=2, microbatches=3), SECONDS), seed=0))
    assert not re.search("peer|wire|runtime|outside", text)


def test_the_runtimes_own_time_has_a_row() -> None:
    spans = (Span(0, Op(0, "F", 0), 0, 1), Span(1, Op(1, "F", 0), 2, 3), Span(1, Op(1, "F", 1), 6, 7))
    timeline = Timeline("mine", 2, spans, (0, 0), waits=(Wait(1, Op(1, "F", 1), 3, 5, 3.5),))
    rows = [line.split() for line in render(timeline).splitlines()]
    assert ["peer", "0.0%", "7.1%"] in rows
    assert ["wire", "0.0%", "21.4%"] in rows
    assert ["runtime", "0.0%", "14.3%"] in rows
    assert ["outside", "85.7%", "28.6%"] in rows


def test_the_host_has_a_row_and_a_word_where_it_is_known() -> None:
    timeline = simulate(build("1f1b", ranks=2, microbatches=3), Costs())
    text = render(replace(timeline, host_bound=(6.0, 1.2)))
    assert "between first and last op, the host is the limit: 30.0%; a column is 1\n" in text
    assert ["host", "50.0%", "10.0%"] in [line.split() for line in text.splitlines()]
    assert "host" not in render(timeline)
