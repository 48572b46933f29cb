import re
from dataclasses import replace
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


def titled(svg: str, *, waits: bool) -> dict[ElementTree.Element, str]:
    """What has a tooltip: ops, or else waits and reductions."""
    rects = elements(svg, "rect")
    kinds = ("peer", "wire", "reduce")
    return {r: title.text or "" for r in rects for title in r if (r.get("class") in kinds) == waits}


def extent(rect: ElementTree.Element) -> tuple[float, float]:
    x, width = (float(rect.get(name, "")) for name in ("x", "width"))
    return x, x + width


def drawn_at(makespan: float, *times: float) -> object:
    """The extent on the time axis, to a pixel."""
    return pytest.approx(tuple(84 + time * 748 / makespan for time in times), abs=1)


def svg_of(drawn: Schedule | Timeline, folder: Path, **options: object) -> str:
    return render(drawn, folder / "drawing.svg", **options)  # type: ignore[arg-type]


def test_the_picture_has_a_rectangle_an_op(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=4, microbatches=8)
    svg = svg_of(schedule, tmp_path)
    card, rows, drawn = 1, 4, 4 * 8 * 2
    legend = 2 + 2 + 2  # two shades of each kind, idle, and waiting for a peer
    assert len(elements(svg, "rect")) == card + rows + drawn + len(titled(svg, waits=True)) + legend
    assert [*titled(svg, waits=False).values()] == [
        f"{span.op}, {span.start:.0f} to {span.end:.0f}" for span in simulate(schedule).spans
    ]


def test_the_picture_gives_bubble_and_peak_of_each_rank(tmp_path: Path) -> None:
    said = words(svg_of(build("1f1b", ranks=4, microbatches=8), tmp_path))
    assert said[0] == "1f1b: 4 ranks, 8 microbatches"
    assert said.count("27.3%") == 4
    at = said.index("rank 0")
    assert said[at : at + 18] == ["rank 0", *"0123041526374567", "27.3%"]
    assert said[at + 18] == "4"
    summary = "makespan 33, bubble 27.3%, 15.8% between first and last op · peer 13.6%, outside 13.6%"
    assert {"forward", "backward", "idle", summary} <= set(said)


def test_ops_lie_side_by_side_within_their_row(tmp_path: Path) -> None:
    svg = svg_of(build("gpipe", ranks=3, microbatches=5), tmp_path)
    boxes = [(float(rect.get("y", "")), *extent(rect)) for rect in titled(svg, waits=False)]
    assert len({y for y, _, _ in boxes}) == 3
    for (y, _, end), (next_y, next_start, _) in pairwise(boxes):
        assert y < next_y or end <= next_start
    assert all(start >= 84 and end <= 832 for _, start, end in boxes)


def test_labels_that_do_not_fit_are_dropped(tmp_path: Path) -> None:
    schedule = build("1f1b", ranks=16, microbatches=64)
    svg = svg_of(schedule, tmp_path)
    assert len(titled(svg, waits=False)) == 16 * 64 * 2
    assert not [text for text in elements(svg, "text") if "op" in (text.get("class") or "").split()]


def test_each_stage_of_a_rank_has_its_shade(tmp_path: Path) -> None:
    svg = svg_of(build("inference", ranks=2, microbatches=2, stages_per_rank=3), tmp_path)
    shades = {text[0]: rect.get("class") for rect, text in titled(svg, waits=False).items()}
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
    kinds = {(rect.get("class") or "")[0] for rect in titled(svg, waits=False)}
    assert kinds == {"F", "I", "W"}
    said = words(svg)
    assert {"forward", "input gradient", "weight gradient", "idle"} <= set(said)
    assert not {"backward", "to overlap"} & set(said)
    assert "makespan 7, bubble 14.3%, 7.7% between first and last op · peer 7.1%, outside 7.1%" in said


def test_an_outline_joins_what_is_to_overlap(tmp_path: Path) -> None:
    svg = svg_of(COPIES, tmp_path)
    boxes = {text.split(",")[0]: rect for rect, text in titled(svg, waits=False).items()}
    outlines = [rect for rect in elements(svg, "rect") if rect.get("class") == "pair"]
    assert len(outlines) == len(COPIES.overlaps) + 1  # and in the legend
    assert "to overlap" in words(svg)
    for pair, outline in zip(sorted(COPIES.overlaps), outlines[:-1], strict=True):
        left, right = boxes[str(pair.forward)], boxes[str(pair.backward)]
        assert extent(outline) == pytest.approx((extent(left)[0], extent(right)[1]), abs=1)
        assert 0 < float(left.get("y", "")) - float(outline.get("y", "")) < 3


def test_copies_of_the_model_have_different_shades(tmp_path: Path) -> None:
    svg = svg_of(COPIES, tmp_path)
    shades = {text[:2]: rect.get("class") for rect, text in titled(svg, waits=False).items()}
    assert (shades["0F"], shades["1F"], shades["2F"], shades["3F"]) == ("F0", "F0", "F1000", "F1000")
    assert "light to dark: the copies of the model" in words(svg)


def test_waits_are_shaded_by_what_they_were_for(tmp_path: Path) -> None:
    """Rank 0 stands from 1 on for 1B0, which ends at 4.5 and is there at 5; the step ends at 7."""
    svg = svg_of(simulate(build("gpipe", ranks=2, microbatches=1), Costs(communication=0.5)), tmp_path)
    assert [(rect.get("class"), text, extent(rect)) for rect, text in titled(svg, waits=True).items()] == [
        ("peer", "3.5 waiting for another rank to compute, for 0B0", drawn_at(7, 1, 4.5)),
        ("wire", "0.5 waiting for what is on its way, for 0B0", drawn_at(7, 4.5, 5)),
    ]
    said = words(svg)
    assert {"waiting for another rank to compute", "waiting for what is on its way"} <= set(said)
    assert any("peer 25.0%, wire 3.6%, outside 28.6%" in text for text in said)


def test_reductions_have_a_colour_and_a_letter(tmp_path: Path) -> None:
    svg = svg_of(REDUCED, tmp_path)
    boxes = titled(svg, waits=True).items()
    assert [(text, extent(rect)) for rect, text in boxes if rect.get("class") == "reduce"] == [
        ("reducing gradients across data-parallel ranks, those of stage 0, 6 to 8", drawn_at(8, 6, 8)),
        ("reducing gradients across data-parallel ranks, those of stage 1, 4 to 5", drawn_at(8, 4, 5)),
    ]
    said = words(svg)
    assert said.count("R") == 2
    assert "reducing gradients across data-parallel ranks" in said
    assert any("peer 18.8%, reduce 18.8%, outside 25.0%" in text for text in said)


def test_a_pipeline_without_other_axes_has_no_word_of_reductions(tmp_path: Path) -> None:
    for ending in ("svg", "txt", "html", "json"):
        text = render(simulate(SPLIT), tmp_path / f"drawing.{ending}")
        assert "reducing gradients" not in text.split('<script type="application/json"')[0], ending


def test_the_legend_lists_only_waits_that_there_are(tmp_path: Path) -> None:
    measured = jittered(simulate(build("1f1b", ranks=2, microbatches=4), SECONDS), seed=1)
    assert not re.search("waiting|peer", " ".join(words(svg_of(measured, tmp_path))))
    assert "on its way" not in " ".join(words(svg_of(SPLIT, tmp_path)))


def test_the_host_stands_in_a_line_of_its_own(tmp_path: Path) -> None:
    """The heading has no room for it: with the parts of the bubble it would run into the column behind it."""
    timeline = simulate(build("1f1b", ranks=2, microbatches=3), Costs())
    svg = svg_of(replace(timeline, host_bound=(6.0, 1.2)), tmp_path)
    heights = {text.text: float(text.attrib["y"]) for text in elements(svg, "text")}
    assert heights["bubble"] < heights["the host is the limit: 30.0%"] < heights["rank 0"] - 10
    assert "host" not in svg_of(timeline, tmp_path)
