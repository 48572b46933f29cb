"""In-memory checkpoints of whole runs: what a run that is lost at any moment goes on from, bit for bit."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoint import in_memory
from penstock.checkpoint.shards import ShardFiles, shards_in
from penstock.errors import CheckpointError, RunError
from penstock.train.checkpoints import NEWEST
from penstock.train.config.sections import TrainConfig
from penstock.train.preflight import preflight
from penstock.train.run import run
from support.folders import flip
from support.jobs_memory import lost, remembered
from support.pool import Pool
from support.refusals import refuses
from support.tiny import (
    GPT2_WITH_DROPOUT,
    QWEN3,
    assert_same_tensors,
    checkpoint,
    config,
    metrics,
    save_model,
    tree,
)

STEPS = 6


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in memory, in this test."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("PENSTOCK_MEMORY", str(folder))
    return folder


def undisturbed(folder: Path, *arguments: Any, **train: Any) -> Path:
    """The last checkpoint of the same run without in-memory checkpoints and without a loss."""
    (folder / "undisturbed").mkdir()
    run(preflight(config(folder / "undisturbed", *arguments, steps=STEPS, **train)))
    return checkpoint(folder / "undisturbed", STEPS)


def lose(made: TrainConfig, step: int, resume: str | None = None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lost(patch, step)
        with refuses(RunError, rule="a process was lost"):
            run(preflight(made, resume))


def go_on(made: TrainConfig, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    run(preflight(made, NEWEST))
    return capsys.readouterr().out


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in metrics(folder) if "loss" in row]


def shards(memory: Path) -> list[Path]:
    """The bytes of the shards in memory, the newest first."""
    found = [shard for folder in memory.iterdir() for shard in shards_in(folder)]
    return [shard.file for shard in sorted(found, key=lambda shard: -shard.mark.step)]


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        pytest.param(GPT2_WITH_DROPOUT, {}, id="dropout"),
        pytest.param(
            {**QWEN3, "tie_word_embeddings": True},
            {"pipeline.schedule": "dualpipe", "pipeline.microbatches": 4},
            id="tied",
        ),
        pytest.param(
            QWEN3,
            {"optimizer": {"name": "adafactor", "learning_rate": 1e-2}},
            id="adafactor",
            marks=pytest.mark.sweep,
        ),
        pytest.param(QWEN3, {"train.precision": "bfloat16"}, id="bfloat16", marks=pytest.mark.sweep),
    ],
)
def test_a_run_goes_on_from_memory_bit_for_bit(
    memory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: dict[str, Any],
    keys: dict[str, Any],
) -> None:
    whole = undisturbed(tmp_path, model, keys)
    made = config(tmp_path, model, keys, steps=STEPS, memory_checkpoint_every=1)
    lose(made, 3)
    lose(made, 5, NEWEST)
    said = go_on(made, capsys)
    assert "going on from step 4, which was in memory" in said
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert len({row["run"] for row in metrics(tmp_path)}) == 1
    assert list(memory.iterdir()) == []


def test_an_adapter_goes_on_from_memory(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "base")

    def made(folder: Path, every: int | None) -> TrainConfig:
        folder.mkdir(exist_ok=True)
        sections = tree(folder)
        sections["model"] = {"path": str(tmp_path / "base")}
        sections["adapter"] = {"r": 2, "dropout": 0.1}
        sections["train"] |= {"steps": STEPS, "memory_checkpoint_every": every}
        return TrainConfig.model_validate(sections)

    run(preflight(made(tmp_path / "whole", None)))
    lose(made(tmp_path, 1), 4)
    assert "going on from step 3" in go_on(made(tmp_path, 1), capsys)
    assert_same_tensors(checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path, STEPS))


# holds up _keep, which a thread runs
def test_no_weight_changes_before_it_is_copied(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread begins late here, when all forwards and backwards of the next step are done."""
    whole = undisturbed(tmp_path, QWEN3, {})
    made = config(tmp_path, QWEN3, {}, steps=STEPS, memory_checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        keep = in_memory.MemoryCheckpoints._keep

        def late(self: Any, *arguments: Any) -> None:
            time.sleep(0.05)
            keep(self, *arguments)

        patch.setattr(in_memory.MemoryCheckpoints, "_keep", late)
        lose(made, 4)
    assert "going on from step 3" in go_on(made, capsys)
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))


def test_every_few_steps_are_kept_and_the_disk_counts_where_it_is_newer(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = undisturbed(tmp_path)
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=2, checkpoint_every=3)
    lose(made, 4)
    assert f"going on from {checkpoint(tmp_path, 3)}" in (said := go_on(made, capsys))
    assert "in memory" not in said
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))
    shutil.rmtree(tmp_path / "out")
    lose(made, 6)
    assert "going on from step 4, which was in memory" in go_on(made, capsys)
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))


# ---- What must not be loaded


def half_written(patch: pytest.MonkeyPatch) -> None:
    """The bytes change, and the process is gone before they are complete."""
    begin = ShardFiles.begin

    def killed(slots: ShardFiles, size: int) -> Any:
        _, data = begin(slots, size)
        data[: size // 2].fill_(77)
        raise SystemExit

    patch.setattr(ShardFiles, "begin", killed)


def uncommitted(patch: pytest.MonkeyPatch) -> None:
    """The bytes are complete, and nothing says so."""

    def killed(*_: Any) -> None:
        raise SystemExit

    patch.setattr(ShardFiles, "commit", killed)


@pytest.mark.parametrize("killed", [half_written, uncommitted])
def test_a_kill_while_a_step_is_kept_costs_that_step(
    memory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    killed: Callable[[pytest.MonkeyPatch], None],
) -> None:
    whole = undisturbed(tmp_path)
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        save = in_memory.MemoryCheckpoints.save

        def then(self: Any, step: int, *arguments: Any) -> None:
            if step == 4:
                killed(patch)
            save(self, step, *arguments)

        patch.setattr(in_memory.MemoryCheckpoints, "save", then)
        with pytest.raises(SystemExit):
            run(preflight(made))
    assert "going on from step 3, which was in memory" in go_on(made, capsys)
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))


def test_damaged_memory_is_passed_over_by_name(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = undisturbed(tmp_path)
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1, checkpoint_every=2)
    lose(made, 6)
    flip(shards(memory)[0])
    said = go_on(made, capsys)
    assert "passed over step 5 in memory: rank 0" in said
    assert "its contents differ from what was written" in said
    assert f"going on from {checkpoint(tmp_path, 4)}" in said
    assert_same_tensors(whole, checkpoint(tmp_path, STEPS))


# spoils the weights that are held, and not those of the pipeline
def test_weights_that_are_not_finite_are_not_loaded(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1)
    with pytest.MonkeyPatch.context() as patch:
        save = in_memory.MemoryCheckpoints.save

        def spoilt(self: Any, step: int, *arguments: Any) -> None:
            if step == 3:
                with torch.no_grad():
                    next(iter(self._holdings._weights))[1][-1, -1] = float("nan")
            save(self, step, *arguments)

        patch.setattr(in_memory.MemoryCheckpoints, "save", spoilt)
        lose(made, 4)
    said = go_on(made, capsys)
    assert "passed over step 3 in memory: rank 0: weight/0/" in said
    assert "NaN or infinity" in said
    assert "going on from step 2" in said


def test_another_model_is_not_put_into_memory_of_the_same_shapes(
    memory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1)
    lose(made, 3)
    other = {**QWEN3, "rms_norm_eps": 1e-3}
    said = go_on(config(tmp_path, other, steps=STEPS, memory_checkpoint_every=1), capsys)
    assert "passed over step 2 in memory: rank 0: a checkpoint in memory: the model's config" in said
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))


def test_only_resume_without_a_path_goes_on_from_memory(memory: Path, tmp_path: Path) -> None:
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1, checkpoint_every=2)
    lose(made, 4)
    assert len(shards(memory)) == 2
    lose(made, 3, str(checkpoint(tmp_path, 2)))
    assert shards(memory) == []


def test_a_fresh_run_gives_the_memory_of_the_last_one_back(memory: Path, tmp_path: Path) -> None:
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1)
    lose(made, 3)
    (before,) = memory.iterdir()
    lose(made, 3)
    (after,) = memory.iterdir()
    assert before != after


def test_changed_data_is_refused(memory: Path, tmp_path: Path) -> None:
    made = config(tmp_path, steps=STEPS, memory_checkpoint_every=1)
    lose(made, 3)
    (tmp_path / "text").write_bytes(bytes(range(32, 127)) * 9)
    with refuses(CheckpointError, "the data of a resumed run", "it is not the data of the checkpoint"):
        run(preflight(made, NEWEST))


def test_a_check_of_all_starts_needs_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"check=always.*memory_checkpoint_every"):
        config(tmp_path, memory_checkpoint_every=1, check="always")


# ---- Over processes


def over(pool: Pool, made: dict[str, Any], memories: list[Path], *arguments: Any) -> tuple[set[str], str]:
    """The errors of all ranks, and what rank 0 says."""
    ended = pool.run(len(memories), remembered, made, list(map(str, memories)), *arguments)
    return {error for _, error in ended}, ended[0][0]


def sections(folder: Path, every: int | None = 1, **parallel: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    made = tree(folder)
    made["train"] |= {"steps": STEPS, "evaluate_every": STEPS, "checkpoint_every": STEPS}
    made["train"]["memory_checkpoint_every"] = every
    made["parallel"] = parallel
    return made


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param("both", marks=pytest.mark.sweep),
        pytest.param("rank 0's", marks=pytest.mark.sweep),
        "rank 1's",
    ],
)
def test_a_lost_host_has_its_copies_on_the_next(pool: Pool, tmp_path: Path, keep: str) -> None:
    whole = sections(tmp_path / "whole", None)
    assert over(pool, whole, [tmp_path] * 2)[0] == {""}
    made, hosts = sections(tmp_path), [tmp_path / "a", tmp_path / "b"]
    assert over(pool, made, hosts, 5)[0] == {"RunError: step 5: a process was lost. Start it again"}
    for host, kept in zip(hosts, ("rank 0's", "rank 1's"), strict=True):
        assert sorted({path.name[:10] for path in shards(host)}) == ["rank-00000", "rank-00001"]
        if keep not in ("both", kept):
            shutil.rmtree(host)
    errors, said = over(pool, made, hosts, None, NEWEST)
    assert errors == {""}
    assert "going on from step 4, which was in memory" in said
    assert_same_tensors(checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path, STEPS))
    assert [list(host.iterdir()) for host in hosts] == [[], []]


@pytest.mark.sweep
def test_a_copy_that_was_cut_short_is_not_taken(pool: Pool, tmp_path: Path) -> None:
    """It would end the start of each attempt alike, where its bytes could not be mapped to be sent."""
    made, hosts = sections(tmp_path), [tmp_path / "a", tmp_path / "b"]
    over(pool, made, hosts, 5)
    shutil.rmtree(hosts[1])
    (newest,) = (path for path in shards(hosts[0])[:2] if path.name.startswith("rank-00001"))
    os.truncate(newest, 64)
    errors, said = over(pool, made, hosts, None, NEWEST)
    assert errors == {""}
    assert "passed over step 4 in memory: rank 1: " in said
    assert "going on from step 3, which was in memory" in said


@pytest.mark.sweep
def test_where_both_copies_are_lost_the_disk_counts(pool: Pool, tmp_path: Path) -> None:
    made, hosts = sections(tmp_path), [tmp_path / "a", tmp_path / "b"]
    made["train"]["checkpoint_every"] = 2
    over(pool, made, hosts, 6)
    for host in hosts:
        for path in host.glob("*/rank-00001*.whole"):
            path.unlink()
    errors, said = over(pool, made, hosts, None, NEWEST)
    assert errors == {""}
    assert "passed over step 5 in memory: the shard of rank 1 is lost" in said
    assert f"going on from {checkpoint(tmp_path, 4)}" in said


@pytest.mark.sweep
@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_a_mesh_with_sharded_weights_goes_on_from_memory(pool: Pool, tmp_path: Path, hosts: str) -> None:
    memories = [tmp_path / name for name in hosts]
    assert over(pool, sections(tmp_path / "whole", None, dp_shard=2), memories)[0] == {""}
    made = sections(tmp_path, dp_shard=2)
    over(pool, made, memories, 5)
    shutil.rmtree(memories[0]) if hosts == "aabb" else None
    errors, said = over(pool, made, memories, None, NEWEST)
    assert errors == {""}
    assert "going on from step 4, which was in memory" in said
    assert_same_tensors(checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path, STEPS))


def test_another_layout_of_ranks_goes_on_from_the_disk(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sections(tmp_path)
    made["train"]["checkpoint_every"] = 2
    over(pool, made, [tmp_path / "a"] * 2, 6)
    monkeypatch.setenv("PENSTOCK_MEMORY", str(tmp_path / "a"))
    run(preflight(TrainConfig.model_validate(made), NEWEST))  # in one process
    said = capsys.readouterr().out
    assert "passed over step 5 in memory: it is of 2 processes, not of 1" in said
    assert f"going on from {checkpoint(tmp_path, 4)}" in said
