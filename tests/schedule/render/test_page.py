"""The page's structure; what it does in a browser is checked by `make pictures`."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import Costs, Schedule, Timeline, build, render, simulate
from penstock.schedule.render.drawing import percent
from support.drawn import COPIES, REDUCED, SECONDS, SPLIT, jittered

VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """The elements of a page, closed in order, with their attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}  # by id
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.cells[-1][-1] += data
        name = self.elements[-1][1].get("id") if self.elements else None
        if name:
            self.texts[name] = self.texts.get(name, "") + data

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(drawn: Schedule | Timeline, folder: Path, **options: Any) -> str:
    return render(drawn, folder / "page.html", **options)


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(page).texts["drawing"])
    return data


def legend_of(page: str) -> str:
    return page.split('<div class="legend">')[1].split("</div>")[0]


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    text = page_of(COPIES, tmp_path)
    assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    page = Page(text)
    policy = next(meta for meta in page.every("meta") if meta.get("http-equiv"))
    assert "default-src 'none'" in (policy["content"] or "")
    assert [link["href"] for link in page.every("link")] == ["data:,"]
    assert all("src" not in script for script in page.every("script"))


def test_the_scripts_are_whole_and_in_order(tmp_path: Path) -> None:
    text = page_of(SPLIT, tmp_path)
    assert "$" + "script" not in text
    assert text.index("class View") < text.index("class Picture") < text.index("function hover")


def test_each_op_is_in_the_data(tmp_path: Path) -> None:
    timeline = simulate(COPIES)
    data = data_of(page_of(timeline, tmp_path))
    (panel,) = data["panels"]
    assert [
        (rank, f"{stage}{kind}{microbatch}", start, end)
        for rank, stage, kind, microbatch, start, end in zip(
            *(panel[name] for name in ("rank", "stage", "kind", "microbatch", "start", "end")), strict=True
        )
    ] == [(span.rank, str(span.op), span.start, span.end) for span in timeline.spans]
    names = [str(span.op) for span in timeline.spans]
    assert [names[at] for at in panel["critical"]] == [str(op) for op in timeline.critical_path]
    assert {(names[one], names[other]) for one, other in panel["pairs"]} == {
        (str(pair.forward), str(pair.backward)) for pair in COPIES.overlaps
    }
    assert data["held"] == "memory"
    assert panel["peaks"] == list(timeline.peak_memory)
    assert [max(held for _, held in curve) for curve in panel["curves"]] == panel["peaks"]
    assert all(0 <= shade < len(data["shades"]) for shade in panel["shade"])


def test_the_table_has_a_row_a_rank_and_one_for_all(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=3, microbatches=4))
    head, *rows = Page(page_of(timeline, tmp_path)).cells
    assert head == [
        "rank", "busy", "bubble", "between first and last op", "peak live", "peak memory", "peer", "outside",
    ]  # fmt: skip
    columns = [[idle.peer for idle in timeline.idle], [idle.outside for idle in timeline.idle]]
    parts = [[percent(column[rank] / 18) for column in columns] for rank in range(3)]
    whole = [percent(sum(column) / 54) for column in columns]
    assert rows == [
        [
            f"rank {rank}", f"{timeline.busy[rank]:.0f}", percent(timeline.rank_bubble[rank]),
            percent(timeline.rank_inner_bubble[rank]), str(timeline.peak_live[rank]), str(3 - rank),
            *parts[rank],
        ]
        for rank in range(3)
    ] + [
        ["all ranks", "36", percent(timeline.bubble), percent(timeline.inner_bubble), "3", "3", *whole]
    ]  # fmt: skip


def test_reductions_are_in_the_data_the_legend_and_the_table(tmp_path: Path) -> None:
    text = page_of(REDUCED, tmp_path)
    data = data_of(text)
    assert data["panels"][0]["reductions"] == [[0, 0, 6, 8], [1, 1, 4, 5]]
    assert data["panels"][0]["makespan"] == data["makespan"] == 8
    assert f'<i class="reduce" style="background:{data["reduction"]["fill"]}"></i>' in legend_of(text)
    head, first, second, whole = Page(text).cells
    at = head.index("reduce")
    assert [row[at] for row in (first, second, whole)] == ["25.0%", "12.5%", "18.8%"]


def test_ops_side_by_side_are_marked(tmp_path: Path) -> None:
    assert data_of(page_of(simulate(COPIES), tmp_path))["panels"][0]["sideBySide"] == []
    timeline = simulate(COPIES, Costs(2, 2, 2, exchange=1))
    (panel,) = data_of(page_of(timeline, tmp_path))["panels"]
    assert sorted(panel["sideBySide"]) == sorted(at for pair in panel["pairs"] for at in pair)


def test_predicted_and_measured_stand_side_by_side(tmp_path: Path) -> None:
    predicted = simulate(build("1f1b", ranks=2, microbatches=4), SECONDS)
    measured = jittered(predicted, seed=2)
    text = page_of(measured, tmp_path, predicted=predicted)
    page, data = Page(text), data_of(text)
    assert [panel["label"] for panel in data["panels"]] == ["predicted", "measured"]
    assert data["held"] == "live activations"  # the measured step's memory is not known
    assert data["makespan"] == measured.makespan
    assert data["unit"] == {"size": 1e-3, "name": "ms"}
    assert data["panels"][1]["start"][0] == 0
    assert len(page.every("canvas")) == 2
    first = page.cells[2]
    assert first[:5] == [
        "rank 0", "240 ms", f"{1e3 * measured.busy[0]:.1f} ms",
        percent(predicted.rank_bubble[0]), percent(measured.rank_bubble[0]),
    ]  # fmt: skip
    head = [name for name in page.cells[0][1:] for _ in data["panels"]]
    for unknown in ("peak memory", "wire"):
        assert [first[1 + at] for at, name in enumerate(head) if name == unknown][1] == "–"  # noqa: RUF001
    assert f"{measured.makespan / predicted.makespan:.3f} times the predicted step" in text


def test_canvases_and_buttons_are_labelled(tmp_path: Path) -> None:
    page = Page(page_of(SPLIT, tmp_path))
    (canvas,) = page.every("canvas")
    assert (canvas["role"], canvas["tabindex"]) == ("img", "0")
    assert "split: 2 ranks, 2 microbatches" in (canvas["aria-label"] or "")
    assert "bubble 14.3%" in (canvas["aria-label"] or "")
    assert all(button.get("title") for button in page.every("button"))


def test_the_legend_lists_the_kinds_present(tmp_path: Path) -> None:
    legend = legend_of(page_of(SPLIT, tmp_path))
    assert "input gradient" in legend
    assert "weight gradient" in legend
    assert ">backward" not in legend
    assert "to overlap" not in legend
    legend = legend_of(page_of(COPIES, tmp_path))
    assert "to overlap" in legend
    assert "light to dark: the copies of the model" in legend


@pytest.mark.parametrize(
    "title", ["</script><script>alert(1)</script>", "<!-- & \"quotes\" 'too'", "$data $$"]
)
def test_no_title_breaks_out(title: str, tmp_path: Path) -> None:
    plain = page_of(SPLIT, tmp_path, title="plain", unit="")
    text = page_of(SPLIT, tmp_path, title=title, unit="</script>")
    assert text.count("<script") == plain.count("<script")
    assert text.count("</script") == plain.count("</script")
    assert data_of(text)["title"] == title
    assert data_of(text)["unit"]["name"] == "</script>"
    label = Page(text).every("canvas")[0]["aria-label"] or ""
    assert label.startswith(f"{title}, timeline: makespan 7 </script>, bubble")


def test_thousands_of_ops_stay_small(tmp_path: Path) -> None:
    text = page_of(build("1f1b", ranks=8, microbatches=256), tmp_path)
    assert len(text) < 400_000


def test_waits_stand_with_the_op_that_they_were_for(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", ranks=2, microbatches=1), Costs(communication=0.5))
    text = page_of(timeline, tmp_path)
    (panel,) = data_of(text)["panels"]
    names = [str(span.op) for span in timeline.spans]
    assert [(names[at], *times) for at, *times in panel["waits"]] == [("0B0", 1, 4.5, 5)]
    assert "· peer 25.0%, wire 3.6%, outside 28.6%" in text
    assert 'class="peer"></i>waiting for another rank to compute' in legend_of(text)
    assert 'class="wire"></i>waiting for what is on its way' in legend_of(text)


def test_the_table_divides_the_time_in_ops_where_the_host_is_known(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", ranks=2, microbatches=3), Costs())
    measured = replace(timeline, host_bound=(6.0, 1.2))
    page = page_of(measured, tmp_path, predicted=timeline)
    assert "the host is the limit: 30.0%" in page
    assert re.findall(r">(device busy|host-bound|busy)</th>", page) == ["busy", "device busy", "host-bound"]
    total = page[page.index("<tfoot>") :]
    assert re.findall(r"<td>([^<]*)</td>", total)[:5] == ["18 s", "18 s", "&ndash;", "10.8 s", "&ndash;"]
    assert "30.0%" in total
    assert "host-bound" not in page_of(timeline, tmp_path)
