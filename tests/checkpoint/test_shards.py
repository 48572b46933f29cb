"""Shards in memory: whole or absent at any moment, of one attempt and step, and given back in the end."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.checkpoint import shards
from penstock.checkpoint.shards import (
    HeldShard,
    HostMemory,
    Mark,
    ShardFiles,
    folder_of,
    newest_in,
    shards_in,
)
from penstock.errors import CheckpointError, ConfigError, RunError
from support.folders import flip
from support.refusals import refuses

RUN = "20260101-000000-abcd"


OPENED: list[HostMemory | ShardFiles] = []


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PENSTOCK_MEMORY", str(tmp_path))
    yield
    while OPENED:
        OPENED.pop().close()


def host(output: Path = Path("out")) -> HostMemory:
    memory = HostMemory(RUN, output)
    OPENED.append(memory)
    return memory


def slots_of(rank: int = 0, world: int = 1) -> ShardFiles:
    slots = ShardFiles(host(), rank, world)
    OPENED.append(slots)
    return slots


def write(slots: ShardFiles, step: int, attempt: str = "a", *, commit: bool = True) -> None:
    name, data = slots.begin(128)
    data.fill_(step)
    if commit:
        slots.commit(name, Mark(step, attempt), {"step": step})


def steps() -> list[int]:
    return sorted(shard.mark.step for shard in shards_in(folder_of(RUN)))


def only() -> HeldShard:
    (shard,) = shards_in(folder_of(RUN))
    return shard


def test_a_write_that_is_cut_short_leaves_the_shard_before() -> None:
    slots = slots_of()
    for step in (1, 2, 3):
        write(slots, step)
    assert steps() == [2, 3]
    write(slots, 4, commit=False)
    assert steps() == [3]
    assert only().read().tolist() == [3] * 128


def test_a_description_that_is_cut_short_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of()
    write(slots, 1)
    monkeypatch.setattr(os, "replace", lambda *_: None)
    write(slots, 2)
    assert steps() == [1]


def test_a_changed_byte_is_noticed() -> None:
    slots = slots_of()
    write(slots, 1)
    found = only()
    flip(found.file)
    with refuses(CheckpointError, "rank-00000", "contents differ"):
        found.read()


def test_a_shard_that_is_cut_short_is_noticed() -> None:
    write(slots_of(), 1)
    found = only()
    os.truncate(found.file, 64)
    with refuses(CheckpointError, rule="contents differ"):
        found.read()


@pytest.mark.parametrize("at", [0, 12, 60])
def test_a_changed_description_describes_nothing(at: int) -> None:
    write(slots_of(), 1)
    flip(only().file.with_name("rank-00000.0.whole"), at)
    assert shards_in(folder_of(RUN)) == []


def test_the_files_are_used_again_by_the_process_that_made_them() -> None:
    slots = slots_of()
    write(slots, 1)
    first = [path.stat().st_ino for path in sorted(folder_of(RUN).glob("rank-00000.?"))]
    for step in (2, 3, 4):
        write(slots, step)
    assert [path.stat().st_ino for path in sorted(folder_of(RUN).glob("rank-00000.?"))] == first


def test_too_little_room_is_found_before_a_byte_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to memory that is not there is SIGBUS, and kills the process."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    slots = slots_of()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with refuses(ConfigError, "train.memory_checkpoint_every", "No space left", "--shm-size"):
        slots.begin(128)
    assert not list(folder_of(RUN).glob("rank-00000.?"))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MEMORY", str(tmp_path / "none"))
    with refuses(ConfigError, rule="checkpoint can be kept", remedy="PENSTOCK_MEMORY"):
        host()


# _PATIENCE: a shorter wait
def test_a_process_of_the_last_attempt_that_lives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_PATIENCE", 0.1)
    other = slots_of()
    with refuses(RunError, rule="checkpoints of rank 0"):
        slots_of()
    other.close()
    slots_of()


def test_the_newest_checkpoint_has_a_shard_of_each_rank_of_one_attempt() -> None:
    ranks = [slots_of(rank, 2) for rank in range(2)]
    assert newest_in(RUN) is None
    write(ranks[0], 1)
    assert newest_in(RUN) is None
    write(ranks[1], 1, attempt="b")
    assert newest_in(RUN) is None
    write(ranks[1], 1)
    write(ranks[0], 2)
    found = newest_in(RUN)
    assert found is not None
    assert found[0] == 1


def test_processes_of_a_host_know_it_by_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host().name == host().name
    name = host().name
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("PENSTOCK_MEMORY", str(tmp_path / "other"))
    assert host().name != name


@pytest.mark.parametrize(
    ("owner", "lives", "goes"),
    [("another", False, True), ("another", True, False), (RUN, False, False), (None, False, False)],
    ids=["superseded", "superseded and alive", "the last run", "unknown"],
)
def test_memory_that_nobody_goes_on_from_is_given_back(
    tmp_path: Path, owner: str | None, lives: bool, goes: bool
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    memory = host(output)
    if not lives:
        memory.close()
    shards.remove_superseded({output: owner}.get)
    assert folder_of(RUN).exists() is not goes


def test_memory_whose_output_folder_is_gone_is_given_back(tmp_path: Path) -> None:
    host(tmp_path / "out").close()
    shards.remove_superseded(lambda output: None)
    assert not folder_of(RUN).exists()


def foreign(folder: Path) -> Path:
    """A folder as another user makes it, with a pipe in the place of its first file."""
    folder.mkdir()
    os.mkfifo(folder / "host")
    os.mkfifo(folder / "rank-00000.0.whole")
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        folder.chmod(0o777)
    return folder


def test_a_folder_of_another_user_stops_nobody(tmp_path: Path) -> None:
    """Unreleased: a pipe at /dev/shm/penstock-x/host, of any user, made every start on the machine wait."""
    folder = foreign(tmp_path / "penstock-of-another")
    shards.remove_superseded(lambda output: "another")
    assert folder.exists()
    assert newest_in("of-another") is None


def test_no_checkpoint_is_kept_in_a_folder_of_another_user() -> None:
    """Who may write there can read the weights, or give others."""
    foreign(folder_of(RUN))
    with refuses(ConfigError, rule="user"):
        host()


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder_of(RUN).symlink_to(tmp_path / "elsewhere")
    with refuses(ConfigError, rule="it is no folder"):
        host()


def test_a_pipe_in_this_users_own_folder_is_refused_too() -> None:
    folder_of(RUN).mkdir(mode=0o700)
    os.mkfifo(folder_of(RUN) / "host")
    with refuses(ConfigError, rule="it is a pipe"):
        host()


def test_a_torch_tensor_of_each_dtype_lies_where_the_table_says() -> None:
    tensors = {
        "a": torch.arange(3, dtype=torch.bfloat16),
        "b": torch.tensor(7, dtype=torch.int64),
        "c": torch.empty(0, 4),
        "d": torch.randn(2, 5, dtype=torch.float64),
    }
    table, size = shards.laid_out(tensors)
    data = torch.zeros(size, dtype=torch.uint8)
    for name, view in shards.views(data, table):
        view.copy_(tensors[name])
    assert all(torch.equal(view, tensors[name]) for name, view in shards.views(data, table))
    assert size % 64 == 0
