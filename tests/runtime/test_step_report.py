"""The step report: one vector of equal length from every rank tells all what happened in a step."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runtime.device.memory import Held, PeakMemory
from penstock.runtime.recorder import OpTimes
from penstock.runtime.step_report import OpSeconds, losses, measured, pack, shares, unpack
from penstock.schedule import DeviceTime, Reduction, Schedule, build, loop
from support.programs import written

TIMES = {"F": 1.0, "B": 2.0}
PEAK, MEMORY = Held(700, 20, 5), PeakMemory(1, 2, 3)


def executor(schedule: Schedule, rank: int, **recorded: Any) -> Any:
    """A rank whose ops ran one after the other, from the number of its rank on."""
    at, times = float(rank), list[float]()
    for op in schedule.programs[rank]:
        times += OpTimes(at, at + TIMES[op.kind], at, at)
        at += TIMES[op.kind]
    known = {"host_bound": nan, "device_times": {}, "reductions": dict, **recorded}
    recorder = SimpleNamespace(times=lambda: times, **known)
    memory = SimpleNamespace(peak_live=3, ledger=SimpleNamespace(peak_deferred=40, peak=PEAK))
    plan = SimpleNamespace(schedule=schedule, rank=rank)
    return SimpleNamespace(plan=plan, recorder=recorder, memory=memory, loss_shares=[])


def test_what_one_rank_packs_all_unpack() -> None:
    schedule = build("1f1b", ranks=2, microbatches=3)
    first = executor(
        schedule, 0, host_bound=0.5, device_times={(0, "F"): 0.25}, reductions=lambda: {0: (8.0, 9.0)}
    )
    vectors = [
        pack(first, MEMORY, loss=1.25, hits=5.0, changed=True, asks=7),
        pack(executor(schedule, 1), PeakMemory()),
    ]
    report, other = unpack(schedule, vectors)
    assert report[:8] == (1.25, 5.0, 3, 40, PEAK, True, MEMORY, 7)
    assert report.seconds == OpSeconds(3.0, 6.0)
    assert (report.host_bound, [*report.reductions], [*report.device]) == (0.5, [8, 9], [0.25, 0, 0, 0])
    assert [*report.times] == [*first.recorder.times()]
    assert (other.loss, other.changed, other.asks, [*other.reductions]) == (0, False, 0, [0, 0])


def test_vectors_are_of_one_length_where_programs_are_not() -> None:
    schedule = written(loop(2), 1, "0F0 0B0", "1F0 1B0")
    uneven = Schedule("uneven", schedule.placement, 1, (schedule.programs[0], schedule.programs[1][:1]))
    vectors = [pack(executor(uneven, rank), PeakMemory()) for rank in range(2)]
    assert len(vectors[0]) == len(vectors[1])
    assert [len(report.times) for report in unpack(uneven, vectors)] == [8, 4]


def test_the_timeline_and_the_shares_are_those_of_the_step() -> None:
    schedule = build("1f1b", ranks=2, microbatches=3)
    ranks = [
        executor(
            schedule, 0, host_bound=1.0, device_times={(0, "B"): 0.5}, reductions=lambda: {0: (10.0, 11.0)}
        ),
        executor(schedule, 1, host_bound=2.0),
    ]
    reports = unpack(schedule, [pack(rank, PeakMemory()) for rank in ranks])
    timeline = measured(schedule, reports)
    assert (timeline.start, timeline.makespan) == (0, 11)
    assert timeline.reductions == (Reduction(0, 0, 10.0, 11.0),)
    assert timeline.device == (DeviceTime(0, "B", 0.5),)
    assert shares(schedule, reports) == pytest.approx((1 - 18 / 22, 3 / 22))
    assert shares(schedule, reports) == pytest.approx((timeline.bubble, timeline.host_share))


def test_a_rank_that_does_not_know_how_long_its_gpu_waited_leaves_the_share_out() -> None:
    schedule = build("1f1b", ranks=2, microbatches=3)
    ranks = [executor(schedule, 0, host_bound=1.0), executor(schedule, 1)]
    assert shares(schedule, unpack(schedule, [pack(rank, PeakMemory()) for rank in ranks]))[1] is None


def test_a_rank_without_a_last_stage_has_no_loss() -> None:
    first, last = SimpleNamespace(loss_shares=[]), SimpleNamespace(loss_shares=[torch.tensor(0.5)] * 3)
    given: list[Any] = [first, last]
    assert losses(given) == [0.0, 1.5]
