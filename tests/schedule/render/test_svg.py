import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.schedule import Costs, Schedule, Timeline, build, render, simulate
from support.drawn import COPIES, REDUCED, SECONDS, SPLIT, jittered


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def words(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in elements(svg, "text")]


def titled(svg: str) -> dict[ElementTree.Element, str]:
    """What has a tooltip: ops and waits."""
    rects = elements(svg, "rect")
    return {rect: title.text or "" for rect in rects for title in rect}


def waits(svg: str) -> dict[ElementTree.Element, str]:
    return {rect: text for rect, text in titled(svg).items() if rect.get("class") in ("peer", "wire")}


def ops(svg: str) -> dict[ElementTree.Element, str]:
    return {rect: text for rect, text in titled(svg).items() if rect.get("class") not in ("peer", "wire")}


def op_titles(svg: str) -> list[str]:
    return [*ops(svg).values()]


def svg_of(drawn: Schedule | Timeline, folder: Path, **options: object) -> str:
    return render(drawn, folder / "drawing.svg", **options)  # type: ignore[arg-type]


def test_the_picture_has_a_rectangle_an_op(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    svg = svg_of(schedule, tmp_path)
    card, rows, drawn = 1, 4, 4 * 8 * 2
    legend = 2 + 2 + 2  # two shades of each kind, idle, and waiting for a peer
    assert len(elements(svg, "rect")) == card + rows + drawn + len(waits(svg)) + legend
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
    assert {
        "forward",
        "backward",
        "idle",
        "makespan 33, bubble 27.3%, 15.8% between first and last op · peer 13.6%, outside 13.6%",
    } <= set(said)


def test_ops_lie_side_by_side_within_their_row(tmp_path: Path) -> None:
    svg = svg_of(build("gpipe", ranks=3, microbatches=5), tmp_path)
    boxes = [
        (float(rect.get("y", "")), float(rect.get("x", "")), float(rect.get("width", "")))
        for rect in ops(svg)
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
    assert "light to dark: the rank's stages in order" in said
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


def test_halves_of_a_backward_have_colours_and_names_of_their_own(tmp_path: Path) -> None:
    svg = svg_of(SPLIT, tmp_path)
    kinds = {(rect.get("class") or "")[0] for rect in ops(svg)}
    assert kinds == {"F", "I", "W"}
    said = words(svg)
    assert {"forward", "input gradient", "weight gradient", "idle"} <= set(said)
    assert not {"backward", "to overlap"} & set(said)
    assert "makespan 7, bubble 14.3%, 7.7% between first and last op · peer 7.1%, outside 7.1%" in said


def test_an_outline_joins_what_is_to_overlap(tmp_path: Path) -> None:
    svg = svg_of(COPIES, tmp_path)
    boxes = {
        (title.text or "").split(",")[0]: rect
        for rect in elements(svg, "rect")
        for title in rect
    }  # fmt: skip
    outlines = [rect for rect in elements(svg, "rect") if rect.get("class") == "pair"]
    assert len(outlines) == len(COPIES.overlaps) + 1  # and in the legend
    assert "to overlap" in words(svg)
    for pair, outline in zip(sorted(COPIES.overlaps), outlines[:-1], strict=True):
        left, right = boxes[str(pair.forward)], boxes[str(pair.backward)]
        assert float(outline.get("x", "")) == pytest.approx(float(left.get("x", "")), abs=1)
        end = float(right.get("x", "")) + float(right.get("width", ""))
        outlined = float(outline.get("x", "")) + float(outline.get("width", ""))
        assert outlined == pytest.approx(end, abs=1)
        assert 0 < float(left.get("y", "")) - float(outline.get("y", "")) < 3


def test_copies_of_the_model_are_told_apart(tmp_path: Path) -> None:
    svg = svg_of(COPIES, tmp_path)
    shades = {(title.text or "")[:2]: rect.get("class") for rect in elements(svg, "rect") for title in rect}
    assert (shades["0F"], shades["1F"], shades["2F"], shades["3F"]) == ("F0", "F0", "F1000", "F1000")
    assert "light to dark: the copies of the model" in words(svg)


def test_waits_are_shaded_by_what_they_were_for(tmp_path: Path) -> None:
    """Rank 0 stands from 1 on for 1B0, which ends at 4.5 and is there at 5; the step ends at 7."""
    svg = svg_of(simulate(build("gpipe", ranks=2, microbatches=1), Costs(communication=0.5)), tmp_path)
    drawn = {rect.get("class"): (rect, text) for rect, text in waits(svg).items()}
    assert {style: text for style, (_, text) in drawn.items()} == {
        "peer": "3.5 waiting for another rank to compute, for 0B0",
        "wire": "0.5 waiting for what is on its way, for 0B0",
    }
    for style, (start, end) in {"peer": (1, 4.5), "wire": (4.5, 5)}.items():
        x, width = (float(drawn[style][0].get(name, "")) for name in ("x", "width"))
        assert x == pytest.approx(84 + start * 748 / 7, abs=1)
        assert x + width == pytest.approx(84 + end * 748 / 7, abs=1)
    said = words(svg)
    assert {"waiting for another rank to compute", "waiting for what is on its way"} <= set(said)
    assert any("peer 25.0%, wire 3.6%, outside 28.6%" in text for text in said)


def test_reductions_have_a_colour_and_a_letter(tmp_path: Path) -> None:
    svg = svg_of(REDUCED, tmp_path)
    drawn = {rect: text for rect, text in titled(svg).items() if rect.get("class") == "reduce"}
    assert [*drawn.values()] == [
        "reducing gradients across data-parallel ranks, those of stage 0, 6 to 8",
        "reducing gradients across data-parallel ranks, those of stage 1, 4 to 5",
    ]
    for rect, (start, end) in zip(drawn, ((6, 8), (4, 5)), strict=True):
        x, width = (float(rect.get(name, "")) for name in ("x", "width"))
        assert x == pytest.approx(84 + start * 748 / 8, abs=1)
        assert x + width == pytest.approx(84 + end * 748 / 8, abs=1)
    said = words(svg)
    assert said.count("R") == 2
    assert "reducing gradients across data-parallel ranks" in said
    assert any("peer 18.8%, reduce 18.8%, outside 25.0%" in text for text in said)


def test_a_pipeline_without_other_axes_has_no_word_of_reductions(tmp_path: Path) -> None:
    for ending in ("svg", "txt", "html", "json"):
        text = render(simulate(SPLIT), tmp_path / f"drawing.{ending}")
        assert "summing gradients" not in text.split('<script type="application/json"')[0], ending


def test_the_legend_tells_only_of_waits_that_there_are(tmp_path: Path) -> None:
    measured = jittered(simulate(build("1f1b", ranks=2, microbatches=4), SECONDS), seed=1)
    assert not re.search("waiting|peer", " ".join(words(svg_of(measured, tmp_path))))
    assert "on its way" not in " ".join(words(svg_of(SPLIT, tmp_path)))
