"""Sampled steps, against `simulate` on each sample alone, and against formulas."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.schedule import (
    Costs,
    Op,
    Proof,
    Schedule,
    build,
    loop,
    sample,
    simulate,
    slow_rank_costs,
    verify,
)
from support.programs import valid, written
from support.refusals import refuses
from support.schedules import FORMS, built

COSTS = Costs(forward=1.25, input_grad=1.5, weight_grad=0.75, communication=0.125)
Factors = Mapping[Op, float]


def with_factors(proof: Proof, costs: Costs, factors: Factors) -> Costs:
    """Costs by stage and microbatch; of a whole backward, all counts as I."""
    schedule = proof.schedule
    kinds = {"F": "forward", "B": "input_grad", "I": "input_grad", "W": "weight_grad"}
    shape = schedule.stages, schedule.microbatches
    rows: Any = {name: np.zeros(shape).tolist() for name in kinds.values()}
    for op in proof.arrays.ops:
        row = costs.durations(op.kind, schedule.placement, schedule.microbatches)[op.stage]
        rows[kinds[op.kind]][op.stage][op.microbatch] = row[op.microbatch] * factors[op]
    return Costs(communication=costs.communication, reduction=costs.reduction, **rows)


def drawn(proof: Proof, samples: int, jitter: float, spread: float, seed: int) -> list[Factors]:
    """What `sample` draws for one replica, sample by sample: ranks, then ops in the order of the proof."""
    random, arrays = np.random.default_rng(seed), proof.arrays
    ranks = proof.schedule.ranks
    speed = [
        1 + spread * random.standard_normal(samples) if spread else np.ones(samples) for _ in range(ranks)
    ]
    factors: list[dict[Op, float]] = [{} for _ in range(samples)]
    for at in proof.order:
        own = 1 + jitter * random.standard_normal(samples) if jitter else np.ones(samples)
        for one, factor in zip(factors, own * speed[arrays.rank[at]], strict=True):
            one[arrays.ops[at]] = float(factor)
    return list(factors)


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("searched")])
def test_each_sample_is_to_the_last_digit_what_simulate_gives(form: str) -> None:
    proof = verify(built(form, 4, 8))
    steps = sample(proof, COSTS, jitter=0.1, spread=0.05, samples=5, seed=3).steps
    for step, factors in zip(steps, drawn(proof, 5, 0.1, 0.05, seed=3), strict=True):
        assert step == simulate(proof, with_factors(proof, COSTS, factors)).makespan


@settings(max_examples=40, deadline=None)
@given(valid(), st.floats(0, 2), st.floats(0, 2), st.integers(0, 99))
def test_so_it_is_for_any_schedule(schedule: Schedule, latency: float, reduction: float, seed: int) -> None:
    proof, costs = verify(schedule), Costs(communication=latency, reduction=reduction)
    steps = sample(proof, costs, jitter=0.3, samples=3, seed=seed).steps
    for step, factors in zip(steps, drawn(proof, 3, 0.3, 0.0, seed), strict=True):
        one = {op: max(0.0, factor) for op, factor in factors.items()}
        assert step == simulate(proof, with_factors(proof, costs, one)).makespan


def test_pairs_that_run_side_by_side() -> None:
    """An op's wait within itself is drawn as a part of it."""
    costs = Costs(forward=2, input_grad=2, weight_grad=1, exchange=0.5, exchange_in_backward=1)
    proof = verify(build("dualpipe_v", ranks=2, microbatches=6))
    assert sample(proof, costs).undisturbed == simulate(proof, costs).makespan
    steps = sample(proof, costs, jitter=0.05, samples=4, seed=1).steps
    for step, factors in zip(steps, drawn(proof, 4, 0.05, 0.0, seed=1), strict=True):
        shape = proof.schedule.stages, proof.schedule.microbatches
        waits: Any = {name: np.zeros(shape).tolist() for name in ("exchange", "exchange_in_backward")}
        for (stage, kind, microbatch), factor in factors.items():
            if kind != "W":
                name = "exchange" if kind == "F" else "exchange_in_backward"
                waits[name][stage][microbatch] = getattr(costs, name) * factor
        varied = with_factors(proof, costs, factors)
        assert step == pytest.approx(
            simulate(proof, Costs(varied.forward, varied.input_grad, varied.weight_grad, **waits)).makespan,
            rel=1e-12,
        )


# ---- Replicas


def meeting(proof: Proof, replicas: list[Costs], takes: float) -> float:
    """The step of replicas that meet in each stage's reduction, each of them simulated alone.

    Until nothing changes, the reduction of a replica lasts from its own last gradient until the last replica
    has come, and `takes` longer.
    """
    stages = proof.schedule.stages
    lasts = [[takes] * stages for _ in replicas]
    while True:
        timelines = [
            simulate(proof, Costs(costs.forward, costs.input_grad, costs.weight_grad, reduction=last))
            for costs, last in zip(replicas, lasts, strict=True)
        ]
        starts = [{of.stage: of.start for of in timeline.reductions} for timeline in timelines]
        met = {stage: max(start[stage] for start in starts) for stage in range(stages)}
        after = [[met[stage] - start[stage] + takes for stage in range(stages)] for start in starts]
        if np.allclose(after, lasts, rtol=0, atol=1e-12):
            return max(timeline.makespan for timeline in timelines)
        lasts = after


@pytest.mark.parametrize("form", ["1f1b", "interleaved_1f1b", "zb_v"])
def test_replicas_meet_where_gradients_are_summed(form: str) -> None:
    """Also in the middle of a program, where a rank has several stages."""
    proof, takes, slow = verify(built(form, 4, 8)), 0.5, {1: 1.5, 3: 1.25}
    plain = dict.fromkeys(proof.arrays.ops, 1.0)
    of_slow = {op: slow.get(proof.schedule.placement.rank_of[op.stage], 1.0) for op in plain}
    replicas = [with_factors(proof, COSTS, factors) for factors in (of_slow, plain)]
    expected = meeting(proof, replicas, takes)
    costs = Costs(COSTS.forward, COSTS.input_grad, COSTS.weight_grad, reduction=takes)
    steps = sample(proof, costs, slow=slow, replicas=2, samples=3).steps
    assert steps == pytest.approx((expected,) * 3, rel=1e-12)


@pytest.mark.parametrize("form", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe"])
def test_replicas_that_are_slow_in_different_ops(form: str) -> None:
    """One is the last at one reduction, another at the next: all wait for both."""
    proof, takes = verify(built(form, 4, 8)), 0.5
    replicas = [with_factors(proof, COSTS, factors) for factors in drawn(proof, 3, 0.3, 0.2, seed=4)]
    costs = Costs(COSTS.forward, COSTS.input_grad, COSTS.weight_grad, reduction=takes)
    (step,) = sample(proof, costs, jitter=0.3, spread=0.2, replicas=3, samples=1, seed=4).steps
    assert step == pytest.approx(meeting(proof, replicas, takes), rel=1e-12)


def test_a_replica_waits_for_another_in_the_middle_of_a_step() -> None:
    """One rank with two stages, and two replicas: 1B0 and 0B0 are slow in one of them.

    replica 0 (1.5): 1B0 ends at 6, R1 at 7, 0B0 at 10, R0 at 11
    replica 1:       1B0 ends at 4, waits until 6, R1 at 7, 0B0 at 9, R0 at 11
    """
    schedule = written(loop(1, 2), 1, "0F0 1F0 1B0 0B0")
    steps = sample(schedule, Costs(reduction=1), slow={0: 1.5}, replicas=2, samples=2).steps
    assert steps == (11.0, 11.0)


def test_the_step_takes_the_slowest_of_the_replicas() -> None:
    """With one op a rank: the maximum of normal draws, of which 1,000 reach 3.24 deviations on average."""
    schedule = written(loop(1), 1, "0F0 0B0")
    found = sample(schedule, Costs(1, 0, 0), jitter=0.1, replicas=1000, samples=400, seed=2)
    assert found.mean == pytest.approx(1 + 0.1 * 3.2414, abs=0.005)  # of 400, its error is 0.0018
    assert found.deviation == pytest.approx(0.035, abs=0.006)


def test_a_fast_replica_changes_nothing() -> None:
    proof = verify(built("1f1b", 4, 8))
    assert sample(proof, COSTS, slow={0: 0.5}, replicas=3).mean == simulate(proof, COSTS).makespan


def test_ten_thousand_ranks() -> None:
    """1,250 replicas of 8 ranks: by how much they all wait for the slowest, on two different seeds alike."""
    proof = verify(build("1f1b", ranks=8, microbatches=16))
    few, many = (sample(proof, jitter=0.02, replicas=count, samples=8) for count in (1, 1250))
    again = sample(proof, jitter=0.02, replicas=1250, samples=8, seed=1)
    assert few.mean < many.mean
    assert again.steps != many.steps
    assert again.mean == pytest.approx(many.mean, rel=0.003)
    assert sample(proof, jitter=0.02, replicas=1250, samples=8) == many


# ---- Slow ranks


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 1), (4, 8), (8, 3)])
def test_a_slow_rank_in_gpipe(ranks: int, microbatches: int) -> None:
    """All microbatches queue at the slow rank, forward and back: m x F and m x B more, whichever it is."""
    costs, factor = Costs(forward=2, input_grad=2, weight_grad=3), 1.5
    schedule = build("gpipe", ranks=ranks, microbatches=microbatches)
    expected = 0.5 * microbatches * 7 / (7 * (microbatches + ranks - 1))
    assert slow_rank_costs(schedule, costs, factor) == pytest.approx((expected,) * ranks, rel=1e-12)
    found = sample(schedule, costs, slow={ranks - 1: factor})
    assert found.by_slow_rank == {ranks - 1: pytest.approx(expected, rel=1e-12)}
    assert found.loss == found.by_slow_rank[ranks - 1]


@pytest.mark.parametrize(("form", "rank"), [*product(["1f1b", "zb_v", "dualpipe", "hanayo"], range(4))])
def test_a_slow_rank_is_what_simulate_gives(form: str, rank: int) -> None:
    proof = verify(built(form, 4, 8))
    factors = {op: 1.01 if proof.schedule.placement.rank_of[op.stage] == rank else 1.0
               for op in proof.arrays.ops}  # fmt: skip
    slow = simulate(proof, with_factors(proof, COSTS, factors)).makespan
    assert slow_rank_costs(proof, COSTS)[rank] == slow / simulate(proof, COSTS).makespan - 1


def test_percentiles_and_the_mean() -> None:
    found = sample(build("1f1b", ranks=2, microbatches=4), jitter=0.1, samples=10)
    ordered = sorted(found.steps)
    assert [found.percentile(percent) for percent in (1, 10, 11, 50, 100)] == [
        ordered[0], ordered[0], ordered[1], ordered[4], ordered[9],
    ]  # fmt: skip
    assert found.mean == pytest.approx(np.mean(ordered))
    assert found.deviation == pytest.approx(np.std(ordered))
    assert found.loss == found.mean / found.undisturbed - 1
    with refuses(ConfigError, "percentile(0)", "above 0 and at most 100"):
        found.percentile(0)


def test_a_schedule_without_time_loses_none() -> None:
    found = sample(build("gpipe", ranks=2, microbatches=2), Costs(0, 0, 0), jitter=0.1, slow={0: 2})
    assert (found.mean, found.loss, found.by_slow_rank) == (0, 0, {0: 0})


@pytest.mark.parametrize(
    ("options", "value", "rule"),
    [
        ({"jitter": -0.1}, "jitter=-0.1", "a share of an op's time"),
        ({"jitter": 0.31}, "jitter=0.31", "a share of an op's time"),
        ({"jitter": float("nan")}, "jitter=nan", "a share of an op's time"),
        ({"spread": True}, "spread=True", "a share of an op's time"),
        ({"slow": {2: 1.01}}, "slow rank 2", "ranks 0 to 1"),
        ({"slow": {0: 0.0}}, "slow rank 0 with 0.0", "a factor of the rank's times"),
        ({"slow": {0: float("inf")}}, "slow rank 0 with inf", "a factor of the rank's times"),
        ({"replicas": 0}, "replicas=0", "whole number"),
        ({"replicas": 10**7}, "replicas=10000000", "fill the memory"),
        ({"samples": 1.5}, "samples=1.5", "whole number"),
        ({"seed": -1}, "seed=-1", "whole number"),
        ({"costs": Costs(offloaded=0.5)}, "Costs(offloaded=...)", "not sampled"),
    ],
)
def test_refusals(options: dict[str, object], value: str, rule: str) -> None:
    with refuses(ConfigError, value, rule):
        sample(build("1f1b", ranks=2, microbatches=2), **options)  # type: ignore[arg-type]


def test_a_schedule_that_would_hang_is_refused() -> None:
    broken = written(loop(1), 1, "0B0 0F0")
    for refused in (sample, slow_rank_costs):
        with refuses(ScheduleError, rule="it needs 0F0"):
            refused(broken)
