"""The page of a run: what it shows of whole runs and of broken ones; no text of a run is code in it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.schedule import Costs, DeviceTime, build, simulate
from penstock.schedule.simulation.timeline import Timeline
from penstock.train.preflight import preflight
from penstock.train.records.metrics import MetricsRow
from penstock.train.report.page import charts, page, report, seconds_by_part, state
from penstock.train.report.recorded import read_run
from penstock.train.run import run
from schedule.render.test_page import Page
from support.recorded_runs import CONFIG, html, row, write
from support.refusals import refuses
from support.tiny import config, metrics

EVIL = "</script><img src=x onerror=alert(1)>\"'"


WHOLE: tuple[MetricsRow, ...] = (
    {"step": 0, "held_out_loss": 5.5, "seconds": 1.0, "tokens": 64},
    row(1), row(2), row(3), row(4),
    {"step": 4, "held_out_loss": 1.25, "seconds": 1.0, "tokens": 64},
    {"step": 4, "checkpoint": "step-00000004", "seconds": 0.5},
)  # fmt: skip


def test_a_timeline_is_the_same_after_a_file() -> None:
    for name in ("1f1b", "dualpipe_v"):
        made = simulate(build(name, ranks=2, microbatches=4), Costs(communication=0.125))
        read = Timeline.from_data(json.loads(json.dumps(made.to_data())))
        assert (read.spans, read.peak_live, read.overlaps) == (made.spans, made.peak_live, made.overlaps)
        assert (read.waits, read.critical_path, read.bubble) == (made.waits, made.critical_path, made.bubble)
        on_gpu = replace(made, device=(DeviceTime(0, "F", 0.5),), host_bound=(0.25, 0.125))
        data = json.loads(json.dumps(on_gpu.to_data()))
        again = Timeline.from_data(data)
        assert (again.device, again.host_bound) == (on_gpu.device, on_gpu.host_bound)
        del data["device"], data["host_bound"]  # 0.5.0 did not write them
        assert Timeline.from_data(data) == read


def test_the_page_has_curves_timeline_memory_time_config_and_how_it_ended(tmp_path: Path) -> None:
    end = {"at": "2026-01-02T04:00:00+0000", "how": "finished", "why": ""}
    start = {"at": "2026-01-02T03:04:05+0000", "step": 0, "ranks": 2, "processes": 2, "end": end}
    text = html(write(tmp_path / "mine", *WHOLE, starts=[start]))
    parsed = Page(text)
    labels = [each["aria-label"] or "" for each in parsed.every("div") if each.get("class") == "frame"]
    assert [label.partition(",")[0].partition(".")[0] for label in labels] == [
        "Loss", "Gradient norm", "Learning rate", "Tokens a second", "Model TFLOP/s", "Bubble",
        "Peak memory",
    ]  # fmt: skip
    assert "process 1: from 3 at step 1" in labels[-1]
    assert "training: from 4 at step 1, to 1 at step 4, least 1 at step 4, most 4 at step 1" in labels[0]
    assert "held out: from 5.5 at step 0, to 1.25 at step 4" in labels[0]
    assert [panel["label"] for panel in json.loads(parsed.texts["drawing"])["panels"]] == [
        "predicted", "measured",
    ]  # fmt: skip
    cells = [[cell.strip() for cell in line] for line in parsed.cells]
    assert ["process 1", "3.00 GiB"] in cells
    assert ["step forwards and backwards", "4 s", "38.1%"] in cells  # of 8 s in steps, 2 and .5
    assert ["checkpoint waiting for checkpoints", "0.5 s", "4.8%"] in cells
    assert ["torch", "2.11"] in cells
    assert "schedule: 1f1b" in text
    assert "step 4 of 4, ended 2026-01-02 04:00" in text
    assert re.search(r'<span class="pill good">finished</span>', text)


def test_the_page_needs_nothing_from_outside_and_no_text_of_a_run_is_code(tmp_path: Path) -> None:
    spoilt = {**CONFIG, EVIL: EVIL, "train": {"steps": EVIL}}
    rows = [row(1, learning_rates={EVIL: 1e-3, "b": 1e-4}, seconds_by_part={EVIL: 1.0}, skipped=EVIL)]
    start = {"at": EVIL, "step": EVIL, "processes": EVIL, "end": {"how": EVIL, "why": EVIL, "at": EVIL}}
    about: dict[str, Any] = {"config": spoilt, "environment": {EVIL: EVIL}, "starts": [start]}
    folders = [write(tmp_path / name, *rows, **about) for name in ("a<b>", "c")]
    for text in (html(folders[0]), html(*folders)):
        parsed = Page(text)  # it closes all that it opens
        assert not parsed.every("img")
        assert len(parsed.every("script")) == 3  # the data, the timeline's and the charts'
        assert all("onerror" not in attributes for _, attributes in parsed.elements)
        assert not re.search(r"https?://|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
        policy = next(meta for meta in parsed.every("meta") if meta.get("http-equiv"))
        assert "default-src 'none'" in (policy["content"] or "")


def test_samples_are_shown_and_their_time_counts(tmp_path: Path) -> None:
    rows = [row(1), {"step": 1, "sample": "def <b>main</b>", "seconds": 0.5}]
    folder = write(tmp_path, *rows)
    assert ["1", "def <b>main</b>"] in [[cell.strip() for cell in line] for line in Page(html(folder)).cells]
    assert seconds_by_part(read_run(folder))["sample"] == 0.5


def test_parts_and_events_add_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    found = seconds_by_part(read_run(write(tmp_path, *WHOLE)))
    assert found == {
        "data": 1.0, "step": 4.0, "clip": 0.5, "optimizer": 2.0, "rest": 0.5, "evaluation": 2.0,
        "checkpoint": 0.5,
    }  # fmt: skip


def test_a_run_that_goes_on_shows_the_predicted_timeline_as_such(tmp_path: Path) -> None:
    text = html(write(tmp_path, row(1), '{"step": 2, "lo', timeline=False))
    assert "no end recorded" in text
    assert "it goes on, or was killed" in text
    assert "unreadable lines of metrics.jsonl: 1" in text
    assert "A prediction: the run has recorded no step yet." in text
    assert [panel["label"] for panel in json.loads(Page(text).texts["drawing"])["panels"]] == ["predicted"]


def test_losses_that_are_not_finite_leave_a_gap_and_are_said(tmp_path: Path) -> None:
    rows = [row(step, loss=None if step == 3 else 2.0, **({"skipped": "loss=nan"} if step == 3 else {}))
            for step in range(1, 6)]  # fmt: skip
    text = html(write(tmp_path, *rows, json.dumps(row(6, loss=float("nan"))), row(7, loss=2.0)))
    loss = next(figure for figure in text.split("<figure") if "<b>Loss</b>" in figure)
    (drawn,) = re.findall(r'class="line s0" data-label="training" d="([^"]*)"', loss)
    assert [len(part.split("L")) for part in drawn.split("M")[1:]] == [2, 2, 1]
    assert re.search(r'class="dots s0" d="M1000 500h0"', loss)  # the last one stands alone
    assert "2 not finite" in loss
    assert "steps skipped, for their loss or gradients: 1 (step 3)" in text


def test_several_runs_share_the_charts_and_what_differs_is_shown(tmp_path: Path) -> None:
    other = {**CONFIG, "train": {"steps": 9}}
    folders = [write(tmp_path / "a", *WHOLE), write(tmp_path / "b", *WHOLE, config=other)]
    text = html(*folders)
    drawn = {chart.title: [line.label for line in chart.lines] for chart in charts([*map(read_run, folders)])}
    for title in ("Loss", "Held-out loss", "Tokens a second", "Bubble", "Peak memory"):
        assert drawn[title] == ["a", "b"]
    assert ["train.steps", "4", "9"] in Page(text).cells
    assert [panel["label"] for panel in json.loads(Page(text).texts["drawing"])["panels"]] == ["a", "b"]
    assert "times the predicted step" not in text
    assert "<h1>a and b</h1>" in text


def test_the_memory_of_all_runs_is_in_one_table_and_one_chart(tmp_path: Path) -> None:
    gpus = [row(step, peak_allocated=[step * 2**30, 2**29, 2**30]) for step in (1, 2)]
    runs = [read_run(write(tmp_path / "a", *WHOLE)), read_run(write(tmp_path / "b", *gpus))]
    cells = [[cell.strip() for cell in line] for line in Page(page(runs)).cells]
    assert ["process", "a: host", "b: GPU, by tensors", "b: host"] in cells
    assert ["process 0", "1.00 GiB", "2.00 GiB", "1.00 GiB"] in cells
    assert ["process 2", "-", "1.00 GiB", "-"] in cells
    chart = next(chart for chart in charts(runs) if chart.title == "Peak memory")
    assert [(line.label, [*line.points]) for line in chart.lines] == [
        ("a", [(step, 3.0) for step in (1, 2, 3, 4)]), ("b", [(1, 1.0), (2, 2.0)]),
    ]  # fmt: skip
    assert chart.unit == "GiB of the host or GPUs, by tensors, of the process with the most"


def test_of_many_processes_the_chart_has_the_one_with_the_most_and_the_least(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, row(1, peak_resident=[2, 8, 4, 5, 6, 7, 1])))
    chart = next(chart for chart in charts([run]) if chart.title == "Peak memory")
    assert [line.label for line in chart.lines] == ["process 1", "process 6"]


def test_a_run_of_the_trainer_has_all_that_the_page_shows(tmp_path: Path) -> None:
    groups = [{"match": "norm", "learning_rate": 1e-3}]
    run(preflight(config(tmp_path, keys={"optimizer.groups": groups}, steps=2, checkpoint_every=1)))
    out = tmp_path / "out"
    found = read_run(out)
    assert state(found)[0] == "finished"
    first, second = (row for row in metrics(tmp_path) if "loss" in row)
    assert list(first["seconds_by_part"]) == ["data", "step", "clip", "optimizer"]
    assert sum(first["seconds_by_part"].values()) <= first["seconds"]
    assert first["learning_rates"] == {"adamw": 0, "norm": 0}  # of a warm-up
    assert second["learning_rates"] == {"adamw": 1e-2, "norm": 1e-3}
    kept = [row["checkpoint"] for row in metrics(tmp_path) if "checkpoint" in row]
    assert kept == ["step-00000001", "step-00000002"]
    timelines, said = found.timelines
    assert list(timelines) == ["predicted", "measured"]
    assert said == "Step 2, as the ranks recorded it."
    assert {str(span.op) for span in timelines["measured"].spans} >= {"0F0", "1F1", "1B1"}
    identity = found.about["id"]
    with refuses(ConfigError, "train.steps=2", "left to do"):
        preflight(config(tmp_path, keys={"optimizer.groups": groups}, steps=2), "newest")
    run(preflight(config(tmp_path, keys={"optimizer.groups": groups}, steps=3), "newest"))
    again = read_run(out)
    assert (again.about["id"], [start["step"] for start in again.starts]) == (identity, [0, 2])
    assert report([out]) == out / "report.html"
