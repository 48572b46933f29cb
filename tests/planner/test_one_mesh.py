"""The plan for a fixed mesh: the fastest of its schedules that fits, and less kept where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Estimate, estimate
from penstock.planner.one_mesh import plan_mesh
from penstock.planner.space import runs
from support.planning import LENGTH, LONG, cluster, large_workload, workload
from support.refusals import refuses

MESH = Candidate(2, rows=2, length=LENGTH, microbatches=8)


def every_schedule() -> list[Estimate]:
    return [estimate(workload(), run, cluster()) for run, _ in runs(MESH, workload().layers)]


def test_with_room_it_is_the_fastest_schedule() -> None:
    best = plan_mesh(workload(), MESH, cluster(), 1e9)
    assert best.seconds == min(run.seconds for run in every_schedule())
    assert best.candidate.recomputed == "none"
    assert (best.candidate.ranks, best.candidate.shape, best.candidate.microbatches) == (2, (2, LENGTH), 8)


def test_with_less_room_it_is_slower_and_fits() -> None:
    least = min(run.nbytes for run in every_schedule())
    seconds = []
    for limit in (1e9, 1.2 * least, 0.95 * least):
        best = plan_mesh(workload(), MESH, cluster(), limit)
        assert best.nbytes <= limit
        seconds.append(best.seconds)
    assert seconds == sorted(seconds)
    run = best.candidate
    assert run.recomputed != "none"
    assert run.in_flight is not None
    for rank, count in enumerate(run.in_flight):  # one microbatch less is too much
        if count:
            fewer = tuple(other - (rank == index) for index, other in enumerate(run.in_flight))
            assert estimate(workload(), replace(run, in_flight=fewer), cluster()).memory[rank].total > limit


def test_where_nothing_fits_the_error_names_the_cheapest_change() -> None:
    """Chunks where the run has whole logits; activations in host memory; or else another mesh."""
    model, roomy = large_workload(vocab_size=2**14), cluster(memory="80 GB")
    host = roomy.model_copy(update={"host_link": roomy.host_link.model_copy(update={"bandwidth": 1e12})})
    mesh = Candidate(2, rows=2, length=LONG, microbatches=8)

    def between(one: Candidate, other: Candidate) -> float:
        first, second = (
            estimate(model, replace(run, recomputed="full"), host).nbytes for run in (one, other)
        )
        assert first < second
        return (first + second) / 2

    whole = replace(mesh, chunked_loss=False)
    with refuses(ConfigError, "a plan for pp=2", remedy="Set train.chunked_loss: true"):
        plan_mesh(model, whole, host, between(mesh, whole), only("1f1b"))
    many = replace(mesh, microbatches=32)
    run = replace(many, schedule="looped_bfs", options=(("stages_per_rank", 2),))
    limit = between(replace(run, offload_ahead=2), run)
    offload = "train.activation_offloading: {ahead: 1}, and the schedule looped_bfs stages_per_rank=2"
    with refuses(ConfigError, "a plan for pp=2", remedy=f"Set {offload}"):
        plan_mesh(model, many, host, limit, only("looped_bfs"))
    with refuses(ConfigError, "a plan for pp=2", remedy="Take more ranks"):
        plan_mesh(model, mesh, host, 1e6)


def only(schedule: str) -> Callable[[Candidate], bool]:
    return lambda run: run.schedule == schedule


def test_a_schedule_that_is_not_accepted_is_not_taken() -> None:
    best = plan_mesh(workload(), MESH, cluster(), 1e9, lambda run: run.schedule == "zb_h1")
    assert best.candidate.schedule == "zb_h1"


@pytest.mark.parametrize(
    ("mesh", "limit", "value", "rule"),
    [
        (MESH, 1e6, "a plan for pp=2 with 8 microbatches of 2 rows", "needs at least 4 MiB"),
        (replace(MESH, ranks=7), 1e9, "a plan for pp=7", "no schedule exists"),
        (replace(MESH, axes=Axes(tp=3)), 1e9, "pp=2 x tp=3", "tp=3"),
    ],
)
def test_what_cannot_be_planned_is_one_message(mesh: Candidate, limit: float, value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        plan_mesh(workload(), mesh, cluster(4, 8), limit)
