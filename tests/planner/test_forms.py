"""A run gives up speed for memory only where it must, and then as little as it can."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from penstock.parallel.axes import Axes
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.estimate import Estimate, HostRoom, Trial
from penstock.planner.forms import AHEAD, Miss, fastest_form, tightened
from penstock.planner.hardware import Cluster, read_cluster
from penstock.planner.workload import Workload
from support.planning import LENGTH, LONG, cluster, large_workload, workload

ROOMY = cluster(memory="80 GB")
RUN = Candidate(4, rows=2, length=LONG, microbatches=12)
LOGITS = Candidate(2, rows=2, length=LENGTH, microbatches=4)
FAST = 1e12  # bytes/s: copies of a model as small as this one take no longer than its ops
SLOW = 3e9
FEW = replace(RUN, microbatches=6)
WAYS: tuple[Recomputed, ...] = ("none", "selective", "full")


def linked(bandwidth: float, host_memory: float = 2e12) -> Cluster:
    link = ROOMY.host_link.model_copy(update={"bandwidth": bandwidth})
    return ROOMY.model_copy(update={"host_link": link, "host_memory": host_memory})


def form(model: Workload, run: Candidate, limit: float, hardware: Cluster = ROOMY) -> Estimate:
    fastest = fastest_form(model, run, hardware, limit)
    assert isinstance(fastest, Estimate)
    assert fastest.nbytes <= limit
    return fastest


def kept(model: Workload, run: Candidate) -> Estimate:
    """Without a limit: all activations on the device, logits whole."""
    fastest = form(model, run, 1e12)
    assert (fastest.candidate.recomputed, fastest.candidate.offload_ahead) == ("none", 0)
    return fastest


def test_logits_are_in_chunks_only_where_whole_ones_do_not_fit() -> None:
    model = workload(vocab_size=2**20)
    whole = kept(model, LOGITS)
    assert whole.candidate.chunked_loss is False
    chunks = form(model, LOGITS, whole.nbytes - 1)
    assert (chunks.candidate.chunked_loss, chunks.candidate.recomputed) == (True, "none")
    assert whole.seconds < chunks.seconds
    assert chunks.nbytes < whole.nbytes


def test_logits_that_are_small_or_of_weights_that_fsdp_gathers_leave_no_choice() -> None:
    assert kept(workload(), LOGITS).candidate.chunked_loss is True
    sharded = replace(LOGITS, axes=Axes(dp_shard=2))
    assert kept(workload(vocab_size=2**20), sharded).candidate.chunked_loss is True


def test_activations_leave_the_device_where_copies_cost_less_than_recomputation() -> None:
    full = kept(large_workload(), RUN)
    limit = 0.8 * full.nbytes
    fast, slow = (form(large_workload(), RUN, limit, linked(bandwidth)) for bandwidth in (FAST, 64e6))
    assert fast.candidate.offload_ahead > 0
    assert (slow.candidate.offload_ahead, slow.candidate.recomputed) == (0, "full")
    assert full.seconds <= fast.seconds < slow.seconds
    assert max(fast.host) > 0


def test_a_host_with_little_memory_takes_no_activations() -> None:
    limit = 0.8 * kept(large_workload(), RUN).nbytes
    without = form(large_workload(), RUN, limit, linked(FAST, host_memory=1e6))
    assert (without.candidate.offload_ahead, without.candidate.recomputed) == (0, "full")


def test_a_process_on_a_cpu_offloads_nothing() -> None:
    """Its memory is the host's."""
    link = {"latency": "2 us", "bandwidth": "10 GB/s"}
    sizes = {"device": {"memory": "80 GB"}, "host_memory": "1 TB", "devices": 4, "inside": link}
    host = read_cluster({"host": "CPU host", **sizes})
    assert HostRoom.of(host) is None
    limit = 0.8 * kept(large_workload(), RUN).nbytes
    assert form(large_workload(), RUN, limit, host).candidate.offload_ahead == 0


def test_a_tightened_form_recomputes_more_where_the_form_before_did() -> None:
    model = large_workload()
    most = kept(model, RUN).nbytes
    slow = linked(64e6)  # where nothing is offloaded
    first = form(model, RUN, 0.9 * most, slow)
    trial = Trial.of(model, first.candidate, slow, buffers=False)
    tight = tightened(model, trial, slow, 0.8 * most)
    assert isinstance(tight, Trial)
    assert all(tight.fits(0.8 * most, tight.again))
    assert len(tight.again) > len(trial.again) > 0
    assert replace(tight.candidate, in_flight=None) == replace(first.candidate, in_flight=None)
    assert isinstance(tightened(model, trial, slow, 1e6), Miss)


def test_backwards_that_are_split_recompute() -> None:
    run = replace(RUN, schedule="zb_h1")
    assert (
        form(large_workload(), run, 0.8 * kept(large_workload(), run).nbytes).candidate.recomputed != "none"
    )


def test_what_never_fits_is_told_by_the_form_that_needs_least() -> None:
    model, hardware = large_workload(vocab_size=512), linked(FAST)
    fixed = max(rank.fixed for rank in Trial.of(model, FEW, hardware).fixed)
    missed = fastest_form(model, FEW, hardware, fixed + 1e6)
    assert isinstance(missed, Miss)
    assert fixed + 1e6 < missed.nbytes <= min(one.nbytes for one in every_form(512, FEW, FAST))


@functools.cache
def every_form(vocabulary: int, run: Candidate, bandwidth: float) -> list[Estimate]:
    """Once for all tests, as they are hundreds."""
    return list(brute_force(large_workload(vocab_size=vocabulary), run, linked(bandwidth)))


def brute_force(model: Workload, run: Candidate, hardware: Cluster) -> Iterator[Estimate]:
    """Every form in the splits that forms have: logits, offloading, what is recomputed, in how many."""
    chunks = (True,) if model.config.vocab_size == 512 else (False, True)  # as small logits have no chunks
    for chunked, ahead, what in product(chunks, (0, *AHEAD), WAYS):
        one = replace(run, chunked_loss=chunked, offload_ahead=ahead, recomputed=what)
        plain = replace(one, offload_ahead=0, recomputed="none")
        for split in {Trial.of(model, plain, hardware, buffers=False).candidate.split, ()}:
            trial = Trial.of(model, replace(one, split=split), hardware, buffers=False)
            most = trial.proof.peak_live if what != "none" else [0] * run.ranks
            for counts in product(*(range(live + 1) for live in most)):
                yield replace(trial, candidate=replace(trial.candidate, in_flight=counts)).estimate()


BFS = replace(RUN, ranks=2, schedule="looped_bfs", options=(("stages_per_rank", 2),), microbatches=3)


@pytest.mark.parametrize("bandwidth", [FAST, pytest.param(64e9, marks=pytest.mark.sweep), SLOW])
@pytest.mark.parametrize(
    ("vocabulary", "run"),
    [(512, FEW), (2**14, BFS)],
    ids=["1f1b", "looped_bfs"],
)
def test_the_form_is_the_fastest_of_all(vocabulary: int, run: Candidate, bandwidth: float) -> None:
    """Within 1 %: where the link is slow, to recompute more than the memory asks for saves copies."""
    model, hardware = large_workload(vocab_size=vocabulary), linked(bandwidth)
    every = every_form(vocabulary, run, bandwidth)
    most, seen = kept(model, run).nbytes, list[Candidate]()
    for share in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        fits = [one.seconds for one in every if one.nbytes <= share * most]
        fastest = fastest_form(model, run, hardware, share * most)
        assert isinstance(fastest, Estimate) == bool(fits)
        if isinstance(fastest, Estimate):
            assert fastest.seconds == pytest.approx(min(fits), rel=0.01)
            seen.append(fastest.candidate)
    if bandwidth in (FAST, SLOW):
        assert any(one.offload_ahead for one in seen) == (bandwidth == FAST)
    assert {one.chunked_loss for one in seen} == ({True} if vocabulary == 512 else {True, False})
