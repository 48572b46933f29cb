"""What a GPU computes within ops, and how long it waits there for its host.

The GPUs are emulated, and their clocks are numbers: a launch takes its host's time, a kernel its GPU's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from penstock import LayerCosts, Pipeline
from penstock.pipeline.steps.step import StepResult
from penstock.schedule import Costs, Timeline, simulate
from penstock.schedule.choose import ScheduleLike, chosen_schedule
from support import jobs_channels as jobs
from support.gpu import Cluster, emulated

LAUNCH = 1e-3  # seconds of a host
Kernel = Callable[[str], float]  # seconds of a kernel, by the kind of op that it is part of


class Ran(NamedTuple):
    """What some steps leave on a rank. kernels: seconds of those within ops of the last step, by kind"""

    result: StepResult
    timeline: Timeline
    kernels: Counter[str]
    costs: Costs
    layers: LayerCosts
    summary: str
    gradients: list[torch.Tensor]


def half(kind: str) -> float:
    return LAUNCH / 2


def three_times(kind: str) -> float:
    return 3 * LAUNCH


def mixed(kind: str) -> float:
    """Forwards wait for their host, backwards do not."""
    return LAUNCH / 4 if kind == "F" else 3 * LAUNCH


# _training: the op that a rank is in is seen there alone
@cache
def ran(kernel: Kernel, steps: str, schedule: ScheduleLike = "1f1b", ranks: int = 2) -> list[Ran]:
    """By rank. steps: a letter each, m for a step that measures the device"""
    pipes: dict[int, Pipeline] = {}
    kernels = [Counter[str]() for _ in range(ranks)]

    def costs(rank: int) -> tuple[float, float]:
        op = pipes[rank]._training.executors[0].current if rank in pipes else None
        kind = "" if op is None else op.kind
        kernels[rank][kind] += kernel(kind)  # type: ignore[assignment]
        return LAUNCH, kernel(kind)

    def job(rank: int) -> Ran:
        pipe = pipes[rank] = jobs.pipeline(schedule, ranks)
        batch: Any = jobs.batch(4, torch.float64)
        for letter in steps:
            kernels[rank].clear()
            pipe.zero_grad()
            if letter == "m":
                with pipe.measuring_device():
                    result = pipe.step(batch)
            else:
                result = pipe.step(batch)
        del kernels[rank][""]
        found, gradients = (
            Counter(kernels[rank]),
            [p.grad.clone() for p in pipe.parameters() if p.grad is not None],
        )
        timeline, measured, summary = pipe.timeline, pipe.costs(), pipe.summary()
        layers = pipe.layer_costs(batch)
        pipe.close()
        return Ran(result, timeline, found, measured, layers, summary, gradients)

    with emulated():
        found: list[Any] = Cluster(ranks, costs=costs).run(job)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def spans(timeline: Timeline, rank: int, kinds: str = "FBIW") -> float:
    return sum(span.end - span.start for span in timeline.of_rank(rank) if span.op.kind in kinds)


def test_kernels_of_half_the_launches_time_are_half_of_an_op() -> None:
    """0.5.0: an op on a GPU counted as computing from its first kernel to its last, though the GPU waited in
    between for its host: the busy time was up to 2.8 times what a profiler saw, and costs were as wrong."""
    (alone,) = ran(half, "-m-", ranks=1)
    assert alone.timeline.busy[0] == pytest.approx(2 * alone.kernels.total(), rel=0.02)
    assert alone.result.host_share == pytest.approx(0.5, rel=0.02)
    first, last = ran(half, "-m-")
    timeline = last.timeline
    for rank, each in enumerate((first, last)):
        # while a GPU waits for a message its host runs ahead, and the op after it has no gap
        assert each.kernels.total() * 1.2 < timeline.busy[rank] < each.kernels.total() * 2
        assert timeline.device_busy[rank] == pytest.approx(each.kernels.total(), rel=0.03)
    host = sum(timeline.host_bound) / (2 * timeline.makespan)
    assert [last.result.host_share, timeline.host_share] == pytest.approx([host, host])
    assert f"the host is the limit: {host:.1%}" in last.summary.splitlines()[0]
    busy = sum(timeline.device_busy) / (2 * timeline.makespan)
    assert busy + host + timeline.bubble == pytest.approx(1)


def test_kernels_of_three_times_the_launches_time_are_told_as_busy_without_a_step_that_measures() -> None:
    """The GPU begins most ops after its host has launched them: their time has no gaps."""
    for rank, each in enumerate(ran(three_times, "--")):
        timeline = each.timeline
        assert each.result.host_share is not None
        assert each.result.host_share < 0.01
        assert timeline.device_busy[rank] == pytest.approx(each.kernels.total(), rel=0.03)
        assert spans(timeline, rank) == pytest.approx(each.kernels.total(), rel=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb_h1", marks=pytest.mark.sweep), "zb_v"])
def test_each_kind_of_op_is_told_apart(schedule: str) -> None:
    """The first forwards wait for their host; a backward leaves the GPU far behind it."""
    for rank, each in enumerate(ran(mixed, "-m-", schedule)):
        timeline, kernels = each.timeline, each.kernels
        backwards = kernels.total() - kernels["F"]
        assert spans(timeline, rank, "BIW") == pytest.approx(backwards, rel=0.05)
        if rank == 0:  # the other GPU waits for a message first
            assert spans(timeline, rank, "F") > 1.5 * kernels["F"]
            assert timeline.host_bound[rank] > 0.2 * kernels["F"]
        assert timeline.device_busy[rank] == pytest.approx(kernels.total(), rel=0.01)


def test_without_a_step_that_measures_nothing_is_claimed_where_the_host_may_be_the_limit() -> None:
    for rank, each in enumerate(ran(half, "--")):
        assert each.result.host_share is each.timeline.host_share is None
        assert each.timeline.device_busy == each.timeline.busy
        assert each.timeline.busy[rank] > 1.2 * each.kernels.total()
        title, *lines = each.summary.splitlines()
        assert "host" not in title
        assert lines[-1] == "host: a step inside pipe.measuring_device() finds out how far it is the limit"


def test_a_first_step_that_measures_knows_no_pace_of_the_host_and_holds_nothing_back() -> None:
    timeline = ran(half, "m")[1].timeline
    assert timeline.host_share is None
    assert timeline.makespan == pytest.approx(ran(half, "-")[1].timeline.makespan)


def test_costs_are_those_of_the_gpu_and_a_simulation_is_of_them() -> None:
    slow, fast = (ran(half, steps)[1] for steps in ("--", "-m-"))
    timeline = fast.timeline
    seconds: dict[tuple[int, str], float] = {
        (each.stage, each.kind): each.seconds for each in timeline.device
    }
    for cost, kind in ((fast.costs.forward, "F"), (fast.costs.input_grad, "B")):
        assert cost == [seconds[0, kind], seconds[1, kind]]
    mine = sum(seconds[1, kind] * 4 for kind in ("F", "B"))
    assert mine == pytest.approx(fast.kernels.total(), rel=0.03)
    predicted = [simulate(chosen_schedule("1f1b", 2, 4), each.costs).makespan for each in (slow, fast)]
    assert predicted[1] < 0.6 * predicted[0]
    again = Costs.measured(Timeline.from_data(timeline.to_data()))
    assert again.forward == pytest.approx(Costs.measured(timeline).forward)


def test_the_costs_of_layers_are_those_of_the_gpu() -> None:
    """`balance: measured` took the host's time for a layer's."""
    (quick,) = ran(half, "-", ranks=1)
    (slow,) = ran(three_times, "-", ranks=1)
    found = [sum(each.layers.layers) + each.layers.head + each.layers.embedding for each in (quick, slow)]
    assert found == pytest.approx([quick.kernels.total() / 4, slow.kernels.total() / 4], rel=0.03)


def test_a_step_that_measures_computes_the_same() -> None:
    for plain, measured in zip(ran(half, "--", "zb_v"), ran(half, "-m", "zb_v"), strict=True):
        assert measured.timeline.makespan > 1.2 * plain.timeline.makespan
        assert measured.result.loss == plain.result.loss
        assert all(map(torch.equal, measured.gradients, plain.gradients))


def test_on_the_cpu_nothing_is_said_of_a_host() -> None:
    pipe = jobs.pipeline(ranks=2)
    batch: Any = jobs.batch(4, torch.float64)
    pipe.step(batch)
    with pipe.measuring_device():
        result = pipe.step(batch)
    assert result.host_share is None
    assert (pipe.timeline.device, pipe.timeline.host_bound) == ((), ())
    assert "host" not in pipe.summary()
    assert pipe.timeline.device_busy == pipe.timeline.busy
