"""A predicted step, held against closed forms and the account of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import MixtralConfig

from penstock.errors import ConfigError, PartitionError
from penstock.parallel.axes import Axes
from penstock.pipeline.building.memory import Account
from penstock.planner.candidate import Candidate, Recomputed
from penstock.planner.communication import all_gather, all_reduce, groups, send
from penstock.planner.estimate import Estimate, Trial, estimate
from penstock.planner.practice import Practice
from penstock.planner.workload import Workload
from penstock.reading import parse_rate
from penstock.schedule.simulation.recompute import first_in_flight
from support.mesh import later
from support.planning import LENGTH, LONG, assert_near, cluster, large_workload, workload
from support.refusals import refuses

SWEEP = pytest.mark.sweep
ROOMY = cluster(memory="80 GB")
RUN = Candidate(2, rows=1, length=LENGTH, microbatches=4, split=(3, 3))


def test_a_step_of_one_stage_is_its_ops_and_the_optimizer() -> None:
    run = replace(RUN, ranks=1, split=(6,))
    trial = Trial.of(workload(), run, cluster())
    (stage,) = trial.stages
    predicted = trial.estimate()
    assert predicted.timeline.makespan == pytest.approx(
        4 * (stage.forward + stage.input_grad + stage.weight_grad)
    )
    assert predicted.seconds == predicted.timeline.makespan + trial.after()
    assert predicted.bubble == pytest.approx(0)
    assert predicted.tokens_per_second == pytest.approx(4 * LENGTH / predicted.seconds)
    peak = cluster().device.peak("bfloat16")
    assert predicted.mfu == pytest.approx(4 * workload().flops(LENGTH) / predicted.seconds / peak)


def test_a_pipeline_waits_for_its_messages() -> None:
    """1F1B on two ranks whose edge crosses hosts: rank 1 begins after a forward and a message."""
    trial = Trial.of(workload(), RUN, cluster(hosts=2, devices=1))
    first = min(span.start for span in trial.estimate().timeline.of_rank(1))
    message = send(1 * LENGTH * 64 * 4, True, cluster(hosts=2, devices=1))
    assert first == pytest.approx(trial.stages[0].forward + message)
    inside = Trial.of(workload(), RUN, cluster(hosts=1, devices=2))
    assert inside.estimate().seconds < trial.estimate().seconds


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_sharded_message_is_a_part_and_is_gathered_behind(sequence_parallel: bool) -> None:
    hosts, axes = cluster(hosts=2, devices=2), Axes(tp=2)
    run = replace(RUN, axes=axes, sequence_parallel=sequence_parallel)
    trials = [
        Trial.of(workload(), replace(run, practice=practice), hosts)
        for practice in (Practice(), Practice(sharded_edges=True))
    ]
    plain, sharded = (trial.kept.of_stages("bytes", trial.proof.schedule.placement)[0] for trial in trials)
    nbytes = LENGTH * 64 * 4
    gathered = 0.0 if sequence_parallel else all_gather(nbytes, groups(2, axes, hosts)["tp"], hosts)
    assert plain == send(nbytes, True, hosts)
    assert sharded == send(nbytes / 2, True, hosts) + gathered


def test_gathering_comes_first_and_reducing_last() -> None:
    run = replace(RUN, ranks=1, axes=Axes(dp_shard=2, dp_replicate=2), split=(6,))
    sharded, alone = (Trial.of(workload(), one, cluster()) for one in (run, replace(run, axes=Axes())))
    (stage,) = sharded.stages
    step = sharded.estimate().timeline
    work = 4 * (stage.forward + stage.input_grad + stage.weight_grad)
    (gather,) = sharded.kept.of_stages("gather", sharded.proof.schedule.placement)
    (reduction,) = sharded.kept.of_stages("reduction", sharded.proof.schedule.placement)
    assert step.makespan == pytest.approx(work + gather + reduction)
    assert gather > 0 < reduction
    assert alone.kept.gather == [0.0]
    assert [(one.rank, one.stage) for one in step.reductions] == [(0, 0)]
    again = Trial.of(workload(), replace(run, reshard=True), cluster())
    assert again.estimate().timeline.makespan == pytest.approx(work + 4 * 2 * gather + reduction)
    assert again.fixed[0].gathered_weights < sharded.fixed[0].gathered_weights


PLAIN, SPLIT, TENSOR = ("1f1b", Axes(), ()), ("zb_h1", Axes(), ()), ("1f1b", Axes(tp=2), ())
SHARDED = ("1f1b", Axes(dp_shard=2), (("stages_per_rank", 2),))
RUNS = [
    (SPLIT, "selective"), (SHARDED, "full"), (TENSOR, "none"),
]  # fmt: skip
REST = [(run, how) for run in (PLAIN, SPLIT, SHARDED, TENSOR) for how in ("none", "selective", "full")]


@pytest.mark.parametrize(
    ("run", "recomputed"),
    [*RUNS, *later(*(case for case in REST if case not in RUNS), mark=SWEEP)],
)
def test_memory_is_that_of_the_account(
    run: tuple[str, Axes, tuple[tuple[str, int], ...]], recomputed: Recomputed
) -> None:
    """A sum over parts, and a run of each whole stage."""
    schedule, axes, options = run
    one = replace(RUN, axes=axes, schedule=schedule, options=options, recomputed=recomputed, split=())
    model = workload()
    predicted = estimate(model, one, cluster())
    plan = model.plan(one.built(), predicted.candidate.split)
    account = Account(plan, axes, one.parallel_options(), one.checkpointing())
    for rank, expected in zip(predicted.memory, account.ranks(one.shape), strict=True):
        assert_near(rank, expected, one.rows)


LARGE = Candidate(4, rows=2, length=LONG, microbatches=8)
OFFLOADED = [
    replace(LARGE, offload_ahead=1),
    replace(LARGE, offload_ahead=1, recomputed="full", in_flight=(3, 2, 0, 0)),
    replace(LARGE, offload_ahead=1, recomputed="selective"),
    replace(LARGE, ranks=2, options=(("stages_per_rank", 2),), offload_ahead=2, axes=Axes(dp_shard=2)),
    replace(LARGE, ranks=2, schedule="looped_bfs", options=(("stages_per_rank", 2),), offload_ahead=2),
    replace(LARGE, ranks=2, schedule="looped_bfs", options=(("stages_per_rank", 2),), offload_ahead=1,
            axes=Axes(tp=2)),
]  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [
        *OFFLOADED[1:4:2],
        OFFLOADED[5],
        *later(*((run,) for run in (*OFFLOADED[:3:2], OFFLOADED[4])), mark=SWEEP),
    ],
)
def test_memory_with_offloading_is_that_of_the_account(run: Candidate) -> None:
    model = Workload(large_workload(vocab_size=2**14).config, run.precision)
    kept, predicted = (estimate(model, replace(run, offload_ahead=n), ROOMY) for n in (0, run.offload_ahead))
    plan = model.plan(run.built(), predicted.candidate.split)
    account = Account(
        plan, run.axes, run.parallel_options(), run.checkpointing(), run.chunked_loss, run.offloading()
    )
    for rank, expected in zip(predicted.memory, account.ranks(run.shape), strict=True):
        assert_near(rank, expected, run.rows, LONG * 256)
    assert max(predicted.host) > 0 == max(kept.host)
    assert predicted.memory[0].total < kept.memory[0].total
    trial = Trial.of(model, predicted.candidate, ROOMY, buffers=False)
    alone = trial.estimate()
    counts = 0 if run.recomputed == "none" else run.in_flight
    assert trial.peaks(first_in_flight(trial.proof.schedule, counts)) == pytest.approx(
        list(alone.timeline.peak_memory)
    )
    assert trial.least_bytes <= alone.nbytes


@pytest.mark.parametrize("axes", [Axes(dp_shard=2, ep=2), *later((Axes(),), mark=SWEEP)])
def test_memory_of_a_mixture_with_offloading_is_that_of_the_account(axes: Axes) -> None:
    sizes = large_workload().config.to_dict()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = {name: sizes[name] for name in names} | {"num_hidden_layers": 4}
    model = Workload(MixtralConfig(**shape, num_key_value_heads=4, num_local_experts=4))
    run = replace(LARGE, axes=axes, offload_ahead=1)
    predicted = estimate(model, run, cluster(2, 4, memory="80 GB"))
    plan = model.plan(run.built(), predicted.candidate.split)
    account = Account(plan, axes, run.parallel_options(), offloading=run.offloading())
    for rank, expected in zip(predicted.memory, account.ranks(run.shape), strict=True):
        assert_near(rank, expected, run.rows, LONG * shape["hidden_size"])
    assert max(predicted.host) > 0


def test_a_slow_host_link_is_waited_for() -> None:
    """Copies beside ops take no time; those of a link that is slower than the ops make ranks wait."""
    run = replace(LARGE, microbatches=16)
    kept = estimate(large_workload(), run, ROOMY)
    steps: list[Estimate] = []
    for bandwidth in ("64 GB/s", "1 GB/s", "100 MB/s"):
        link = ROOMY.host_link.model_copy(update={"bandwidth": parse_rate(bandwidth)})
        slow = ROOMY.model_copy(update={"host_link": link})
        steps.append(estimate(large_workload(), replace(run, offload_ahead=1), slow))
    fast, middle, slowest = steps
    assert kept.seconds <= fast.seconds < middle.seconds < slowest.seconds
    assert sum(slowest.spent.values()) == pytest.approx(slowest.seconds)
    assert slowest.exposed["host"] == pytest.approx(max(slowest.timeline.stalled))
    assert "host" not in kept.exposed
    moved = sum(copy.end - copy.start for copy in slowest.timeline.copies if copy.rank == 0) / 2
    trial = Trial.of(large_workload(), slowest.candidate, ROOMY)
    (away,) = trial.kept.rows("offloaded", trial.proof.schedule.placement, 1)[0]
    leaving = sum(copy.rank == 0 for copy in slowest.timeline.copies) / 2
    assert moved == pytest.approx(leaving * away / (100e6 * ROOMY.host_link.efficiency))


@pytest.mark.parametrize(
    ("axes", "chunked"),
    [(Axes(tp=2), True), *later((Axes(), True), (Axes(), False), (Axes(tp=2), False), mark=SWEEP)],
)
def test_memory_with_large_logits_is_that_of_the_account(axes: Axes, chunked: bool) -> None:
    model, run = workload(vocab_size=2**20), replace(RUN, axes=axes, rows=2, chunked_loss=chunked)
    predicted = estimate(model, run, ROOMY)
    plan = model.plan(run.built(), predicted.candidate.split)
    account = Account(plan, axes, run.parallel_options(), chunked_loss=chunked)
    for rank, expected in zip(predicted.memory, account.ranks(run.shape), strict=True):
        assert_near(rank, expected, run.rows)


def test_chunks_of_logits_cost_a_forward_of_the_head_and_hold_less() -> None:
    """Four products in place of three, without the last token, which has no next one."""
    model = workload(vocab_size=2**20)
    whole, chunks = (
        Trial.of(model, replace(RUN, rows=2, chunked_loss=chunked), ROOMY) for chunked in (False, True)
    )
    flops = [sum(op.flops * op.calls for ops in trial.stages[1].works[-1][:3] for op in ops)
             for trial in (whole, chunks)]  # fmt: skip
    assert flops[1] == pytest.approx(flops[0] * 4 / 3 * (LENGTH - 1) / LENGTH)
    assert whole.estimate().seconds < chunks.estimate().seconds
    assert whole.estimate().memory[1].total > chunks.estimate().memory[1].total * 1.2


def test_what_offloading_cannot_be_is_refused() -> None:
    with refuses(ConfigError, "offloaded activations with zb_h1", "not predicted"):
        estimate(large_workload(), replace(LARGE, schedule="zb_h1", offload_ahead=1), ROOMY)
    with refuses(ConfigError, "offloaded activations with sequence_parallel", "not predicted"):
        estimate(large_workload(), replace(OFFLOADED[5], sequence_parallel=True), ROOMY)
    with refuses(ConfigError, "2 ranks", "return before they have left"):
        estimate(large_workload(), replace(LARGE, ranks=2, offload_ahead=1), ROOMY)


def test_recomputation_costs_a_forward_and_holds_less() -> None:
    kept, full = (Trial.of(workload(), replace(RUN, recomputed=how), cluster()) for how in ("none", "full"))
    first, again = kept.estimate(), full.estimate()
    assert again.nbytes < first.nbytes
    longer = again.timeline.busy[0] - first.timeline.busy[0]
    assert longer == pytest.approx(4 * kept.stages[0].recomputed)
    one = replace(full, candidate=replace(full.candidate, in_flight=(1, 0))).estimate()
    assert first.timeline.busy[0] < one.timeline.busy[0] < again.timeline.busy[0]
    assert one.timeline.busy[1] == pytest.approx(first.timeline.busy[1])


def test_a_pipeline_of_equal_stages_takes_two_forwards_a_microbatch() -> None:
    """(m + P - 1) (2F + I + W). What runs again is F up to the last result that I reads."""
    run = replace(RUN, ranks=3, microbatches=7, split=(2, 2, 2), recomputed="full", axes=Axes(tp=2))
    trial = Trial.of(workload(), run, cluster(hosts=3))
    stage = trial.stages[1]
    once = ("forward", "input_grad", "weight_grad", "recomputed")
    times = {name: getattr(stage, name) for name in once}
    equal = replace(trial, kept=replace(trial.kept, bytes=0.0, **times))
    assert equal.estimate().timeline.makespan == pytest.approx((7 + 3 - 1) * sum(times.values()))
    assert 0.7 * stage.forward < stage.recomputed <= stage.forward  # .74 with torch 2.11, which stops earlier
    products = [op for op in stage.works[0].weight_grad if op.kind == "matmul"]
    added = [op for op in stage.works[0].weight_grad if op.kind == "other"]
    assert sum(op.calls for op in products) == 7  # q, k, v, o, gate, up, down
    assert sum(op.calls for op in added) == 2 * 7  # of each a cast to float32 and a sum


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "v_half"])
def test_peaks_are_those_of_the_simulation(schedule: str) -> None:
    run = replace(RUN, schedule=schedule, recomputed="full", in_flight=(2, 1), microbatches=8, split=())
    trial = Trial.of(workload(), run, cluster(), buffers=False)
    peaks = trial.peaks(first_in_flight(trial.proof.schedule, (2, 1)))
    assert peaks == pytest.approx(list(trial.estimate().timeline.peak_memory))
    all_kept, none_kept = (max(trial.peaks(first_in_flight(trial.proof.schedule, n))) for n in (0, None))
    assert trial.least_bytes <= none_kept + max(rank.fixed for rank in trial.fixed)
    limit = max(rank.fixed for rank in trial.fixed) + (all_kept + none_kept) / 2
    counts = trial.counts(limit)
    assert all(trial.fits(limit, first_in_flight(trial.proof.schedule, counts)))
    for rank, count in enumerate(counts):
        fewer = [max(n - (at == rank), 0) for at, n in enumerate(counts)]
        assert not count or not trial.fits(limit, first_in_flight(trial.proof.schedule, fewer))[rank]


def test_what_a_step_is_spent_on_adds_up() -> None:
    run = Candidate(2, Axes(tp=2), rows=2, length=LENGTH, microbatches=4, sequence_parallel=True)
    predicted = estimate(workload(), run, cluster())
    assert sum(predicted.spent.values()) == pytest.approx(predicted.seconds)
    assert predicted.spent["bubble"] > 0 < predicted.spent["compute"]
    host = cluster()
    across = groups(2, Axes(tp=2), host)
    hidden = 2 * LENGTH * 64 * 2
    assert predicted.exposed["tp"] > 4 * 3 * 2 * all_reduce(hidden, across["tp"], host)


def test_a_candidate_that_cannot_be_is_refused() -> None:
    with refuses(ConfigError, rule="devices"):
        estimate(workload(), replace(RUN, axes=Axes(dp_shard=8)), cluster())
    with pytest.raises(PartitionError):
        estimate(workload(), replace(RUN, ranks=4, schedule="zb_v", split=()), cluster())
