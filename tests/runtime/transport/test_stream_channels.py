"""NCCL on emulated GPUs (support/gpu.py): gradients are those of one process, and nothing hangs."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from functools import cache
from math import isnan
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _python_dispatch
from transformers import AutoConfig

from penstock import AutoPipeline, Pipeline, StageInfo
from penstock.errors import ConfigError, PeerLostError, ScheduleError, StalledPeerError
from penstock.parallel import nccl
from penstock.runtime.health import watch
from penstock.runtime.ranks import GroupRanks
from penstock.runtime.transport import distributed, stream_channels
from penstock.runtime.transport.distributed import DistributedTransport
from penstock.runtime.transport.stream_channels import StreamChannels
from penstock.schedule import Schedule, build, verify
from penstock.schedule.order import blocked_in_line
from support import jobs_channels as jobs
from support.covering import every
from support.gpu import Cluster, EmulatedGroups, Group, emulated
from support.programs import valid
from support.ragged import ragged
from support.refusals import refuses
from support.schedules import FORMS, built, takes

Found = tuple[float, jobs.Gradients]
MICROBATCHES = 4


def on_gpus(job: Callable[[int], Any], ranks: int, **options: Any) -> tuple[list[Any], Cluster]:
    cluster = Cluster(ranks, **options)
    with emulated():
        return cluster.run(job), cluster


def step(pipe: Pipeline, batch: Any) -> Found:
    pipe.zero_grad()
    loss = pipe.step(batch).loss
    return loss, {
        stage: [p.grad.clone() for p in module.parameters() if p.grad is not None]
        for stage, module in pipe.modules.items()
    }


@cache
def in_one_process(schedule: Schedule) -> Found:
    found = jobs.step(schedule, schedule.ranks, schedule.microbatches, transport="local")
    return found.loss, found.gradients


def trained(schedule: Schedule, *, steps: int = 2, **options: Any) -> Callable[[int], Found]:
    def job(rank: int) -> Found:
        pipe = jobs.pipeline(schedule, schedule.ranks, schedule.microbatches, **options)
        for _ in range(steps):
            found = step(pipe, jobs.batch(schedule.microbatches, torch.float64))
        pipe.close()
        return found

    return job


def assert_equal(found: list[Any], expected: Found) -> None:
    loss, gradients = expected
    for each in found:
        if isinstance(each, BaseException):
            raise each
        assert each[0] == loss
        for stage, mine in each[1].items():
            assert len(mine) == len(gradients[stage]) > 0
            assert all(map(torch.equal, mine, gradients[stage])), f"stage {stage}"


def assert_exact(schedule: Schedule, *, seed: int = 0, connections: int = 32, **options: Any) -> None:
    found, cluster = on_gpus(trained(schedule, **options), schedule.ranks, seed=seed, connections=connections)
    assert not cluster.hung
    assert_equal(found, in_one_process(schedule))


# ---- the emulation itself


def test_a_value_is_there_when_the_stream_has_come_to_it_and_until_its_last_user_drops_it() -> None:
    cluster = Cluster(1)

    def job(rank: int) -> tuple[list[float], float, list[float]]:
        made = torch.ones(2) + 1
        memory = cluster.gpus[0].memory.alias(made)  # as NCCL has it
        before, value = now_in(memory), float(made.sum())
        kept = made + 1  # reads it first
        del made
        float(kept.sum())
        return before, value, now_in(memory)

    def now_in(memory: Tensor) -> list[float]:
        return list((ctypes.c_float * 2).from_address(memory.data_ptr()))

    with emulated():
        (found,) = cluster.run(job)
    assert isinstance(found, tuple)
    before, value, after = found
    assert all(map(isnan, [*before, *after]))
    assert value == 4


# _start, _finish: a gathering that has begun and is not over
def test_another_group_comes_after_a_gathering_that_has_begun() -> None:
    """torch's rule; FSDP2 may gather weights before the ranks' fingerprints are read."""
    cluster = Cluster(2)

    def job(rank: int) -> str:
        groups = EmulatedGroups(cluster.gpus[rank], 5.0)
        processes = GroupRanks(groups.pipeline, groups.limit)
        work, everyone = processes._start(torch.full((1,), rank))
        last = cluster.gpus[rank].last()
        processes._finish(work)
        assert [int(each) for each in everyone] == [0, 1]
        return "" if last is None else last.name

    with emulated():
        assert cluster.run(job) == ["wait for pp allgather"] * 2


# ---- exact


@pytest.mark.parametrize("form", every(5, FORMS))
def test_every_schedule(form: str) -> None:
    assert_exact(built(form, 2, MICROBATCHES), seed=1)


@pytest.mark.parametrize("form", ["zb_v", "dualpipe", "interleaved_zero_bubble"])
def test_every_kind_of_schedule_by_channels(form: str) -> None:
    assert_exact(built(form, 2, MICROBATCHES), seed=2, exchange="channels")


@pytest.mark.sweep
@pytest.mark.parametrize("exchange", ["auto", "channels"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_every_schedule_in_every_size(form: str, ranks: int, exchange: str) -> None:
    for seed in range(3):
        if takes(form, ranks, 2 * ranks):
            assert_exact(built(form, ranks, 2 * ranks), seed=seed, exchange=exchange)


def random_schedules(schedule: Schedule, seed: int, exchange: str) -> None:
    try:
        verify(schedule)
    except ScheduleError:
        return
    assert_exact(schedule, seed=seed, exchange=exchange, steps=1)


RANDOM = given(valid(always_trains=True), st.integers(0, 1000), st.sampled_from(["auto", "channels"]))


@pytest.mark.sweep
@RANDOM
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_schedules_at_random(schedule: Schedule, seed: int, exchange: str) -> None:
    random_schedules(schedule, seed, exchange)


@pytest.mark.sweep
@RANDOM
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_schedules_at_random(schedule: Schedule, seed: int, exchange: str) -> None:
    random_schedules(schedule, seed, exchange)


def test_microbatches_of_other_shapes_and_an_evaluation_between_steps() -> None:
    """The shapes are computed, or sent ahead, which the host has to wait for."""
    sizes = (3, 1, 2, 5)
    batch = [{"x": torch.randn(rows, jobs.WIDTH, dtype=torch.float64)} for rows in sizes]

    def job(rank: int) -> tuple[Found, float, Found]:
        pipe = jobs.pipeline("zb_h1", 3, len(sizes), **options)
        first = step(pipe, batch)
        loss = pipe.evaluate(batch).loss
        again = step(pipe, batch)
        pipe.close()
        return first, loss, again

    for shapes in ("inferred", "exchanged"):
        options: dict[str, Any] = {"shapes": shapes}
        found, _ = on_gpus(job, 3, seed=3)
        options["transport"] = "local"
        expected = job(0)
        assert_equal([each[0] for each in found], expected[0])
        assert_equal([each[2] for each in found], expected[2])
        assert [each[1] for each in found] == [expected[1]] * 3


def test_a_narrow_wire() -> None:
    """What is sent is a copy that nothing else holds."""
    options: dict[str, Any] = {"dtype": torch.float32, "wire_dtype": torch.bfloat16}

    def job(rank: int, **more: Any) -> Found:
        found = jobs.step("1f1b", 2, MICROBATCHES, **options, **more)
        return found.loss, {stage: [g.clone() for g in found.gradients[stage]] for stage in found.gradients}

    found, _ = on_gpus(job, 2, seed=6)
    assert_equal(found, job(0, transport="local"))


def test_a_tied_weight() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    batch = ragged(2)

    def job(rank: int, **options: Any) -> Found:
        pipe = AutoPipeline(ranks=2, schedule="1f1b", microbatches=2, timeout=30, **options).build(config)
        found = step(pipe, batch)
        pipe.close()
        return found

    expected = job(0, transport="local")  # first: the model is traced on no GPU
    found, _ = on_gpus(job, 2, seed=4)
    assert_equal(found, expected)


# ---- the order of streams


@pytest.mark.parametrize("exchange", ["batched", "channels"])
def test_no_message_holds_up_a_host(exchange: str) -> None:
    """0.5.0: a wait with a limit is one of the host on NCCL, and each message had one."""
    found, cluster = on_gpus(trained(built("1f1b", 2, MICROBATCHES), exchange=exchange), 2)
    assert_equal(found, in_one_process(built("1f1b", 2, MICROBATCHES)))
    assert sum(cluster.held_up.values()) > 0  # the ranks compare their batches, and report
    assert not [name for name in cluster.held_up if " to " in name]


def kernels_of_torch(ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch.distributed.pipelining's 1F1B queues for NCCL in a step, by rank: a batch is one kernel."""
    row, queued = torch.ones(1, 4), Counter[int]()

    def count(ops: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
        queued[rank] += len(ops) if len({each.op for each in ops}) < 2 else 1
        return []

    monkeypatch.setattr(schedules, "_batch_p2p", count)
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            stage: Any = PipelineStage(
                nn.Linear(4, 4), rank, ranks, torch.device("cpu"),
                input_args=row.clone().requires_grad_(rank > 0), output_args=row.clone().requires_grad_(),
            )  # fmt: skip
            # the ranks' vote on how shapes are learnt, which the fake group does not deliver
            stage._warmup_backward_result = lambda received_result=None: torch.ones(1, dtype=torch.int32)
            batch = torch.ones(microbatches, 4)
            schedules.Schedule1F1B(stage, microbatches, loss_fn=lambda output, target: output.sum()).step(
                *([batch] if rank == 0 else []),
                target=batch if rank == ranks - 1 else None,
                return_outputs=False,
            )
        finally:
            dist.destroy_process_group()
    return [queued[rank] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_step_queues_no_more_on_nccl_than_torchs(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: two collectives more, of values. The one at the end of a step waited on the GPU for the last
    rank: where ranks share a GPU, while that one computed its last backward there."""
    queued = [Counter[str]() for _ in range(ranks)]
    for name in ("send", "recv", "batch", "allgather", "allreduce"):
        called = getattr(Group, name)

        def counted(self: Group, *args: Any, called: Any = called, name: str = name) -> Any:
            queued[self._gpu.rank][name] += self._backend == "nccl"
            return called(self, *args)

        monkeypatch.setattr(Group, name, counted)

    def job(rank: int) -> Counter[str]:
        pipe = jobs.pipeline("1f1b", ranks, 8)
        before = queued[rank].copy()
        pipe.step(jobs.batch(8, torch.float64))
        counts = queued[rank] - before
        pipe.close()
        return counts

    found, _ = on_gpus(job, ranks)
    monkeypatch.undo()
    assert [set(each) for each in found] == [{"batch"}] * ranks
    theirs = kernels_of_torch(ranks, 8, monkeypatch)
    assert all(0 < ours["batch"] <= other for ours, other in zip(found, theirs, strict=True)), (found, theirs)


# _sum_first is counted, with buckets of _BUCKET_BYTES: several, of a small model
def test_the_sum_of_shared_gradients_holds_up_a_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: once for each bucket."""
    called = Counter[str]()

    def count(where: Any, name: str) -> None:
        function = getattr(where, name)

        def counted(*args: Any, **options: Any) -> Any:
            called[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(where, name, counted)

    for where, name in (
        (distributed, "hold_up_until"), (DistributedTransport, "_sum_first"), (Group, "allreduce"),
    ):  # fmt: skip
        count(where, name)
    monkeypatch.setattr(distributed, "_BUCKET_BYTES", 64)
    schedule = build("dualpipe", ranks=2, microbatches=2)
    found, cluster = on_gpus(trained(schedule, steps=1), 2)
    assert_equal(found, in_one_process(schedule))
    assert not [name for name in cluster.held_up if "shared" in name]
    assert 0 < called["hold_up_until"] == called["_sum_first"] < called["allreduce"]


# _freed, _AHEAD: how far a host is ahead is seen there alone
def test_a_host_runs_ahead_of_its_gpu_but_not_without_end() -> None:
    ahead: list[int] = []

    class Counted(StreamChannels):
        def free(self, message: Any) -> None:
            super().free(message)
            ahead.append(len(self._freed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.runtime.transport.distributed.StreamChannels", Counted)
        assert_exact(built("1f1b", 2, 40), steps=1)
    assert 1 < max(ahead) <= stream_channels._AHEAD


# _connect is left out, and _PATIENCE shorter: the hang that this prevents
@pytest.mark.parametrize("ranks", every(2, [2, 8, 4]))
def test_communicators_are_connected_when_a_pipeline_is_built(ranks: int) -> None:
    """0.5.0: the first step connected them. In dualpipe both ends of it are stages of two directions, whose
    hosts came to different channels first, and each waited for the other one."""
    schedule = build("dualpipe", ranks=ranks, microbatches=ranks)
    assert_exact(schedule, exchange="channels", steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamChannels, "_connect", lambda *_: None)
        patch.setattr(watch, "_PATIENCE", 0.0)
        found, cluster = on_gpus(trained(schedule, exchange="channels", steps=1), ranks)
    assert cluster.hung
    assert all(isinstance(each, BaseException) for each in found)


LOOPED = build("1f1b", ranks=4, microbatches=8, stages_per_rank=2, zero_bubble=True)


# _PATIENCE: a shorter wait
def test_one_hardware_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.0: with CUDA_DEVICE_MAX_CONNECTIONS=1 the receives that are posted ahead held up the ops."""
    monkeypatch.setattr(watch, "_PATIENCE", 0.0)
    assert blocked_in_line(verify(LOOPED)) == [0, 1, 2, 3]
    _, cluster = on_gpus(trained(LOOPED, steps=1, exchange="channels"), 4, connections=1)
    assert cluster.hung
    assert_exact(LOOPED, connections=1, steps=1)  # in batches


@RANDOM
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_is_proven_for_one_queue_runs_in_one(schedule: Schedule, seed: int, exchange: str) -> None:
    try:
        proof = verify(schedule)
    except ScheduleError:
        return
    if exchange == "channels" or not nccl.fits_batches(schedule):
        blocked = bool(blocked_in_line(proof))
    else:
        blocked = False
    _, cluster = on_gpus(
        trained(schedule, steps=1, exchange=exchange), schedule.ranks, seed=seed, connections=1
    )
    assert bool(cluster.hung) == blocked


def test_too_few_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl.CONNECTIONS, "1")
    nccl.check_connections(LOOPED, batched=True)
    nccl.check_connections(build("1f1b", ranks=4, microbatches=8), batched=False)
    with refuses(ConfigError, "CUDA_DEVICE_MAX_CONNECTIONS=1", remedy="exchange='batched'"):
        nccl.check_connections(LOOPED, batched=False)
    monkeypatch.setenv(nccl.CONNECTIONS, "32")
    nccl.check_connections(LOOPED, batched=False)


# ---- failures

LONG = 3000.0  # seconds of the cluster: of real ones fewer, which the watch counts


class Failing(nn.Module):
    """fails: called in the third forward of rank 1; reads: whether other ranks read what they receive"""

    def __init__(self, info: StageInfo, fails: Callable[[], None], reads: bool) -> None:
        super().__init__()
        self.linear, self.calls, self.reads = nn.Linear(4, 4), 0, reads and info.stage != 1
        self.fails = fails if info.stage == 1 else lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not x.is_meta
        if self.calls == 3:
            self.fails()
        if self.reads and not x.is_meta:
            float(x.detach().sum())
        result: Tensor = self.linear(x)
        return result


# _NOTICES, _world, _period: shorter waits
@pytest.mark.parametrize(
    ("kind", "exchange", "reads"),
    every(
        2,
        [
            ("raises", "channels", True),
            ("raises", "batched", False),
            ("stalls", "batched", True),
            ("stalls", "channels", False),
            ("is killed", "channels", False),
            ("is killed", "batched", True),
        ],
    ),
)
def test_a_rank_that_fails(kind: str, exchange: Any, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others raise a typed error that names it, and close; NCCL alone would wait for ever.

    A host that reads a value which never comes is freed by the watch. 0.5.0: the error came a minute late, as
    NCCL's abort, which takes so long after a rank has died, was waited for before it was raised; and a killed
    rank was named as a silent one, after the timeout: over NCCL no connection breaks.
    """
    monkeypatch.setattr(watch, "_NOTICES", 0.3)
    timeout = LONG if kind == "is killed" else 30

    def fail() -> None:
        if kind == "raises":
            raise ValueError("by design")
        cluster.gpus[1].killed = kind == "is killed"
        cluster.pause(cluster.gpus[1], lambda: cluster.gpus[0].ended and cluster.gpus[2].ended)
        raise RuntimeError("too late")

    def job(rank: int) -> BaseException | None:
        pipe = Pipeline.from_provider(
            lambda info: Failing(info, fail, reads), schedule="1f1b", ranks=3, microbatches=4,
            loss_fn=jobs.mean_square, timeout=timeout, exchange=exchange,
        )  # fmt: skip
        transport: Any = pipe._world.transport
        if kind != "raises":  # real seconds: the watch is a thread of its own
            transport.watch._period = 0.2
        if reads and kind == "stalls":
            transport.watch.timeout = 3.0
        try:
            pipe.step({"x": torch.ones(8, 4)})
        except BaseException as error:
            pipe.close()
            return error
        return None

    cluster = Cluster(3, seed=5, patient=True)
    with emulated():
        found = cluster.run(job)
    assert cluster.clock < (timeout + 15 if kind == "stalls" else timeout)  # of an error they know at once
    expected = StalledPeerError if kind == "stalls" else PeerLostError
    for rank in (0, 2):
        assert isinstance(found[rank], PeerLostError | expected), found[rank]
        assert "rank 1" in str(found[rank])
    assert any(isinstance(error, expected) for error in found)
    assert isinstance(found[1], ValueError if kind == "raises" else RuntimeError)


def test_a_rank_that_does_not_step() -> None:
    def job(rank: int) -> BaseException | None:
        pipe = jobs.pipeline("1f1b", 2, 2, exchange="batched")
        if rank == 1:
            return None
        with refuses(StalledPeerError, rule="rank 1") as caught:
            pipe.step(jobs.batch(2, torch.float64))
        return caught.value

    found, _ = on_gpus(job, 2, patient=True)
    assert isinstance(found[0], StalledPeerError)


# _shared: one rank leaves its part out
def test_a_rank_that_does_not_come_to_the_sum_of_shared_gradients() -> None:
    """The step raises the error, before an optimizer may use a sum that is none."""

    def job(rank: int) -> BaseException | None:
        pipe = jobs.pipeline(build("dualpipe", ranks=2, microbatches=2), 2, 2)
        if rank == 1:
            pipe._shared.end = lambda step: None  # type: ignore[method-assign]
            pipe.step(jobs.batch(2, torch.float64))
            return None
        with refuses(
            StalledPeerError, "rank 0 waiting for its part of a shared gradient from rank 1"
        ) as caught:
            pipe.step(jobs.batch(2, torch.float64))
        pipe.close()
        return caught.value

    found, _ = on_gpus(job, 2, patient=True)
    assert isinstance(found[0], StalledPeerError), found


def test_emulated_gpus_leave_no_mode_behind() -> None:
    """0.5.0: after these tests a compiled layer was compiled anew at each call, up to dynamo's limit.

    torch keeps for the whole process whether any thread is in a dispatch mode. Ranks are threads that leave
    their modes in another order than they enter them, and it stayed true.
    """
    torch._dynamo.reset()
    with emulated():
        _python_dispatch._is_in_any_mode_without_ignore_compile_internals = True
        torch._C._dynamo.guards.set_is_in_mode_without_ignore_compile_internals(True)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(torch.sin, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    torch._dynamo.reset()
