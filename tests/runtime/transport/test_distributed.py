"""Real processes over gloo: what they agree on, and what they say when they cannot."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline, StageInfo
from penstock.schedule.simulation.timeline import measure_of
from support import jobs
from support.pool import Pool, start


def test_a_world_that_does_not_fit(pool: Pool) -> None:
    found = pool.run(2, jobs.errors, "world")
    assert found[0] == found[1]
    assert found[0].startswith(
        "WorldSizeError: a world of 2 processes: a pipeline of 3 ranks runs in 3 processes"
    )
    assert found[0].endswith("Start it with torchrun --nproc-per-node 3, or set ranks to 2")
    assert "mesh with pp=2: the pipeline has 4 ranks" in pool.run(2, jobs.errors, "mesh")[1]
    assert "Lay the mesh out so that ranks rise along its pp axis" in pool.run(2, jobs.errors, "order")[1]
    assert "the pipeline's ranks come from the axis named 'pp'" in pool.run(2, jobs.errors, "axis")[0]


@pytest.mark.parametrize("action", ["other length", "other tokens"])
def test_ranks_that_were_given_other_batches(pool: Pool, action: str) -> None:
    """Raw gloo would part-fill a buffer, or train on nonsense."""
    found = pool.run(2, jobs.errors, action)
    assert found[0] == found[1]
    assert found[0].startswith("BatchError: rank 0: schedule")
    assert "all ranks of a pipeline step on the same batch" in found[0]
    if action == "other length":
        assert "the batch input_ids int64[8, 10]" in found[0]
        assert "the batch input_ids int64[8, 11]" in found[0]


def test_a_build_that_is_refused_leaves_no_threads(pool: Pool) -> None:
    """Each process group has some that poll, and a program may try again."""
    for threads in pool.run(2, jobs.refused_builds):
        assert [after - before for before, after in threads] == [0, 0, 0]


def test_a_pipeline_that_was_not_closed_is_not_kept(pool: Pool) -> None:
    """0.5.0: the thread that tells the other ranks how far this one is kept the executor, and all weights."""
    assert pool.run(2, jobs.dropped) == [0, 0]


@pytest.mark.sweep
def test_a_process_group_for_each_channel(pool: Pool) -> None:
    """What NCCL needs; on gloo each channel has a tag."""
    pool.run(4, jobs.group_per_channel, 4)


def test_two_pipelines_in_one_world(pool: Pool) -> None:
    """0.5.0: of a slice of a mesh, mesh["pp"], the pipelines' process groups missed each other."""
    answers = pool.run(4, jobs.two_pipelines, 2)
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert [rank for _, rank in answers[2]] == [2, 3]
    assert answers[0][0][0] != answers[2][0][0]


def test_one_timeline_for_all_ranks(pool: Pool) -> None:
    starts, ends, makespans, ranks = zip(*pool.run(2, jobs.clock), strict=True)
    assert makespans[0] == makespans[1]
    assert 0 < makespans[0] <= max(ends) - min(starts)
    assert ranks == ([0, 1], [0, 1])


def test_no_rank_ends_a_step_before_the_last_one(pool: Pool) -> None:
    """In 1F1B rank 1 ends first. It still waits for the report of rank 0, so a step takes its makespan."""
    pause = 1.0
    ends = pool.run(2, jobs.end_behind_a_slow_rank, pause)
    assert abs(ends[0] - ends[1]) < pause / 2
    assert measure_of() == "makespan"


class Chunk(nn.Module):
    """On stage 2 the second step's second forward gives up."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info, self.linear, self.calls = info, nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta and self.info.stage == 2:
            self.calls += 1
            if self.calls == 8:
                raise ValueError("this layer gave up")
        result: Tensor = self.linear(x)
        return result


def one_rank(rank: int, port: int, file: Path) -> None:
    """What torchrun would start, less the launcher; the error goes into `file`."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="4",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    pipe = Pipeline.from_provider(
        Chunk, schedule="1f1b", ranks=4, microbatches=6, timeout=600,
        loss_fn=lambda output, microbatch: output.square().mean(),
    )  # fmt: skip
    try:
        for _ in range(3):
            pipe.step({"x": torch.ones(12, 4)})
    except Exception as error:
        file.write_text(f"{type(error).__name__}: {error}")
    os._exit(3)


def test_a_rank_that_raises_ends_the_others_without_a_launcher(tmp_path: Path) -> None:
    """In the second step. test_stalls.py has the rest, mostly under the launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    files = [tmp_path / str(rank) for rank in range(4)]
    processes = [start(one_rank, rank, port, file) for rank, file in enumerate(files)]
    try:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [3] * 4
    finally:
        for process in processes:
            process.kill()
    found = [file.read_text() for file in files]
    assert "ValueError: this layer gave up" in found[2]
    for rank in (0, 1, 3):
        assert "PeerLostError" in found[rank]
        assert (
            f"rank 2 on {socket.gethostname()} failed first: 2F1: ValueError: this layer gave up"
            in found[rank]
        )
