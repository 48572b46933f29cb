import random
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import Costs, Op, Placement, Schedule, Span, Timeline, build, loop, render, simulate

SECONDS = Costs(forward=0.02, input_grad=0.02, weight_grad=0.02, communication=0.0005)


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def words(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in elements(svg, "text")]


def op_titles(svg: str) -> list[str]:
    """The tooltips of the ops, without the picture's own title."""
    return [title.text or "" for title in elements(svg, "title")][1:]


def jittered(timeline: Timeline, seed: int) -> Timeline:
    """The same step, begun at 1000 and stretched a little, with ops that are a little shorter."""
    chance = random.Random(seed)
    spans = [
        span._replace(
            start=1000 + 1.05 * span.start,
            end=1000 + 1.05 * span.start + (span.end - span.start) * chance.uniform(0.9, 1),
        )
        for span in timeline.spans
    ]
    return Timeline(timeline.name, timeline.ranks, tuple(spans), timeline.peak_live)


def test_golden_text() -> None:
    assert render(build("1f1b", ranks=2, microbatches=3)) == (
        "1f1b: 2 ranks, 3 microbatches\n"
        "\n"
        "rank 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2\n"
        "rank 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .\n"
        "\n"
        "makespan 12, bubble 25.0%; a column is 1\n"
        "rank           0      1\n"
        "bubble     25.0%  25.0%\n"
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
        "makespan 60 ms, bubble 50.0%; a column is 10 ms\n"
        "rank           0      1\n"
        "bubble     50.0%  50.0%\n"
        "peak live      1      1\n"
        "\n"
        "measured\n"
        "rank 0 | F0 .  .  .  .  .  B0 B0\n"
        "rank 1 | .  .  F0 B0 B0 .  .  .\n"
        "\n"
        "makespan 80 ms, bubble 62.5%; a column is 10 ms\n"
        "rank           0      1\n"
        "bubble     62.5%  62.5%\n"
        "peak live      1      1\n"
    )


def test_two_digit_microbatches_widen_the_columns() -> None:
    rows = render(build("inference", ranks=1, microbatches=11)).splitlines()
    assert rows[2] == "rank 0 | F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10"


@pytest.mark.parametrize("schedule", [
    build("inference", ranks=2, microbatches=1, stages_per_rank=2),
    Schedule("mine", Placement((1, 0)), 1, ((Op(1, "F", 0),), (Op(0, "F", 0),))),
])  # fmt: skip
def test_ops_are_written_in_full_where_the_rank_does_not_tell_their_stage(schedule: Schedule) -> None:
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
    note = "... 117 columns are left out here, from time 56 to 173; a drawing that ends in .svg shows all"
    assert note in text
    assert "B63 B63" in text
    assert "left out" not in render(build("1f1b", ranks=4, microbatches=16))


def test_an_op_far_longer_than_the_others_fills_no_memory() -> None:
    spans = (Span(0, Op(0, "F", 0), 0, 1e-6), Span(0, Op(0, "F", 1), 1e6, 1e6 + 1e-6))
    assert len(render(Timeline("mine", 1, spans, (0,)))) < 2000


@pytest.mark.parametrize("ending", [".txt", ".svg"])
def test_a_step_without_length_is_drawn_too(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"drawing{ending}"
    for timeline in (
        Timeline("mine", 2, (), (0, 0)),
        simulate(build("gpipe", ranks=2, microbatches=2), Costs(0, 0, 0)),
    ):
        assert "makespan 0" in render(timeline, path)


@pytest.mark.parametrize("ending", [".txt", ".svg", ".SVG"])
def test_what_is_returned_is_what_is_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"drawing{ending}"
    result = render(build("gpipe", ranks=2, microbatches=2), path)
    assert path.read_text(encoding="utf-8") == result
    assert result.startswith("<svg" if ending.lower() == ".svg" else "gpipe: 2 ranks")
    assert render(build("gpipe", ranks=2, microbatches=2), str(path)) == result


@pytest.mark.parametrize(("name", "ending"), [("drawing.png", ".png"), ("drawing", "no ending")])
def test_another_ending_is_refused(tmp_path: Path, name: str, ending: str) -> None:
    with pytest.raises(ConfigError, match=f"{ending} chooses none") as caught:
        render(build("gpipe", ranks=2, microbatches=2), tmp_path / name)
    assert caught.value.value == f"drawing {str(tmp_path / name)!r}"
    assert caught.value.remedy == "End the path in one of .txt, .svg"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        render(build("gpipe", ranks=2, microbatches=2), tmp_path / "nowhere" / "drawing.svg")


def test_a_schedule_that_would_hang_is_not_drawn() -> None:
    with pytest.raises(ScheduleError):
        render(Schedule("mine", loop(1), 1, ((Op(0, "B", 0), Op(0, "F", 0)),)))


def svg_of(drawn: Schedule | Timeline, folder: Path, **options: object) -> str:
    return render(drawn, folder / "drawing.svg", **options)  # type: ignore[arg-type]


def test_the_picture_has_a_rectangle_an_op(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    svg = svg_of(schedule, tmp_path)
    card, rows, ops = 1, 4, 4 * 8 * 2
    legend = 2 + 2 + 1  # two shades of each kind, and idle
    assert len(elements(svg, "rect")) == card + rows + ops + legend
    assert op_titles(svg) == [
        f"{span.op}, {span.start:.0f} to {span.end:.0f}" for span in simulate(schedule).spans
    ]


def test_the_picture_tells_bubble_and_peak_of_each_rank(tmp_path: Path) -> None:
    said = words(svg_of(build("1f1b", ranks=4, microbatches=8), tmp_path))
    assert said[0] == "1f1b: 4 ranks, 8 microbatches"
    assert said.count("27.3%") == 4
    at = said.index("rank 0")
    assert said[at : at + 18] == ["rank 0", *"0123041526374567", "27.3%"]
    assert said[at + 18] == "4"
    assert {"forward", "backward", "idle", "makespan 33, bubble 27.3%"} <= set(said)


def test_ops_lie_side_by_side_within_their_row(tmp_path: Path) -> None:
    svg = svg_of(build("gpipe", ranks=3, microbatches=5), tmp_path)
    boxes = [
        (float(rect.get("y", "")), float(rect.get("x", "")), float(rect.get("width", "")))
        for rect in elements(svg, "rect")
        if rect.find("{http://www.w3.org/2000/svg}title") is not None
    ]
    assert len({y for y, _, _ in boxes}) == 3
    for (y, x, width), (next_y, next_x, _) in pairwise(boxes):
        assert y < next_y or x + width <= next_x
    assert all(x >= 84 and x + width <= 832 for _, x, width in boxes)


def test_labels_that_do_not_fit_are_dropped(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=16, microbatches=64)
    svg = svg_of(schedule, tmp_path)
    assert len(op_titles(svg)) == 16 * 64 * 2
    assert not [text for text in elements(svg, "text") if "op" in (text.get("class") or "").split()]


def test_each_stage_of_a_rank_has_its_shade(tmp_path: Path) -> None:
    svg = svg_of(build("inference", ranks=2, microbatches=2, stages_per_rank=3), tmp_path)
    shades = {
        title.text[0]: rect.get("class")
        for rect in elements(svg, "rect")
        for title in rect
        if title.text is not None
    }
    assert shades == {"0": "F0", "1": "F0", "2": "F500", "3": "F500", "4": "F1000", "5": "F1000"}
    said = words(svg)
    assert "forward, first to last stage of the rank" in said
    assert "backward" not in " ".join(said)


def test_two_panels_share_one_scale(tmp_path: Path) -> None:
    predicted = simulate(build("1f1b", ranks=2, microbatches=4), SECONDS)
    svg = svg_of(jittered(predicted, seed=1), tmp_path, predicted=predicted)
    said = words(svg)
    assert [text.split()[0] for text in said if "makespan" in text] == ["predicted", "measured"]
    ticks = [
        sorted(path.get("d", "").split(" ")[0] for path in elements(svg, "path"))[at::2] for at in (0, 1)
    ]
    assert ticks[0] == ticks[1]
    assert "time, ms" in said
    idle = [float(rect.get("width", "")) for rect in elements(svg, "rect") if rect.get("class") == "idle"]
    assert idle[0] == idle[1] < idle[2] == idle[3]


def test_the_unit_is_shown(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", ranks=1, microbatches=1), Costs(0.5, 0.5, 0.5))
    assert "makespan 1.5, " in render(timeline)
    assert "makespan 1.5 s, " in render(timeline, unit="s")
    assert "makespan 1.5 ticks, " in render(timeline, unit="ticks")
    assert "makespan 1.5, " in render(timeline, predicted=timeline, unit="")
    tiny = simulate(build("gpipe", ranks=1, microbatches=1), Costs(5e-6, 5e-6, 5e-6))
    assert "0F0, 0 µs to 5 µs" in op_titles(svg_of(tiny, tmp_path, unit="s"))


def test_text_is_escaped(tmp_path: Path) -> None:
    title = "<script> & \"quotes\" 'too'"
    svg = svg_of(build("gpipe", ranks=1, microbatches=1), tmp_path, title=title, unit="<b>&")
    assert "<script>" not in svg
    assert "<b>" not in svg
    assert words(svg)[0] == title
    assert "time, <b>&" in words(svg)


def test_the_picture_needs_nothing_from_outside(tmp_path: Path) -> None:
    svg = svg_of(build("gpipe", ranks=2, microbatches=2), tmp_path)
    assert not re.search(r"href|url\(|@import|<script", svg)
