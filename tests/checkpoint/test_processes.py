"""Checkpoints of several processes: what fails on one is raised on all, and the next call starts afresh.

The functions above the tests run on each rank. `mesh` stands for two pipelines side by side, of which the
first writes, and both read.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Optimizer

from penstock import Axes, Pipeline
from penstock.checkpoint.optimizer_state import OptimizerState
from penstock.checkpoint.save_load import CheckpointWriter, load_checkpoint, save_checkpoint
from penstock.errors import CheckpointError, PeerError, RunError
from penstock.models.weights import folder
from penstock.models.weights.folder import sha256_of
from penstock.models.weights.saved import FileLayout
from penstock.runtime.sharded_weights import local_shard
from support.covering import every
from support.folders import check_folder, flip, relist
from support.jobs_checkpoint import advance, assert_same_run, begin, failing_writes, go_on, make
from support.pool import Pool
from support.refusals import refuses


def error_of(work: Callable[[], object]) -> str:
    """The error that `work` ends in."""
    with pytest.raises((CheckpointError, RunError, OSError, ValueError)) as caught:
        work()
    return f"{caught.type.__name__}: {caught.value}"


def mesh() -> tuple[Pipeline, list[Optimizer]]:
    """Two pipelines, whose optimizers hold something."""
    pipe, optimizers = make(dist.get_world_size() // 2, "1f1b", axes=Axes(dp_shard=2))
    for parameter in pipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return pipe, optimizers


@pytest.mark.sweep
@pytest.mark.parametrize(("ranks", "family"), [(3, "llama"), (4, "mixtral")])
def test_processes_go_on_where_others_were(pool: Pool, tmp_path: Path, ranks: int, family: str) -> None:
    path = tmp_path / "checkpoint"
    before = pool.run(ranks, begin, ranks, "zb_v", family, str(path))
    after = pool.run(2, go_on, 2, "1f1b", family, str(path))
    assert all(losses == before[0] for losses in before)
    assert all(losses == after[0] for losses in after)
    assert_same_run(family, path, before[0], after[0])
    names = {file.name for file in path.iterdir()}
    assert {f"random-{n:05d}-of-{ranks:05d}.safetensors" for n in range(1, ranks + 1)} <= names


def failing_write(path: str) -> None:
    """Rank 1's fails, which all ranks raise at the next checkpoint, and at the end."""
    pipe, optimizers = make(dist.get_world_size(), "1f1b")
    writer = CheckpointWriter(pipe)
    waits: list[Callable[[], None]] = [lambda: writer.save(path, optimizers), writer.wait]
    for wait in waits:
        with failing_writes(1):
            writer.save(path, optimizers)
            advance(pipe, optimizers, 1, 1)
            error = error_of(wait)
        assert "OSError: disk full" in error
        assert "process 1" in error
    writer.save(path, optimizers)
    writer.wait()
    load_checkpoint(path, pipe, optimizers)
    pipe.close()


def test_a_failure_on_one_process_is_raised_on_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, failing_write, str(tmp_path / "checkpoint"))
    check_folder(tmp_path / "checkpoint")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def failing_follower(path: str) -> None:
    """There is nothing to wait for once the failure has been raised, and the next write is fresh."""
    pipe, optimizers = mesh()
    writer = CheckpointWriter(pipe)

    def then() -> None:
        raise OSError("no room")

    writer.save(path, optimizers, then=then)
    error = error_of(writer.wait)
    assert "OSError: no room" in error
    assert error.startswith(f"RunError: checkpoint {path}, on process 0: it was written, and ")
    writer.wait()
    writer.save(path, optimizers)
    writer.wait()
    pipe.close()


def test_a_failed_write_is_over_on_all_pipelines_of_a_mesh(pool: Pool, tmp_path: Path) -> None:
    """0.5.0 let all but the first wait for it once more, alone, for an hour."""
    pool.run(2, failing_follower, str(tmp_path / "checkpoint"))
    check_folder(tmp_path / "checkpoint")


def dropped(path: str, rank: int, axes: Axes | None) -> None:
    """One rank gives a write up."""
    pipe, optimizers = make(1 if axes else dist.get_world_size(), "1f1b", axes=axes)
    writer = CheckpointWriter(pipe)
    writer.save(f"{path}/first", optimizers)
    if dist.get_rank() == rank:
        writer.drop()
    for _ in range(2):
        with refuses(RunError, "abandoned a write", "still be in that write"):
            writer.save(f"{path}/second", optimizers)
    with CheckpointWriter(pipe) as another:
        another.save(f"{path}/third", optimizers)
    pipe.close()


@pytest.mark.parametrize(("rank", "axes"), [(1, None), (0, Axes(dp_shard=2)), (1, Axes(dp_shard=2))], ids=str)
def test_a_writer_that_gave_a_write_up_takes_no_more(
    pool: Pool, tmp_path: Path, rank: int, axes: Axes | None
) -> None:
    """0.4.0 let the next write share the group that the one given up might still read from. 0.5.0 forgot on
    a mesh that it was given up, but for the pipeline that wrote, and the others waited for that."""
    pool.run(2, dropped, str(tmp_path), rank, axes)
    check_folder(tmp_path / "third")
    assert not (tmp_path / "second").exists()


def slow_on_one(path: str, axes: Axes | None) -> None:
    """Rank 1 writes for longer than the timeout."""
    pipe, optimizers = make(1 if axes else 2, "1f1b", axes=axes, timeout=1.0)
    written = OptimizerState.write

    def slowly(*args: Any) -> Any:
        time.sleep(2.0)
        return written(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == (0 if axes else 1):
            patch.setattr(OptimizerState, "write", slowly)
        save_checkpoint(path, pipe, optimizers)
    advance(pipe, optimizers, 1, 1)
    pipe.close()


@pytest.mark.parametrize("axes", every(2, [None, Axes(dp_shard=2)]), ids=str)
def test_a_foreground_checkpoint_may_take_longer_than_the_timeout(
    pool: Pool, tmp_path: Path, axes: Axes | None
) -> None:
    """0.5.0: the others gave the rank up that still wrote, and blamed it; over gloo that rank aborted."""
    pool.run(2, slow_on_one, str(tmp_path / "checkpoint"), axes)
    check_folder(tmp_path / "checkpoint")


def stopped_in_a_write(path: str) -> tuple[str, float]:
    """Rank 1's process is stopped while its thread writes. Returns the error, and the seconds until then."""
    pipe, optimizers = make(2, "1f1b", timeout=2.0)
    processes, written, begun = pipe.processes.gather(os.getpid()), OptimizerState.write, Event()

    def stop(*args: Any) -> Any:
        begun.set()
        os.kill(os.getpid(), signal.SIGSTOP)
        return written(*args)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(OptimizerState, "write", stop)
        with pytest.raises(PeerError) as caught, CheckpointWriter(pipe) as writer:  # noqa: PT012
            writer.save(path, optimizers)
            if dist.get_rank() == 1:
                begun.wait(30)
            for step in range(1, 1000):
                advance(pipe, optimizers, step, step)
    took, words = time.monotonic() - began, str(caught.value)
    pipe.close()
    del pipe, optimizers, writer, caught
    if dist.get_rank() == 0:
        gc.collect()
        while Path(f"/proc/{processes[1]}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)  # it would stop later, in another test
        os.kill(processes[1], signal.SIGCONT)
    return words, took


def test_a_rank_that_is_stopped_in_a_background_write_costs_no_more_than_the_timeout(
    pool: Pool, tmp_path: Path
) -> None:
    """0.5.0: 30 s more, for which the others waited for their own write, which waited for that rank. Gloo
    frees a group only when all that was begun in it has ended: for that a rank that failed waited an hour."""
    (words, took), _ = pool.run(2, stopped_in_a_write, str(tmp_path / "checkpoint"))
    assert f"rank 1 on {socket.gethostname()} has been silent" in words
    assert took < 2 + 5


def unfit_on_one(path: str) -> None:
    """Rank 1's optimizer is another one."""
    pipe, optimizers = make(dist.get_world_size(), "1f1b")
    save_checkpoint(path, pipe, optimizers)
    advance(pipe, optimizers, 1, 1)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    rank = dist.get_rank()
    other: Any = SGD(pipe.parameters(), lr=0.1) if rank == 1 else optimizers
    error = error_of(lambda: load_checkpoint(path, pipe, other))
    assert error.startswith("UnfitError: ")
    assert "was trained by AdamW, on process 1: here SGD trains it" in error
    assert all(map(torch.equal, before, (parameter.detach() for parameter in pipe.parameters())))
    pipe.close()


def test_what_does_not_fit_on_one_process_changes_none(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, unfit_on_one, str(tmp_path / "checkpoint"))


def failing_layout(path: str) -> None:
    """Rank 1 finds no names for its weights in files."""
    pipe, optimizers = make(dist.get_world_size(), "1f1b")
    rank, of = dist.get_rank(), FileLayout.of

    def failing(*arguments: Any) -> FileLayout:
        if rank == 1:
            raise ValueError("no names")
        return of(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileLayout, "of", failing)
        error = error_of(lambda: save_checkpoint(path, pipe, optimizers))
    assert error.startswith(("RunError: process 1", "ValueError")[rank])
    assert "no names" in error
    pipe.close()


def test_a_layout_that_fails_on_one_process_is_raised_on_all(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, failing_layout, str(tmp_path / "checkpoint"))
    assert list(tmp_path.iterdir()) == []


def torn_on_one(path: str, what: str) -> str:
    """Each rank of a mesh reads a copy of its own, and rank 1's is torn. The error."""
    pipe, optimizers = mesh()
    save_checkpoint(f"{path}/0", pipe, optimizers, {"step": 1})
    rank = dist.get_rank()
    folder = Path(path) / str(rank)
    if rank == 1:
        shutil.copytree(f"{path}/0", folder)
        (folder / "state.json").write_text("{" if what != "weights" else "{}")
        if what != "manifest":
            relist(folder)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        for parameter in pipe.parameters():
            parameter.zero_()
        if what == "weights" and rank == 1:
            patch.setattr(pipe, "load_weights", lambda _: (folder / "none").read_bytes())
        error = error_of(lambda: load_checkpoint(folder, pipe, optimizers))
    unchanged = not any(bool(local_shard(parameter).any()) for parameter in pipe.parameters())
    assert unchanged == (what != "weights")  # NaN, as those of rank 0 have been read
    pipe.close()
    return error


@pytest.mark.parametrize("what", ["manifest", "state", "weights"])
def test_what_one_pipeline_of_a_mesh_cannot_read_is_raised_on_all(
    pool: Pool, tmp_path: Path, what: str
) -> None:
    """0.5.0 let the others load and step alone."""
    other, own = pool.run(2, torn_on_one, str(tmp_path), what)
    assert own.startswith("CheckpointError: ")
    assert ", on process 1: " in own
    assert other == own


def hashed_on_a_mesh(path: str) -> list[str]:
    """The files that this rank hashes as it loads, from a mesh of two pipelines. Then one is altered."""
    pipe, optimizers = mesh()
    save_checkpoint(path, pipe, optimizers, {"step": 1})
    names: list[str] = []

    def noted(file: Path, piece: int | None, stopped: Callable[[], bool]) -> str:
        names.append(file.name)
        return sha256_of(file, piece, stopped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "sha256_of", noted)
        assert load_checkpoint(path, pipe, optimizers) == {"step": 1}
    before = [local_shard(parameter).detach().clone() for parameter in pipe.parameters()]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(path, f"{path}-altered")
        flip(Path(f"{path}-altered", "optimizer-00002-of-00002.safetensors"))
    dist.barrier()
    error = error_of(lambda: load_checkpoint(f"{path}-altered", pipe, optimizers))
    assert error.startswith("AlteredError: checkpoint ")
    assert "optimizer-00002-of-00002.safetensors, on process" in error
    assert all(local_shard(parameter).isnan().all() for parameter in pipe.parameters())
    load_checkpoint(path, pipe, optimizers)
    assert all(torch.equal(a, local_shard(b)) for a, b in zip(before, pipe.parameters(), strict=True))
    pipe.close()
    return names


@pytest.mark.sweep
def test_each_file_is_hashed_once_by_all_pipelines_of_a_mesh(pool: Pool, tmp_path: Path) -> None:
    """0.5.0 hashed it once for each pipeline, and raised other errors on processes that found nothing."""
    found = pool.run(4, hashed_on_a_mesh, str(tmp_path / "checkpoint"))
    names = sorted(file.name for file in (tmp_path / "checkpoint").iterdir() if file.name != "manifest.json")
    assert sorted(name for each in found for name in each) == names


def not_to_be_kept_on_one(path: str, rank: int, what: str) -> None:
    pipe, optimizers = mesh()
    mine = dist.get_rank() == rank
    if mine and what == "odd":
        optimizers[0].state[list(pipe.parameters())[1]]["odd"] = object()
    state = {"x": torch.ones(1)} if mine and what == "state" else None
    error = error_of(lambda: save_checkpoint(path, pipe, optimizers, state))
    assert ("state['x'] is a Tensor" if what == "state" else "holds 'odd' of model.") in error
    assert error.startswith("CheckpointError: ")
    assert f", on process {rank}: " in error
    pipe.close()


@pytest.mark.parametrize(("what", "rank"), [("state", 0), ("odd", 1)])
def test_what_one_pipeline_of_a_mesh_cannot_keep_is_raised_on_all(
    pool: Pool, tmp_path: Path, what: str, rank: int
) -> None:
    """0.5.0 left the others in a collective; each optimizer's part of it was gathered before the next one was
    looked at."""
    pool.run(2, not_to_be_kept_on_one, str(tmp_path / "checkpoint"), rank, what)
    assert list(tmp_path.iterdir()) == []


def random_numbers(path: str) -> list[float]:
    """What a rank, seeded by itself, draws after it saved, and again after it went on from there."""
    pipe, optimizers = mesh()
    torch.manual_seed(dist.get_rank())
    save_checkpoint(path, pipe, optimizers)
    drawn = torch.rand(3).tolist()
    load_checkpoint(path, pipe, optimizers)
    assert torch.rand(3).tolist() == drawn
    pipe.close()
    return drawn


def test_each_process_of_a_mesh_gets_its_own_random_numbers_back(pool: Pool, tmp_path: Path) -> None:
    """0.5.0 gave all pipelines those of the first."""
    found = pool.run(4, random_numbers, str(tmp_path / "checkpoint"))
    assert len(set(map(tuple, found))) == 4
