"""No run takes less than its bound, in any split and with anything recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PartitionError, ScheduleError
from penstock.planner.bound import Loads, lives
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.estimate import Estimate, HostRoom, Trial
from penstock.planner.hardware import Cluster
from penstock.planner.space import SCHEDULES, ScheduleKind
from penstock.planner.workload import Workload
from penstock.schedule import Schedule
from support.covering import every
from support.planning import LENGTH, LONG, cluster, large_workload, workload

WHAT: tuple[Recomputed, ...] = ("full", "selective")
LAYERS = 6
NAMES = [" ".join([kind.name, *map(str, kind.options.values())]) for kind in SCHEDULES]


def bound(
    model: Workload, run: Candidate, kind: ScheduleKind, hardware: Cluster, limit: float = inf
) -> float:
    loads = [Loads.of(model, replace(run, recomputed=what), hardware) for what in WHAT]
    host = None if kind.splits else HostRoom.of(hardware)
    return min(one.least(kind, run.ranks, run.microbatches, limit, host) for one in loads)


def as_candidate(kind: ScheduleKind, ranks: int, microbatches: int, rows: int = 1) -> Candidate:
    options = tuple(sorted(kind.options.items()))
    run = Candidate(ranks, schedule=kind.name, options=options, rows=rows, length=LENGTH)
    return replace(run, microbatches=microbatches)


def estimated(model: Workload, run: Candidate, hardware: Cluster) -> Estimate | None:
    try:
        return Trial.of(model, run, hardware, buffers=False).estimate()
    except (ConfigError, PartitionError, ScheduleError):
        return None


def splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(layers + 1):
        yield from ((first, *rest) for rest in splits(layers - first, stages - 1))


@pytest.mark.parametrize("kind", every(2, ((kind,) for kind in SCHEDULES if 2 * kind.stages <= LAYERS)))
def test_no_split_and_no_recomputation_is_below_the_bound(kind: ScheduleKind) -> None:
    """With memory for less and less: all splits of two stages, and some of four."""
    run = as_candidate(kind, 2, 6, rows=2)
    forms = [
        replace(run, split=split, recomputed=what, in_flight=counts)
        for split in list(splits(LAYERS, 2 * kind.stages))[:: 1 if kind.stages == 1 else 9]
        for what in WHAT
        for counts in ((0, 0), (2, 1), (0, 2), (9, 9))
    ]
    seen = [prediction for form in forms if (prediction := estimated(workload(), form, cluster()))]
    assert len(seen) > 40
    for limit in sorted(prediction.nbytes for prediction in seen)[::5]:
        least = bound(workload(), run, kind, cluster(), limit)
        fastest = min(prediction.seconds for prediction in seen if prediction.nbytes <= limit)
        assert least <= fastest * (1 + 1e-9)


@given(
    kind=st.sampled_from([kind for kind in SCHEDULES if kind.stages < 3]),
    ranks=st.integers(1, 3),
    microbatches=st.integers(1, 12),
    share=st.floats(0.3, 1.0),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_random_runs_are_never_below_the_bound(
    kind: ScheduleKind, ranks: int, microbatches: int, share: float, data: st.DataObject
) -> None:
    """One host or several, weights tied or not, any split and any microbatches recomputed."""
    model, hardware = data.draw(st.sampled_from(MODELS)), data.draw(st.sampled_from(CLUSTERS))
    run = as_candidate(kind, ranks, microbatches, data.draw(st.sampled_from([1, 2])))
    cuts = data.draw(st.lists(st.integers(0, LAYERS), min_size=ranks * kind.stages - 1,
                              max_size=ranks * kind.stages - 1).map(sorted))  # fmt: skip
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, LAYERS], strict=True))
    counts = tuple(data.draw(st.integers(0, 6)) for _ in range(ranks))
    form = replace(run, split=split, recomputed=data.draw(st.sampled_from(WHAT)), in_flight=counts)
    prediction = estimated(model, form, hardware)
    if prediction is not None:
        for limit in (prediction.nbytes, prediction.nbytes / share):
            assert prediction.seconds >= bound(model, run, kind, hardware, limit) * (1 - 1e-9)


@pytest.mark.parametrize("hardware", [cluster(1, 5), cluster(5, 1)], ids=["one host", "several"])
def test_one_microbatch_whose_layers_the_first_ranks_could_hold_twice(hardware: Cluster) -> None:
    """Ranks were filled beyond the last layer: the bound was three times the fastest step."""
    run = as_candidate(SCHEDULES[0], 5, 1)
    steps = [estimated(workload(), replace(run, split=split), hardware) for split in splits(LAYERS, 5)]
    fastest = min(step.seconds for step in steps if step)
    assert 0 < bound(workload(), run, SCHEDULES[0], hardware) <= fastest * (1 + 1e-9)


@given(
    kind=st.sampled_from([kind for kind in SCHEDULES if kind.stages < 3]),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 12),
    share=st.floats(0.3, 1.0),
    link=st.sampled_from([64e6, 6.4e9, 64e9, 1e12]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_random_runs_with_offloading_and_any_logits_are_never_below_the_bound(
    kind: ScheduleKind, ranks: int, microbatches: int, share: float, link: float, data: st.DataObject
) -> None:
    """Over slow links and fast ones, with all layers in one stage or not, recomputed or not.

    Hosts have no more memory than the run takes.
    """
    layers, host = 8, cluster(1, 5)
    host_link = host.host_link.model_copy(update={"bandwidth": link})
    hardware = host.model_copy(update={"host_link": host_link})
    run = replace(as_candidate(kind, ranks, microbatches, 2), length=LONG)
    cuts = data.draw(st.lists(st.integers(0, layers), min_size=ranks * kind.stages - 1,
                              max_size=ranks * kind.stages - 1).map(sorted))  # fmt: skip
    form = replace(
        run,
        split=tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)),
        recomputed=data.draw(st.sampled_from(("none", *WHAT))),
        in_flight=tuple(data.draw(st.integers(0, 6)) for _ in range(ranks)),
        offload_ahead=0 if kind.splits else data.draw(st.integers(0, 2)),
        chunked_loss=data.draw(st.booleans()),
    )
    prediction = estimated(LARGE, form, hardware)
    if prediction is not None:
        for limit in (prediction.nbytes, prediction.nbytes / share):
            least = bound(LARGE, run, kind, as_full(hardware, prediction), limit)
            assert prediction.seconds >= least * (1 - 1e-9)


def as_full(hardware: Cluster, run: Estimate) -> Cluster:
    """Hosts whose room for activations is what the fullest rank takes."""
    room = HostRoom.of(hardware)
    assert room is not None
    share = max(1.0, *run.host) / room.nbytes
    return hardware.model_copy(update={"host_memory": share * hardware.host_memory})


@pytest.mark.parametrize(
    ("ranks", "recomputed", "chunked"),
    [(1, "none", False), (1, "none", True), (2, "none", True), (2, "full", True)],
)
def test_a_run_that_offloads_may_be_below_the_bound_of_runs_that_do_not(
    ranks: int, recomputed: Recomputed, chunked: bool
) -> None:
    """In its own memory: the link takes what others recompute, or never hold."""
    kind = next(kind for kind in SCHEDULES if kind.name == "looped_bfs")
    host = cluster(1, 5)
    hardware = host.model_copy(update={"host_link": host.host_link.model_copy(update={"bandwidth": 1e12})})
    run = replace(as_candidate(kind, ranks, 64, 2), length=LONG)
    form = replace(run, recomputed=recomputed, offload_ahead=1, chunked_loss=chunked)
    prediction = estimated(LARGE, form, hardware)
    assert prediction is not None
    loads = [Loads.of(LARGE, replace(run, recomputed=what), hardware) for what in WHAT]
    kept = min(one.least(kind, ranks, 64, prediction.nbytes) for one in loads)
    assert bound(LARGE, run, kind, hardware, prediction.nbytes) <= prediction.seconds < kept


LARGE = large_workload(vocab_size=2**14)
TIED = workload(tie_word_embeddings=True, vocab_size=4096)
MODELS = [workload(), TIED]
CLUSTERS = [cluster(1, 4), cluster(4, 1)]


@pytest.mark.parametrize("kind", SCHEDULES, ids=NAMES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 3), (4, 8), (4, 17), (8, 32), (8, 5)])
def test_as_many_are_live_as_the_bound_counts(kind: ScheduleKind, ranks: int, microbatches: int) -> None:
    try:
        schedule = as_candidate(kind, ranks, microbatches).built()
    except ConfigError:
        pytest.skip("no such schedule")
    for rank in range(ranks):
        for live in lives(kind, rank, ranks, microbatches):
            assert together_live(schedule, rank, live.together) >= live.times


def together_live(schedule: Schedule, rank: int, together: int) -> int:
    """How often so many microbatches of each of a rank's stages are live that were not counted before."""
    stages = schedule.placement.stages_of(rank)
    fresh: dict[int, list[int]] = {stage: [] for stage in stages}
    times = 0
    for stage, kind, microbatch in schedule.programs[rank]:
        if kind == "F":
            fresh[stage].append(microbatch)
        elif kind != "W":
            if all(len(fresh[other]) >= together for other in stages):
                times += 1
                fresh = {other: sorted(alive)[together:] for other, alive in fresh.items()}
            if microbatch in fresh[stage]:
                fresh[stage].remove(microbatch)
    return times


def test_memory_and_the_way_to_the_last_rank_raise_it() -> None:
    plain = SCHEDULES[0]
    run = as_candidate(plain, 2, 4, rows=2)
    model, hardware = workload(), cluster()
    loads = Loads.of(model, replace(run, recomputed="full"), hardware)
    roomy = loads.least(plain, 2, 4, inf)
    assert roomy > (4 * loads.total.seconds + loads.total.end) / 2 * 1.02
    smallest = Trial.of(model, replace(run, recomputed="full"), hardware, buffers=False).estimate()
    tight = loads.least(plain, 2, 4, smallest.nbytes)
    assert tight > roomy * 1.02
    assert loads.least(plain, 2, 4, 1e3) == inf
