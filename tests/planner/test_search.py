"""A search sees what matters, and says what it may have missed."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from penstock.errors import ConfigError
from penstock.planner.candidate import Candidate
from penstock.planner.estimate import Estimate, estimate
from penstock.planner.forms import Miss, fastest_form
from penstock.planner.search import (
    RESERVED,
    Promise,
    fixed_bytes,
    memory_limit,
    plan,
    promised,
)
from penstock.planner.space import meshes
from penstock.planner.workload import Workload
from support.planning import LENGTH, LONG, cluster, large_workload, small_config, workload
from support.refusals import refuses

SMALL = cluster(1, 4)


def field() -> list[Candidate]:
    return [mesh for mesh in meshes(workload(), SMALL, 16, LENGTH) if not workload().takes(mesh)]


def test_the_best_of_all_runs_is_the_best_of_the_search() -> None:
    limit = 60e6
    everything: list[tuple[Promise, float]] = []
    bounds = {promise.candidate: promise.least for promise in promised(workload(), SMALL, field(), limit)}
    for promise in promised(workload(), SMALL, field(), inf):
        try:
            run = fastest_form(workload(), promise.candidate, SMALL, limit)
        except ConfigError:
            continue
        if isinstance(run, Miss):
            assert run.nbytes > limit
            continue
        assert run.nbytes <= limit
        assert run.seconds >= promise.least * (1 - 1e-9)
        assert run.seconds >= bounds[promise.candidate] * (1 - 1e-9)  # which knows of the memory
        everything.append((promise, run.seconds))
    plans = plan(workload(), SMALL, 16, LENGTH, limit=limit, keep=3, most=10**6)
    assert plans.best[0].seconds == pytest.approx(min(seconds for _, seconds in everything))
    assert len(plans.best) == 3
    assert len(plans.fitting) < plans.runs
    assert [run.seconds for run in plans.best] == sorted(run.seconds for run in plans.best)
    assert 0 <= plans.gap < 1
    assert plans.least <= plans.best[0].seconds
    assert plans.gap_of_field == 0
    few = plan(workload(), SMALL, 16, LENGTH, limit=limit, keep=3, most=0.1)
    assert len(few.fitting) < len(plans.fitting)
    assert few.left < plans.left
    assert min(seconds for _, seconds in everything) >= min(few.left, few.best[0].seconds * (1 - 1e-9))
    assert all(run.nbytes <= limit * 1.02 for run in plans.best)


# _runs: two processes measure anew what one has measured
def test_several_processes_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = cluster(2, 1)  # without tp, so that each process measures one number of rows
    alone = plan(workload(), hosts, 4, LENGTH, keep=3, most=10, processes=1)
    monkeypatch.setattr("penstock.planner.workload._runs", {})
    together = plan(Workload(small_config()), hosts, 4, LENGTH, keep=3, most=10, processes=2)
    assert together.fitting == alone.fitting
    assert together.least == alone.least
    assert [run.candidate for run in together.best] == [run.candidate for run in alone.best]
    assert [run.seconds for run in together.best] == [run.seconds for run in alone.best]


def test_no_more_microbatches_are_recomputed_than_memory_asks_for() -> None:
    run = next(
        promise.candidate
        for promise in promised(workload(), SMALL, field(), inf)
        if promise.candidate.ranks == 2 and promise.candidate.axes.tp == 2 and promise.candidate.rows == 2
    )
    kept = fastest_form(workload(), run, SMALL, 1e12)
    assert isinstance(kept, Estimate)
    assert kept.candidate.recomputed == "none"
    tight = fastest_form(workload(), run, SMALL, kept.nbytes - 1)
    assert isinstance(tight, Estimate)
    assert tight.candidate.recomputed != "none"
    assert tight.nbytes < kept.nbytes
    assert tight.seconds > kept.seconds
    none = fastest_form(workload(), run, SMALL, 1e3)
    assert isinstance(none, Miss)
    everything = estimate(workload(), replace(run, recomputed="full"), SMALL)
    assert 1e3 < none.nbytes <= everything.nbytes


def test_a_search_chunks_and_offloads_where_it_must_and_not_where_it_need_not() -> None:
    """Of two rows and more, logits are large enough for chunks where neither FSDP nor tp has them."""
    model, link = large_workload(vocab_size=2**14), SMALL.host_link.model_copy(update={"bandwidth": 1e12})
    host = cluster(1, 2, "80 GB").model_copy(update={"host_link": link})
    roomy = plan(model, host, 4, LONG, keep=1000, most=1000)
    assert {(run.candidate.offload_ahead, run.candidate.recomputed) for run in roomy.best} == {(0, "none")}
    pipelines = [run.candidate for run in roomy.best if run.candidate.ranks == 2]
    assert {(run.rows > 1, run.chunked_loss) for run in pipelines} == {(True, False), (False, True)}
    chosen = set()
    for share in (0.8, 0.4):
        limit = share * roomy.best[0].nbytes
        tight = plan(model, host, 4, LONG, limit=limit, keep=1000, most=1000)
        assert all(run.nbytes <= limit for run in tight.best)
        assert tight.least <= tight.best[0].seconds >= roomy.best[0].seconds
        forms = [run.candidate for run in tight.best]
        chosen |= {"offloaded" for run in forms if run.offload_ahead}
        chosen |= {"in chunks" for run in forms if run.ranks == 2 and run.rows > 1 and run.chunked_loss}
    assert chosen == {"offloaded", "in chunks"}


def test_where_nothing_fits_the_error_says_what_would() -> None:
    least = min(fixed_bytes(workload(), mesh) for mesh in field())
    with refuses(ConfigError, "LlamaForCausalLM", "the smallest, ") as activations:
        plan(workload(), SMALL, 16, LENGTH, limit=least * 1.2)
    assert activations.value.remedy.startswith("Take")
    with refuses(ConfigError, "LlamaForCausalLM", "states alone take") as weights:
        plan(workload(), SMALL, 16, LENGTH, limit=least / 3)
    assert weights.value.remedy.startswith("Take 4 hosts")


def test_a_batch_that_no_mesh_divides_is_refused() -> None:
    with refuses(ConfigError, "batch=3", "no mesh of 7 devices that divides it takes the model: tp=7"):
        plan(workload(), cluster(1, 7), 3, LENGTH)


def test_a_limit_is_what_the_device_has() -> None:
    assert memory_limit(SMALL, None) == pytest.approx(1e9 * (1 - RESERVED))
    with refuses(ConfigError, "memory=1.9 GiB", "H100 has 0.9 GiB"):
        memory_limit(SMALL, 2e9)
