"""Each file is hashed by one process, while others read, and what one finds altered all raise."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from models.weights.test_folder import write_two
from penstock.errors import AlteredError, CheckpointError, ConfigError, PeerLostError
from penstock.models.weights.folder import Hashed, write_folder
from penstock.models.weights.hashes import hashed_meanwhile, share
from penstock.runtime.ranks import Ranks
from support.folders import flip
from support.ranks import on_threads


def listed(**sizes: int) -> Hashed:
    return {name.replace("_", "-"): {"size": size, "sha256": ""} for name, size in sizes.items()}


STAGES = {f"{kind}_{stage}": 100 for kind in ("model", "optimizer") for stage in range(4)}
UNEVEN = {"model_1": 70, "model_2": 10, "model_3": 45, "model_4": 0, "model_5": 200, "config": 3, "empty": 0}


@pytest.mark.parametrize("sizes", [STAGES, UNEVEN, {}], ids=["stages", "uneven", "none"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_file_has_one_process_and_their_bytes_are_balanced(sizes: dict[str, int], count: int) -> None:
    files = listed(**sizes)
    shares = [share(files, index, count) for index in range(count)]
    assert sorted(name for names in shares for name in names) == sorted(files)
    for kind in {name.partition("-")[0] for name in files}:
        held = {name: entry["size"] for name, entry in files.items() if name.partition("-")[0] == kind}
        most = max(sum(held.get(name, 0) for name in names) for names in shares)
        assert most <= sum(held.values()) / count + max(held.values()) + len(held)


def test_a_process_hashes_what_its_own_stage_reads() -> None:
    files = listed(**STAGES, state=5)
    assert share(files, 1, 4) == ["model-1", "optimizer-1"]
    assert share(files, 1, 2) == ["model-2", "model-3", "optimizer-2", "optimizer-3", "state"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "checkpoint", write_two, Ranks())
    return tmp_path / "checkpoint"


def raised(folder: Path, error: BaseException | None = None, on: int = 0) -> list[BaseException | None]:
    """What three processes raise, one of which raises `error` while it reads."""

    def read(processes: Ranks) -> None:
        with hashed_meanwhile(folder, processes):
            if error is not None and on in (processes.index, -1):
                raise error

    return on_threads(3, read)


def test_all_processes_raise_what_one_finds(folder: Path) -> None:
    assert raised(folder) == [None] * 3
    flip(folder / "weights.bin")
    errors = raised(folder)
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, AlteredError) for error in errors)
    assert "weights.bin, on process 1: its contents differ from what was written" in str(errors[0])


def test_a_file_that_is_gone_is_no_altered_one(folder: Path) -> None:
    (folder / "weights.bin").unlink()
    for error in raised(folder):
        assert type(error) is CheckpointError
        assert "weights.bin, on process 1: it cannot be read (No such file or directory)" in str(error)


def test_an_altered_file_comes_before_the_error_that_it_may_have_caused(folder: Path) -> None:
    error = ConfigError("layers=3", "they are 4", "Give 4")
    assert raised(folder, error, on=-1) == [error] * 3
    flip(folder / "inner" / "config.json")
    assert all(isinstance(found, AlteredError) for found in raised(folder, error, on=-1))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), PeerLostError("rank 1", "it is gone", "Look there")])
def test_who_was_interrupted_waits_for_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """No other process takes part, and the file that is being hashed is left at once."""

    def endless(_: Path, piece: int | None, stopped: Callable[[], bool]) -> str:
        while not stopped():
            time.sleep(0.01)
        return ""

    monkeypatch.setattr("penstock.models.weights.folder.sha256_of", endless)
    flip(folder / "weights.bin")
    with pytest.raises(type(error)), hashed_meanwhile(folder, Ranks()):
        raise error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-hash")]
