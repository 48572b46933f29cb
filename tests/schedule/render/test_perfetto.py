import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.schedule import Costs, Schedule, Timeline, build, render, simulate
from support.drawn import COPIES, REDUCED, SECONDS, SPLIT, jittered

# what https://ui.perfetto.dev needs of each kind of event
NEEDED: dict[str, dict[str, type]] = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "tid": int, "args": dict},
    "C": {"name": str, "ts": float, "args": dict},
    "s": {"name": str, "cat": str, "ts": float, "tid": int, "id": str},
    "f": {"name": str, "cat": str, "ts": float, "tid": int, "id": str, "bp": str},
}


def trace(drawn: Schedule | Timeline, folder: Path, **options: Any) -> list[dict[str, Any]]:
    whole = json.loads(render(drawn, folder / "trace.json", **options))
    assert whole.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = whole["traceEvents"]
    return events


def slices_of_ops(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in only(events, "X") if event["cat"] != "wait"]


def only(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


@pytest.mark.parametrize("schedule", [SPLIT, COPIES], ids=["split", "copies"])
def test_every_event_is_well_formed(schedule: Schedule, tmp_path: Path) -> None:
    for event in trace(schedule, tmp_path):
        assert isinstance(event["pid"], int)
        for name, kind in NEEDED[event["ph"]].items():
            assert isinstance(event[name], (int, float) if kind is float else kind), (name, event)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0


def test_a_slice_an_op(tmp_path: Path) -> None:
    slices = slices_of_ops(trace(SPLIT, tmp_path))
    timeline = simulate(SPLIT)
    assert [(e["tid"] - 1, e["name"], e["ts"], e["ts"] + e["dur"]) for e in slices] == [
        (span.rank, str(span.op), 1000 * span.start, 1000 * span.end) for span in timeline.spans
    ]
    last = slices[-1]
    assert (last["cat"], last["args"]) == (
        "weight gradient",
        {"stage": 1, "microbatch": 1, "kind": "weight gradient"},
    )


def test_ranks_are_named_and_in_order(tmp_path: Path) -> None:
    events = only(trace(SPLIT, tmp_path), "M")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert places == {1: 0, 2: 1}
    assert not names.keys() & {e["pid"] for e in events}  # or Perfetto takes one for the main thread


def test_arrows_lead_to_the_op_on_another_rank_that_waits(tmp_path: Path) -> None:
    events = trace(SPLIT, tmp_path)
    starts, ends = only(events, "s"), only(events, "f")

    def op_at(event: dict[str, Any]) -> str:
        return next(
            str(e["name"]) for e in only(events, "X")
            if e["tid"] == event["tid"] and e["ts"] <= event["ts"] < e["ts"] + e["dur"]
        )  # fmt: skip

    arrows = {one["id"]: op_at(one) for one in starts}
    assert {(arrows[end["id"]], op_at(end)) for end in ends} == {
        ("0F0", "1F0"), ("0F1", "1F1"), ("1I0", "0I0"), ("1I1", "0I1"),
    }  # fmt: skip
    assert len(starts) == len(ends) == 4
    assert all(one["ts"] <= end["ts"] for one, end in zip(starts, ends, strict=True))


def test_copies_of_the_model_do_not_feed_each_other(tmp_path: Path) -> None:
    arrows = only(trace(COPIES, tmp_path), "s")
    assert len(arrows) == 4 * 2  # a microbatch: forward once, backward once


def test_what_is_held_is_a_counter_a_rank(tmp_path: Path) -> None:
    counters = only(trace(build("1f1b", ranks=2, microbatches=3), tmp_path), "C")
    assert {e["name"] for e in counters} == {"rank 0: memory", "rank 1: memory"}
    assert [(e["ts"], e["args"]["memory"]) for e in counters if e["name"].startswith("rank 1")][:3] == [
        (1000, 1), (4000, 1), (7000, 1),
    ]  # fmt: skip
    measured = jittered(simulate(build("gpipe", ranks=2, microbatches=3)), seed=0)
    live = only(trace(measured, tmp_path), "C")
    assert max(e["args"]["live activations"] for e in live) == 3


def test_each_panel_is_a_process_that_begins_at_zero(tmp_path: Path) -> None:
    predicted = simulate(build("1f1b", ranks=2, microbatches=4), SECONDS)
    events = trace(jittered(predicted, seed=1), tmp_path, predicted=predicted)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["measured", "predicted"]
    for process in names:
        slices = [e for e in slices_of_ops(events) if e["pid"] == process]
        assert min(e["ts"] for e in slices) == 0
        assert max(e["dur"] for e in slices) == pytest.approx(40_000, rel=0.11)  # 40 ms, in microseconds
    assert set(Counter(e["id"] for e in only(events, "s")).values()) == {1}


def test_rounding_lets_no_slices_of_a_rank_overlap(tmp_path: Path) -> None:
    third = simulate(build("1f1b", ranks=3, microbatches=20), Costs(1 / 3, 1 / 7, 1 / 9, communication=1e-5))
    slices = sorted(only(trace(third, tmp_path, unit="s"), "X"), key=lambda e: (e["tid"], e["ts"]))
    assert {e["name"] for e in slices if e["cat"] == "wait"} == {"wait peer", "wait wire"}
    for one, other in pairwise(slices):
        if one["tid"] == other["tid"]:
            assert round(1000 * (one["ts"] + one["dur"])) <= round(1000 * other["ts"])


def test_titles_are_escaped(tmp_path: Path) -> None:
    title = 'a "title"\n</script>'
    names = [e["args"]["name"] for e in trace(SPLIT, tmp_path, title=title) if e["name"] == "process_name"]
    assert names == [title]


def test_a_reduction_is_a_slice(tmp_path: Path) -> None:
    slices = [e for e in only(trace(REDUCED, tmp_path), "X") if e["cat"] == "reduction"]
    assert [(e["tid"] - 1, e["name"], e["ts"], e["dur"], e["args"]) for e in slices] == [
        (0, "reduce 0", 6000, 2000, {"stage": 0}), (1, "reduce 1", 4000, 1000, {"stage": 1}),
    ]  # fmt: skip


def test_a_wait_is_a_slice_for_the_peer_and_one_for_the_wire(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", ranks=2, microbatches=1), Costs(communication=0.5))
    waits = [e for e in only(trace(timeline, tmp_path), "X") if e["cat"] == "wait"]
    assert [(e["tid"] - 1, e["name"], e["ts"], e["dur"], e["args"]) for e in waits] == [
        (0, "wait peer", 1000, 3500, {"for": "0B0"}), (0, "wait wire", 4500, 500, {"for": "0B0"}),
    ]  # fmt: skip
